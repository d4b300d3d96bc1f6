"""Replaying an optimizer's step on a bounded slice: every peer executes one peer's update.

Before the step of a checked boundary a slice of one parameter, its gradient and its state are
copied; the next check takes the next slice.  After it the source's copy goes to all peers, each
runs the optimizer's own code on it in isolation, and the results are compared.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scout.replay.exchange import broadcast, gather
from scout.replay.peers import Peers
from scout.replay.tree import describe
from scout.signature import local_part

_PARTITIONED = "ZeroRedundancyOptimizer"


def is_partitioned(optimizer: Any) -> bool:
    """Whether the optimizer's state has one owner each, so that there is nothing to compare."""
    return any(it.__name__ == _PARTITIONED for it in type(optimizer).__mro__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one update of one slice begins from.  ``tensors``: parameter, gradient, then state."""

    optimizer: Any
    options: dict[str, Any]
    keys: tuple[str, ...]
    tensors: list[Any]
    contract: str


@dataclass(slots=True)
class OptimizerWatch:
    """Copies a slice before the step of a checked boundary."""

    optimizers: Sequence[Any]
    elements_max: int
    taken: Slice | None = None
    why_not: str = "no optimizer stepped"
    _cursor: int = 0
    _handles: list[Any] = field(default_factory=list)

    def arm(self) -> None:
        """Copy at the next step."""
        self.taken, self.why_not = None, "no optimizer stepped"
        self._handles = [it.register_step_pre_hook(self._before) for it in self.optimizers]

    def close(self) -> Slice | None:
        """Stop, and return what was copied."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        taken, self.taken = self.taken, None
        return taken

    def _before(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self.taken is not None:
            return
        try:
            self._copy(optimizer)
        except Exception as error:  # noqa: BLE001 - inside somebody's optimizer.step
            self.why_not = f"{type(error).__name__}: {error}"

    def _copy(self, optimizer: Any) -> None:
        pieces = self._pieces(optimizer)
        if not pieces:
            self.why_not = "no parameter has a gradient"
            return
        group, parameter, start = pieces[self._cursor % len(pieces)]
        self._cursor += 1
        options = {key: value for key, value in group.items() if key != "params"}
        whole = local_part(parameter)
        state = optimizer.state.get(parameter, {})
        keys = tuple(sorted(key for key, value in state.items() if torch.is_tensor(value)))
        plain = {key: value for key, value in state.items() if not torch.is_tensor(value)}
        if not all(it is None or isinstance(it, bool | int | float | str) for it in plain.values()):
            self.why_not = f"{type(optimizer).__name__} keeps state that is no tensor"
            return
        end = min(start + self.elements_max, whole.numel())
        named = [parameter, parameter.grad, *(state[key] for key in keys)]
        tensors = [_piece(local_part(it), whole.numel(), start, end) for it in named]
        self.taken = Slice(
            optimizer=optimizer,
            options={**options, "_plain_state": plain},
            keys=keys,
            tensors=tensors,
            contract=f"{type(optimizer).__name__} {keys} {describe(options)} {describe(plain)} "
            f"{[(str(it.dtype), it.dim()) for it in tensors]}",
        )

    def _pieces(self, optimizer: Any) -> list[tuple[dict[str, Any], Any, int]]:
        found = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and gradient.layout is torch.strided:
                    size = local_part(parameter).numel()
                    starts = range(0, size, self.elements_max)
                    found += [(group, parameter, start) for start in starts]
        return found


def _piece(tensor: Any, whole: int, start: int, end: int) -> Any:
    if tensor.dim() and tensor.numel() == whole:
        return tensor.reshape(-1)[start:end].clone()
    return tensor.clone()


def exchange_slice(taken: Slice, peers: Peers) -> Slice:
    """Return the source's slice on every peer; its length is the source's too."""
    is_source = peers.rank == peers.ranks[0]
    sizes = gather([it.numel() for it in taken.tensors], peers.control)[0]
    places = [
        it if it.numel() == size or not it.dim() else it.new_empty(size)
        for it, size in zip(taken.tensors, sizes, strict=True)
    ]
    moved = broadcast(places, peers.ranks[0], peers.data, is_source=is_source)
    return Slice(
        optimizer=taken.optimizer,
        options=taken.options,
        keys=taken.keys,
        tensors=moved,
        contract=taken.contract,
    )


def step_slice(taken: Slice) -> list[Any]:
    """Return the parameter and the state after one step on copies.  Raises what the step raises.

    The optimizer's class is called on a copy of the object: a scheduler that wrapped the live
    object's ``step`` is not called, and neither are its hooks.
    """
    parameter = taken.tensors[0].clone().requires_grad_(True)
    parameter.grad = taken.tensors[1].clone()
    options = dict(taken.options)
    state = dict(options.pop("_plain_state"))
    state |= {key: it.clone() for key, it in zip(taken.keys, taken.tensors[2:], strict=True)}
    kind = type(taken.optimizer)
    copy = object.__new__(kind)
    copy.__dict__.update(taken.optimizer.__dict__)
    copy.__dict__.pop("step", None)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        copy.__dict__[name] = OrderedDict()
    copy.__dict__["param_groups"] = [{**options, "params": [parameter]}]
    copy.__dict__["state"] = _state_of(taken.optimizer, parameter, state)
    kind.step(copy)
    after = copy.__dict__["state"].get(parameter, {})
    return [
        parameter.detach(),
        *(after[key] for key in sorted(after) if torch.is_tensor(after[key])),
    ]


def _state_of(optimizer: Any, parameter: Any, state: dict[str, Any]) -> Any:
    fresh = type(optimizer.state)(dict) if hasattr(optimizer.state, "default_factory") else {}
    if state:
        fresh[parameter] = state
    return fresh
