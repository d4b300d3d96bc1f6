"""The job's phases: a vocabulary, and which may follow which."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class JobPhase(StrEnum):
    """What the coordinator is doing for the job."""

    WAITING = "waiting_for_nodes"
    STARTING = "starting"
    RUNNING = "running"
    LOCALIZING = "localizing"
    STOPPING = "stopping"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    """A person ended it."""

    @property
    def terminal(self) -> bool:
        """True when nothing follows."""
        return self in (JobPhase.COMPLETED, JobPhase.FAILED, JobPhase.STOPPED)


_P = JobPhase

FOLLOWS: Final[Mapping[JobPhase, frozenset[JobPhase]]] = MappingProxyType(
    {
        _P.WAITING: frozenset({_P.STARTING, _P.STOPPING, _P.FAILED, _P.STOPPED}),
        _P.STARTING: frozenset({_P.RUNNING, _P.LOCALIZING, _P.COMPLETED, _P.FAILED}),
        _P.RUNNING: frozenset({_P.LOCALIZING, _P.COMPLETED, _P.FAILED}),
        _P.LOCALIZING: frozenset({_P.STOPPING, _P.RUNNING, _P.FAILED}),
        _P.STOPPING: frozenset({_P.WAITING, _P.STARTING, _P.FAILED, _P.STOPPED}),
        _P.COMPLETED: frozenset(),
        _P.FAILED: frozenset(),
        _P.STOPPED: frozenset(),
    }
)


class PhaseError(Exception):
    """A phase was asked for that may not follow the present one: a bug, not a fault."""


def advance(present: JobPhase, following: JobPhase) -> JobPhase:
    """Return ``following`` if it may follow ``present``, else raise `PhaseError`."""
    if following not in FOLLOWS[present]:
        raise PhaseError(f"{following} may not follow {present}")
    return following
