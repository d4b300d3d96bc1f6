"""Which checkpoint of a step may be trusted, given what the check at the same boundary found.

A table and a small memory: what to do with the state of a step, and which earlier candidate that
settles.  Any comparison group's corruption rejects job-wide; a check that could not run certifies
nothing and rejects nothing.  Source: the SCOUT guide, "Checkpoint Certification and Recovery".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from scout.results import CheckResult, NotReady, ReplayResult


class TrustState(StrEnum):
    """How far a checkpoint may be trusted, the least first."""

    REJECTED = "rejected"
    LATEST = "latest"
    """Complete, and nothing is known against it."""
    CANDIDATE = "candidate"
    RECOVERY_VERIFIED = "recovery_verified"


class Outcome(StrEnum):
    """What one group's check found, the best first."""

    HEALTHY = "healthy"
    STRAGGLER = "straggler"
    INCONCLUSIVE = "inconclusive"
    CORRUPT = "corrupt"
    NOT_RUN = "not_run"


class Action(StrEnum):
    """What becomes of the state at the boundary."""

    CERTIFY = "certify"
    CAPTURE_AND_REPORT = "capture_and_report"
    REJECT = "reject"
    WAIT = "wait"
    """No evidence: neither certified nor rejected."""


CHECKPOINT_ACTIONS: Final[Mapping[Outcome, Action]] = MappingProxyType(
    {
        Outcome.HEALTHY: Action.CERTIFY,
        Outcome.STRAGGLER: Action.CAPTURE_AND_REPORT,
        Outcome.INCONCLUSIVE: Action.REJECT,
        Outcome.CORRUPT: Action.REJECT,
        Outcome.NOT_RUN: Action.WAIT,
    }
)
_SEVERITY: Final = (
    Outcome.HEALTHY,
    Outcome.STRAGGLER,
    Outcome.NOT_RUN,
    Outcome.INCONCLUSIVE,
    Outcome.CORRUPT,
)


def outcome_of(result: CheckResult) -> Outcome:
    """Return what one check says of the state at its step, for the whole job."""
    if isinstance(result, NotReady):
        return Outcome.NOT_RUN
    if result.has_sdc or result.job_disagrees:
        return Outcome.CORRUPT if result.is_attributed else Outcome.INCONCLUSIVE
    if result.not_finite_ranks:  # all peers alike, and worth nothing
        return Outcome.INCONCLUSIVE
    return Outcome.STRAGGLER if any(result.straggler_bitmap) else Outcome.HEALTHY


def job_wide(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of the whole job from those of all its comparison groups."""
    return max(outcomes, key=_SEVERITY.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """The state of ``step`` is trusted as far as ``state`` says; ``promoted`` now fully."""

    step: int
    state: TrustState
    action: Action
    reason: str
    promoted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The state of ``step`` is not to be saved; ``withdrawn`` candidates are rejected with it."""

    step: int
    reason: str
    withdrawn: tuple[int, ...]
    kept: tuple[int, ...]
    """Steps that stay trusted: the newest verified one, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Nothing is known of ``step``; a candidate stays one."""

    step: int
    reason: str


Boundary: TypeAlias = Certified | Rejected | Waiting


@dataclass(slots=True)
class Certifier:
    """What is trusted so far.  ``dynamic`` catalogues need two complete clean cycles.

    Every rank feeds it the same outcomes and so reaches the same decisions.
    """

    dynamic: bool = False
    verified: int | None = None
    candidate: int | None = None

    def boundary(self, step: int, outcome: Outcome, *, cycle_complete: bool = True) -> Boundary:
        """Decide about the state of ``step``, whose check had ``outcome`` job-wide."""
        action = CHECKPOINT_ACTIONS[outcome]
        if action is Action.REJECT:
            return self._reject(step, outcome)
        if action is Action.WAIT:
            return Waiting(step=step, reason=f"the check of step {step} could not run")
        reason = f"the check of step {step} found every peer alike"
        if action is Action.CAPTURE_AND_REPORT:
            reason = f"the check of step {step} found a slow rank, and every value alike"
        if not self.dynamic:
            self.verified = step
            state = TrustState.RECOVERY_VERIFIED
            return Certified(step=step, state=state, action=action, reason=reason)
        if not cycle_complete:
            return Certified(
                step=step,
                state=TrustState.LATEST,
                action=action,
                reason=f"{reason}; its cycle is not complete yet",
            )
        promoted = () if self.candidate is None else (self.candidate,)
        if self.candidate is not None:
            self.verified = self.candidate
        self.candidate = step
        return Certified(
            step=step,
            state=TrustState.CANDIDATE,
            action=action,
            reason=f"{reason}; the next complete clean cycle verifies it",
            promoted=promoted,
        )

    def _reject(self, step: int, outcome: Outcome) -> Rejected:
        withdrawn = () if self.candidate is None else (self.candidate,)
        self.candidate = None
        kept = () if self.verified is None else (self.verified,)
        what = "found corruption" if outcome is Outcome.CORRUPT else "was inconclusive"
        stays = f"step {self.verified} stays trusted" if kept else "no step is trusted"
        return Rejected(
            step=step,
            reason=f"the check of step {step} {what}; {stays}",
            withdrawn=withdrawn,
            kept=kept,
        )


def completes_cycle(result: CheckResult) -> bool:
    """Whether a check ends a complete cycle of its catalogue."""
    return isinstance(result, ReplayResult) and result.completed_scheduled_cycle
