"""Running one captured call on isolated state: what goes in, what comes out, how long it took.

The source peer's inputs, gradients and random states reach all peers first; then each runs forward
and ``autograd.grad``, which touches no live gradient.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from scout.replay import device as on
from scout.replay.capture import Invocation
from scout.replay.exchange import broadcast
from scout.replay.isolate import isolated, leaves, materialized
from scout.replay.peers import Peers
from scout.replay.tree import map_tensors, tensors_of

REFERENCE_ULPS: Final = 256.0
"""Rounding steps of the largest value by which a long sum in the model's precision may be off."""


@dataclass(slots=True)
class Prepared:
    """Everything a module's replay needs, after the last collective."""

    module: Any
    parameters: dict[int, Any]
    buffers: dict[int, Any]
    own_state: list[Any]
    """What this rank owns of the parameters."""
    args: Any
    kwargs: Any
    gradients: list[Any]
    wants_grad: tuple[bool, ...]
    autocast: on.Autocast
    random_states: list[Any]
    collectives: list[tuple[str, tuple[int, ...], int, float]]
    """Kind, members, bytes and milliseconds of the collectives that brought all this here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Surfaces of one replay, as lists of tensors, and its time.  ``error`` where it raised."""

    output: list[Any]
    input_gradient: list[Any]
    parameter_gradient: list[Any]
    took_ms: float
    error: str = ""


def prepare(module: Any, invocation: Invocation, peers: Peers) -> Prepared:
    """Hand the source's call to every peer.  A collective of the peers, and of a shard group."""
    on.synchronize(peers.device)
    started = time.perf_counter()
    parameters = materialized(module)
    on.synchronize(peers.device)
    gathered_ms = (time.perf_counter() - started) * 1000
    grads = [invocation.gradients[at] for at in sorted(invocation.gradients)]
    inputs = tensors_of((invocation.args, invocation.kwargs))
    states = on.random_states(peers.device)
    is_source = peers.rank == peers.ranks[0]
    started = time.perf_counter()
    moved = broadcast([*inputs, *grads], peers.ranks[0], peers.data, is_source=is_source)
    on.synchronize(peers.device)
    size = sum(it.numel() * it.element_size() for it in moved)
    told = [("replay_broadcast", peers.ranks, size, (time.perf_counter() - started) * 1000)]
    told += _gathering(module, parameters, gathered_ms)
    states = broadcast(states, peers.ranks[0], peers.control, is_source=is_source)
    for mine, theirs in zip(inputs, moved, strict=False):
        theirs.requires_grad_(mine.requires_grad)
    left = iter(moved)
    args, kwargs = map_tensors((invocation.args, invocation.kwargs), lambda _: next(left))
    return Prepared(
        module=module,
        parameters=parameters,
        buffers=_buffers(module, peers),
        own_state=list(module.parameters()),
        args=args,
        kwargs=kwargs,
        gradients=moved[len(inputs) :],
        wants_grad=invocation.wants_grad,
        autocast=invocation.autocast,
        random_states=states,
        collectives=told,
    )


def _gathering(
    module: Any, parameters: dict[int, Any], took_ms: float
) -> list[tuple[str, tuple[int, ...], int, float]]:
    """Return the gather of sharded parameters as a timed collective, if there was one."""
    sharded = next((it for it in module.parameters() if hasattr(it, "device_mesh")), None)
    if sharded is None:
        return []
    dimension = next((at for at, it in enumerate(sharded.placements) if it.is_shard()), None)
    if dimension is None:
        return []
    members = tuple(dist.get_process_group_ranks(sharded.device_mesh.get_group(dimension)))
    size = sum(it.numel() * it.element_size() for it in parameters.values())
    return [("fsdp_parameter_all_gather", members, size, took_ms)]


def elsewhere(prepared: Prepared, module: Any, peers: Peers) -> Prepared:
    """Return the same call for another module of the same kind, as layers of one model are.

    A collective, as `prepare` is.
    """
    return Prepared(
        module=module,
        parameters=materialized(module),
        buffers=_buffers(module, peers),
        own_state=list(module.parameters()),
        args=prepared.args,
        kwargs=prepared.kwargs,
        gradients=prepared.gradients,
        wants_grad=prepared.wants_grad,
        autocast=prepared.autocast,
        random_states=prepared.random_states,
        collectives=[],
    )


def _buffers(module: Any, peers: Peers) -> dict[int, Any]:
    """Return the source's buffers: running statistics differ from rank to rank rightly."""
    own = [it for it in module.buffers() if not hasattr(it, "device_mesh")]
    is_source = peers.rank == peers.ranks[0]
    moved = broadcast(own, peers.ranks[0], peers.data, is_source=is_source)
    return {id(it): other for it, other in zip(own, moved, strict=True)}


def replay(prepared: Prepared, peers: Peers, *, deterministic: bool, seed: int) -> Replayed:
    """Run the call.  No collective; whatever it raises becomes the result's ``error``."""
    with (
        on.other_randomness(peers.device, prepared.random_states, seed),
        on.determinism(wanted=deterministic),
    ):
        try:
            return _run(prepared, peers.device)
        except Exception as error:  # noqa: BLE001 - a module may raise anything
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return Replayed(
                output=[], input_gradient=[], parameter_gradient=[], took_ms=0.0, error=text
            )


def matches_reference(prepared: Prepared, result: Replayed, peers: Peers, *, seed: int) -> bool:
    """Whether ``result`` is near the same call in double precision on this rank's CPU."""
    cpu = torch.device("cpu")

    def exact(tensor: Any) -> Any:
        other = tensor.detach().to(cpu)
        other = other.to(torch.float64) if other.is_floating_point() else other
        return other.requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors((prepared.args, prepared.kwargs), exact)
    reference = Prepared(
        module=prepared.module,
        parameters={key: exact(it) for key, it in prepared.parameters.items()},
        buffers={key: exact(it) for key, it in prepared.buffers.items()},
        own_state=[],
        args=args,
        kwargs=kwargs,
        gradients=[exact(it) for it in prepared.gradients],
        wants_grad=prepared.wants_grad,
        autocast=on.Autocast(enabled=False, dtype=torch.bfloat16),
        random_states=prepared.random_states,
        collectives=[],
    )
    with on.other_randomness(peers.device, prepared.random_states, seed):
        try:
            truth = _run(reference, cpu)
        except Exception:  # noqa: BLE001 - no double precision for this module, so no referee
            return True
    mine = [*result.output, *result.input_gradient, *result.parameter_gradient]
    right = [*truth.output, *truth.input_gradient, *truth.parameter_gradient]
    return all(_is_near(one, other) for one, other in zip(mine, right, strict=True))


def _is_near(tensor: Any, truth: Any) -> bool:
    """Whether no element is further off than rounding explains, by the largest true value."""
    if not tensor.is_floating_point():
        return bool((tensor.cpu() == truth).all())
    if not tensor.numel():
        return True
    allowed = REFERENCE_ULPS * torch.finfo(tensor.dtype).eps * max(float(truth.abs().max()), 1e-30)
    furthest = float((tensor.cpu().to(truth.dtype) - truth).abs().max())
    return bool(furthest <= allowed)  # NaN is not near


def _run(prepared: Prepared, device: Any) -> Replayed:
    copy = isolated(prepared.module, {**prepared.parameters, **prepared.buffers})
    inputs: list[Any] = []
    args, kwargs = map_tensors((prepared.args, prepared.kwargs), lambda it: _fresh(it, inputs))
    wants_grad = any(prepared.wants_grad)
    started = on.spent_s(device)
    with torch.set_grad_enabled(wants_grad), on.autocast(device, prepared.autocast):
        outputs = tensors_of(copy(*args, **kwargs))
    input_grads: Sequence[Any] = ()
    parameter_grads: Sequence[Any] = ()
    if wants_grad:
        heads = [it for it, wanted in zip(outputs, prepared.wants_grad, strict=True) if wanted]
        weights = leaves(prepared.parameters)
        found = torch.autograd.grad(
            heads, [*inputs, *weights], grad_outputs=prepared.gradients, allow_unused=True
        )
        input_grads, parameter_grads = found[: len(inputs)], found[len(inputs) :]
    took_ms = (on.spent_s(device) - started) * 1000
    return Replayed(
        output=[it.detach() for it in outputs],
        input_gradient=[it for it in input_grads if it is not None],
        parameter_gradient=[it for it in parameter_grads if it is not None],
        took_ms=took_ms,
    )


def _fresh(tensor: Any, inputs: list[Any]) -> Any:
    """Return what a forward pass may change; leaves with a gradient are added to ``inputs``."""
    if not tensor.requires_grad:
        return tensor.clone()
    inputs.append(tensor.detach().requires_grad_(True))
    return inputs[-1].clone()
