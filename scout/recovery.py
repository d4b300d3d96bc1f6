"""Which checkpoint to recover from: the newest complete one, or the newest verified one.

The guide's table.  A recommendation only: who manages the job restarts it, and the framework
loads.  Knows no file and no tensor.  Source: the SCOUT guide, "Recovery selection".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from scout.results import SCHEMA_VERSION


class Failure(StrEnum):
    """What made a recovery necessary."""

    SDC = "sdc"
    INACCESSIBLE = "inaccessible"
    """A rank or machine that is needed cannot be reached."""
    STRAGGLER = "straggler"
    HANG = "hang"
    UNCERTAIN = "uncertain"


class EmergencyReplay(StrEnum):
    """What a replay of the whole catalogue, after the failure, showed."""

    CLEAN = "clean"
    """Complete and clean."""
    INCOMPLETE = "incomplete"
    UNAVAILABLE = "unavailable"
    CORRUPT = "corrupt"


class RecoveryMode(StrEnum):
    """Which kind of checkpoint a failure allows."""

    LATEST = "latest"
    RECOVERY_VERIFIED = "recovery_verified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that can be loaded.  ``topology`` digests the layout it was saved under."""

    step: int
    checkpoint_id: str
    source: str
    topology: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCheckpoint:
    """There is none of the kind that the failure demands."""


Target: TypeAlias = Checkpoint | NoCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """What to recover from and why."""

    id: str
    time_ns: int
    run: str
    failure: Failure
    mode: RecoveryMode
    target: Target
    reason: str
    schema_version: int = SCHEMA_VERSION

    @property
    def available(self) -> bool:
        """Whether there is something to recover from."""
        return isinstance(self.target, Checkpoint)


_BY_FAILURE: Final[Mapping[Failure, tuple[RecoveryMode, str]]] = MappingProxyType(
    {
        Failure.SDC: (
            RecoveryMode.RECOVERY_VERIFIED,
            "corruption was detected, and only a verified checkpoint is free of it",
        ),
        Failure.INACCESSIBLE: (
            RecoveryMode.RECOVERY_VERIFIED,
            "a required rank or machine cannot be reached, so nothing can be replayed",
        ),
        Failure.STRAGGLER: (
            RecoveryMode.LATEST,
            "every rank is there and every value alike: a slow rank spoils no checkpoint",
        ),
    }
)
_BY_REPLAY: Final[Mapping[EmergencyReplay, tuple[RecoveryMode, str]]] = MappingProxyType(
    {
        EmergencyReplay.CLEAN: (
            RecoveryMode.LATEST,
            "every rank is there, and a complete replay of the catalogue was clean",
        ),
        EmergencyReplay.INCOMPLETE: (
            RecoveryMode.RECOVERY_VERIFIED,
            "the replay of the catalogue was not complete",
        ),
        EmergencyReplay.UNAVAILABLE: (
            RecoveryMode.RECOVERY_VERIFIED,
            "the catalogue could not be replayed",
        ),
        EmergencyReplay.CORRUPT: (
            RecoveryMode.RECOVERY_VERIFIED,
            "the replay of the catalogue found corruption",
        ),
    }
)


def mode_of(
    failure: Failure, *, all_ranks_accessible: bool, replay: EmergencyReplay
) -> tuple[RecoveryMode, str]:
    """Return which kind of checkpoint a failure allows, and why."""
    if not all_ranks_accessible:
        return _BY_FAILURE[Failure.INACCESSIBLE]
    if failure in _BY_FAILURE:
        return _BY_FAILURE[failure]
    return _BY_REPLAY[replay]


def decide(
    failure: Failure,
    *,
    all_ranks_accessible: bool,
    replay: EmergencyReplay,
    latest: Target,
    verified: Target,
    run: str,
    at_ns: int,
) -> RecoveryDecision:
    """Return the recommendation.  ``latest`` is complete on every rank, ``verified`` trusted."""
    mode, why = mode_of(failure, all_ranks_accessible=all_ranks_accessible, replay=replay)
    target = latest if mode is RecoveryMode.LATEST else verified
    missing = "" if isinstance(target, Checkpoint) else "; there is none"
    return RecoveryDecision(
        id=f"{run}-recovery-{at_ns}",
        time_ns=at_ns,
        run=run,
        failure=failure,
        mode=mode,
        target=target,
        reason=f"{why}{missing}",
    )
