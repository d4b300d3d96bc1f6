"""Outrider's guest in the training process.

``import worker_shim; worker_shim.attach()`` is all that a script needs; the other calls say what
no hook can see.  Without a sidecar each of them does nothing, after one line of warning.
Standard library and `scout` only; torch is looked at where the script has it, never imported.

The guest's own modules are loaded at its first call: a sidecar shares this package's vocabulary
and is nobody's guest.
"""

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, SupportsIndex, TypeVar

from worker_shim.messages import RestartMode

if TYPE_CHECKING:
    from worker_shim.attachment import Attachment, Session
    from worker_shim.checkpoint import CheckpointKind
    from worker_shim.phases import CheckpointDirection, DeclaredPhase
    from worker_shim.restart import Attempt, restartable

__all__ = [
    "Attempt",
    "RestartMode",
    "Session",
    "attach",
    "checkpoint_io",
    "checkpoint_saved",
    "detach",
    "instrument_dataloader",
    "latest_checkpoint",
    "notify_labels",
    "phase",
    "report_fault",
    "restartable",
]

T = TypeVar("T")

_HOMES: Final = MappingProxyType(
    {
        "Attempt": "worker_shim.restart",
        "Session": "worker_shim.attachment",
        "restartable": "worker_shim.restart",
    }
)


def __getattr__(name: str) -> object:
    """Load what is public here and lives in a module of its own (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def attach() -> "Session":
    """Attach this process to its node's sidecar, once; later calls return the same session."""
    return _guest().attach()


def detach() -> None:
    """Take everything of ours out of this process again; ``attach`` may follow."""
    _guest().detach()


def phase(name: str, limit_s: float | None = None) -> "DeclaredPhase":
    """Return a context that declares what takes long and is no stall.

    ``with worker_shim.phase("evaluate", limit_s=600): ...``

    ``name`` is ``evaluate``, ``checkpoint``, ``compile``, ``data`` or another of `scout`'s phases.
    It stands until the end of the block, whatever hooks see inside; phases may be nested.
    """
    return _guest().present().phase(name, limit_s)


def checkpoint_io(
    direction: "CheckpointDirection", limit_s: float | None = None
) -> "DeclaredPhase":
    """Return a context for checkpoint I/O that torch does not do itself.

    ``with worker_shim.checkpoint_io("write"): ...``

    ``torch.save``, ``torch.load`` and torch's distributed checkpoints are seen without it.
    """
    return _guest().present().checkpoint_io(direction, limit_s)


def instrument_dataloader(loader: Iterable[T]) -> Iterable[T]:
    """Return ``loader`` with its waits published.  Torch's own `DataLoader` needs no call."""
    return _guest().present().instrument_dataloader(loader)


def notify_labels(labels: Mapping[str, object]) -> None:
    """Say where this rank stands in the parallel layout, e.g. ``{"dp": 3, "pp": 0}``."""
    _guest().present().notify_labels(labels)


def checkpoint_saved(
    step: SupportsIndex,
    path: str | os.PathLike[str],
    prefix: str = "checkpoint",
    kind: "CheckpointKind" = "model",
) -> None:
    """Say that this rank's part of the checkpoint of ``step`` is durable at ``path``.

    Every rank calls it, once the whole checkpoint can be loaded.  Returns at once; the report is
    delivered at least once while a sidecar lives.  ``step`` is the number of completed steps.
    Where the data loader's state is saved apart, ``kind="data"`` says so: a step counts once every
    rank confirmed both.
    """
    _guest().present().checkpoint_saved(step, path, prefix, kind)


def latest_checkpoint(
    prefix: str = "checkpoint",
    default: str | os.PathLike[str] | None = None,
    kind: "CheckpointKind" = "model",
) -> str | None:
    """Return the path of the checkpoint that all ranks are to load: one answer for all of them.

    ``default`` is the answer when Outrider is not there or has chosen nothing.
    """
    return _guest().present().latest_checkpoint(prefix, default, kind)


def report_fault(
    reason: str, restart_mode: RestartMode | str | None = None, message: str = ""
) -> None:
    """Say that this rank failed; ``restart_mode`` asks for a restart at least as deep."""
    _guest().present().report_fault(reason, restart_mode, message)


def _guest() -> "Attachment":
    from worker_shim.attachment import ATTACHMENT  # noqa: PLC0415 - at the guest's first call

    return ATTACHMENT
