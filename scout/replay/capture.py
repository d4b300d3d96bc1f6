"""What a module was called with and which gradient came back, on the steps that are checked.

Hooks are there only while a check is due at the end of the step; on all others nothing of ours is
in the model and no tensor is held.  Of a step's several passes the first one with a gradient is
kept, or the first one when none has.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from scout.replay.device import Autocast, autocast_now
from scout.replay.tree import describe, map_tensors, tensors_of

INVOCATIONS_MAX: Final = 2


@dataclass(slots=True)
class Invocation:
    """One call: detached copies of what went in; gradients of the outputs, as far as they came.

    ``wants_grad`` says of each output tensor whether it has a gradient to come.
    """

    args: Any
    kwargs: Any
    autocast: Autocast
    wants_grad: tuple[bool, ...] = ()
    gradients: dict[int, Any] = field(default_factory=dict)

    @property
    def has_gradients(self) -> bool:
        """Whether every gradient that was to come is there, and there is one."""
        return any(self.wants_grad) and len(self.gradients) == sum(self.wants_grad)

    def contract(self) -> str:
        """Return what must be equal on all peers for a replay to mean anything."""
        grads = [self.gradients[at] for at in sorted(self.gradients)]
        return "|".join(
            (
                describe((self.args, self.kwargs)),
                f"autocast {self.autocast.enabled} {self.autocast.dtype}",
                f"gradients {self.wants_grad} {describe(grads)}",
            )
        )


class Capture:
    """The hooks on one module for one step."""

    def __init__(self, module: Any, device: Any) -> None:
        self._device = device
        self._kept: list[Invocation] = []
        self._running: list[Invocation] = []
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    def close(self) -> Invocation | None:
        """Take the hooks away and return what was captured, or None."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        whole = next((it for it in self._kept if it.has_gradients), None)
        found = whole or (self._kept[0] if self._kept else None)
        self._kept = []
        if found is not None and not found.has_gradients:
            found.wants_grad, found.gradients = (), {}
        return found

    def _before(self, _module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or any(it.has_gradients for it in self._kept):
            return
        own_args, own_kwargs = map_tensors((args, kwargs), _copy)
        self._running.append(
            Invocation(args=own_args, kwargs=own_kwargs, autocast=autocast_now(self._device))
        )

    def _after(self, _module: Any, _args: Any, output: Any) -> None:
        if not self._running:
            return
        invocation = self._running.pop()
        outputs = tensors_of(output)
        invocation.wants_grad = tuple(bool(it.requires_grad) for it in outputs)
        for at, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(_Keep(invocation, at))
        self._kept = [*self._kept[: INVOCATIONS_MAX - 1], invocation]


@dataclass(frozen=True, slots=True)
class _Keep:
    """A tensor hook that leaves the gradient as it is and keeps a copy."""

    invocation: Invocation
    at: int

    def __call__(self, gradient: Any) -> None:
        self.invocation.gradients.setdefault(self.at, gradient.detach().clone())


def _copy(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
