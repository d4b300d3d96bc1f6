"""The little that differs between a CPU and an accelerator: waiting, random states, autocast.

Everything is looked up by device type (``torch.cuda``, ``torch.xpu`` ...), so that an accelerator
that torch knows needs no code here.
"""

import contextlib
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """The autocast state of a forward pass."""

    enabled: bool
    dtype: Any


def spent_s(device: Any) -> float:
    """Return a clock for work on ``device``: what the process computed where that is a CPU.

    Ranks that share cores wait for one another through no fault of their own, and processor time
    does not count waiting.  An accelerator is waited for, and has nobody else to serve.
    """
    if device.type == "cpu":
        return time.process_time()
    synchronize(device)
    return time.perf_counter()


def synchronize(device: Any) -> None:
    """Wait until ``device`` has done what was asked of it."""
    module = getattr(torch, device.type, None)
    wait = getattr(module, "synchronize", None)
    if device.type != "cpu" and wait is not None:
        wait(device)


def autocast_now(device: Any) -> Autocast:
    """Return the autocast state that is in force for ``device``."""
    return Autocast(
        enabled=bool(torch.is_autocast_enabled(device.type)),
        dtype=torch.get_autocast_dtype(device.type),
    )


def autocast(device: Any, state: Autocast) -> Any:
    """Return a context in which ``state`` is in force."""
    return torch.autocast(device.type, dtype=state.dtype, enabled=state.enabled)


def random_states(device: Any) -> list[Any]:
    """Return torch's random states as byte tensors on the CPU: its own, and the device's."""
    states = [torch.get_rng_state()]
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "get_rng_state"):
        states.append(module.get_rng_state(device).cpu())
    return states


def set_random_states(device: Any, states: list[Any]) -> None:
    """Put back what `random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        getattr(torch, device.type).set_rng_state(states[1], device)


@contextlib.contextmanager
def other_randomness(device: Any, states: list[Any], seed: int) -> Iterator[None]:
    """Run with ``states`` in torch and ``seed`` in Python and NumPy, and leave no trace of it."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    own = random_states(device)
    own_python = random.getstate()
    own_numpy = numpy_random.get_state() if numpy_random is not None else None
    set_random_states(device, states)
    random.seed(seed)
    if numpy_random is not None:
        numpy_random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        set_random_states(device, own)
        random.setstate(own_python)
        if numpy_random is not None:
            numpy_random.set_state(own_numpy)


@contextlib.contextmanager
def determinism(*, wanted: bool) -> Iterator[None]:
    """Run with torch's deterministic algorithms, warning only, and put the setting back."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False, warn_only=warned)
