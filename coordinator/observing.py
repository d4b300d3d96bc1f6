"""Detectors on probation: what they would have done, and how often they would have been right.

A detector that is observed stops nothing.  What it says is noted, and what follows judges it: an
incident that names the same node soon after confirms it, training that goes on refutes it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from coordinator.incidents import Finding, NodeFault
from scout.clock import SECOND
from sidecar.api import FaultKind

OBSERVATIONS_KEPT_MAX: Final = 256
"""Observations remembered of one job, the newest ones."""

CONFIRMED_WITHIN_S: Final = 600.0
"""An incident that comes later than this after an observation says nothing of it."""

REFUTED_AFTER_S: Final = 60.0
"""Training that still goes on after so long, by at least `REFUTED_AFTER_STEPS`, was well."""
REFUTED_AFTER_STEPS: Final = 20

NEVER_OBSERVED: Final = (FaultKind.CRASH, FaultKind.NODE_LOST, FaultKind.OPERATOR)
"""These are no opinions: the process or the node is gone, or a person spoke."""


class Verdict(StrEnum):
    """What became of an observation."""

    PENDING = "pending"
    CONFIRMED = "confirmed"
    FALSE_ALARM = "false_alarm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a detector said, ``times`` in a row, first at ``at_ns`` (wall clock)."""

    at_ns: int
    kind: FaultKind
    node: str
    rank: int | None
    reason: str
    message: str
    step: int | None
    times: int = 1
    verdict: Verdict = Verdict.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a detector would have done.  ``stops`` is how often it would have stopped the job."""

    kind: FaultKind
    stops: int
    confirmed: int
    false_alarms: int
    pending: int


def noted(
    known: Sequence[Observation], fault: NodeFault, step: int | None
) -> tuple[Observation, ...]:
    """Return the observations with ``fault``; one that is pending already is counted there."""
    report = fault.report
    same = (report.kind, fault.node, report.rank, report.reason)
    for place, item in enumerate(known):
        pending = item.verdict is Verdict.PENDING
        if pending and (item.kind, item.node, item.rank, item.reason) == same:
            if not report.fault_id and item.message == report.message:
                return tuple(known)  # the coordinator's own word, which it says at every look
            again = replace(item, times=item.times + 1)
            return (*known[:place], again, *known[place + 1 :])
    fresh = Observation(
        at_ns=fault.at_ns,
        kind=report.kind,
        node=fault.node,
        rank=report.rank,
        reason=report.reason,
        message=report.message,
        step=step,
    )
    return (*known, fresh)[-OBSERVATIONS_KEPT_MAX:]


def went_on(known: Sequence[Observation], step: int | None, now_ns: int) -> tuple[Observation, ...]:
    """Return the observations after a look at a job that trains, at ``step``."""
    return tuple(
        replace(item, verdict=Verdict.FALSE_ALARM) if _refuted(item, step, now_ns) else item
        for item in known
    )


def stopped(known: Sequence[Observation], finding: Finding, now_ns: int) -> tuple[Observation, ...]:
    """Return the observations after an incident with this ``finding``."""
    culprit = finding.culprit
    if culprit is None:
        return tuple(known)
    return tuple(
        replace(item, verdict=Verdict.CONFIRMED)
        if item.verdict is Verdict.PENDING
        and now_ns - item.at_ns <= CONFIRMED_WITHIN_S * SECOND
        and item.node in ("", culprit.node)
        else item
        for item in known
    )


def scores(known: Sequence[Observation]) -> tuple[Score, ...]:
    """Return the score of every detector that said something."""
    counted = Counter((item.kind, item.verdict) for item in known)
    return tuple(
        Score(
            kind=kind,
            stops=sum(counted[kind, verdict] for verdict in Verdict),
            confirmed=counted[kind, Verdict.CONFIRMED],
            false_alarms=counted[kind, Verdict.FALSE_ALARM],
            pending=counted[kind, Verdict.PENDING],
        )
        for kind in FaultKind
        if any(item.kind is kind for item in known)
    )


def _refuted(item: Observation, step: int | None, now_ns: int) -> bool:
    if item.verdict is not Verdict.PENDING or now_ns - item.at_ns < REFUTED_AFTER_S * SECOND:
        return False
    if step is None or item.step is None:
        return now_ns - item.at_ns > CONFIRMED_WITHIN_S * SECOND
    return step - item.step >= REFUTED_AFTER_STEPS
