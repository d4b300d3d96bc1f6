"""What is remembered of nodes across jobs: strikes that fade, and what they are good for.

A strike is one incident that recovered and named a node.  Its weight says how surely the node
itself was at fault, and halves with time: a node that was mended is trusted again.  Strikes steer
which node gets a rank first and which repeat offenders are left out; they convict nobody.

A breaker keeps the machine from leaving out a large share of the fleet: when that many nodes are
"broken" at once, it is rather the one who says so.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.incidents import Incident, Outcome
from coordinator.wording import natural_key
from scout.clock import SECOND
from sidecar.api import FaultKind

WEIGHTS: Final[Mapping[FaultKind, float]] = {
    FaultKind.GPU_FATAL: 1.0,
    FaultKind.NODE_LOST: 1.0,
    FaultKind.PROCESS_STALL: 0.5,
    FaultKind.CRASH: 0.5,
    FaultKind.LOG_SLOW: 0.5,
    FaultKind.LOG_HANG: 0.5,
    FaultKind.LOG_RULE: 0.25,
    FaultKind.WORKER_REPORTED: 0.25,
}
"""What the machine says of itself counts whole; what a script did on it may be the script's."""

SCRIPTS_OWN: Final = 0.2
"""Part of a crash's weight that is left when the process ended by itself: an exception is far more
often the script's than the machine's."""

STRIKES_READ_MAX: Final = 10_000
"""Newest strikes that are looked at."""

REPEATED: Final = 2
"""Strikes that make a repeat offender, however much they have faded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffenderPolicy:
    """How strikes are used.

    Half of a strike's weight is gone after ``half_life_s``: two weeks, within which a node that
    flaps comes back to the same job.  ``avoid_from`` is the sum of weights from which a repeat
    offender is left out, at most ``avoid_max`` of them (``maxNumRepeatOffendersToAvoid``).
    ``excluded_share_max`` bounds what the machine leaves out of the fleet, but not below
    ``excluded_least`` nodes: of a small fleet any two are a large share.
    """

    half_life_s: float = 14 * 86_400.0
    avoid_from: float = 1.0
    avoid_max: int = 0
    excluded_share_max: float = 0.3
    excluded_least: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One incident of one job that named a node.  ``at_ns`` is the wall clock."""

    node: str
    cause: str
    at_ns: int
    weight: float
    job: str
    incident: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A node's record: the faded sum of its strikes, how many, and what the last one was."""

    node: str
    score: float
    strikes: int
    last_cause: str


def strikes_of(incident: Incident) -> tuple[Strike, ...]:
    """Return the strike that a closed incident leaves, if it named a node and was got over."""
    finding = incident.finding
    culprit = None if finding is None else finding.culprit
    if incident.outcome is not Outcome.RECOVERED or culprit is None or finding is None:
        return ()
    weight = WEIGHTS.get(culprit.kind, 0.0) * (0.5 if finding.confidence == "low" else 1.0)
    if culprit.kind is FaultKind.CRASH and culprit.reason.startswith("exit code"):
        weight *= SCRIPTS_OWN
    if not weight or not culprit.node:
        return ()
    at_ns = min((stone.at_ns for stone in incident.milestones), default=0)
    return (
        Strike(
            node=culprit.node,
            cause=f"{culprit.kind}: {culprit.reason}",
            at_ns=at_ns,
            weight=weight,
            job=incident.job,
            incident=incident.id,
        ),
    )


def standings(
    strikes: Iterable[Strike], policy: OffenderPolicy, now_ns: int
) -> dict[str, Standing]:
    """Return the record of every node that has one; a strike of the future has not faded."""
    found: dict[str, Standing] = {}
    for strike in sorted(strikes, key=lambda item: item.at_ns):
        age_s = max(0, now_ns - strike.at_ns) / SECOND
        faded = strike.weight * 0.5 ** (age_s / policy.half_life_s)
        known = found.get(strike.node)
        found[strike.node] = Standing(
            node=strike.node,
            score=faded + (known.score if known else 0.0),
            strikes=1 + (known.strikes if known else 0),
            last_cause=strike.cause,
        )
    return found


def to_avoid(
    records: Mapping[str, Standing],
    candidates: Collection[str],
    nnodes: int,
    policy: OffenderPolicy,
) -> dict[str, str]:
    """Return the repeat offenders to leave out, the worst first, each with the reason.

    Never so many that fewer than ``nnodes`` of the candidates are left.
    """
    room = min(policy.avoid_max, len(candidates) - nnodes)
    guilty = sorted(
        (
            record
            for record in records.values()
            if record.node in candidates
            and record.strikes >= REPEATED
            and record.score >= policy.avoid_from
        ),
        key=lambda record: (-record.score, natural_key(record.node)),
    )
    return {
        record.node: f"it is a repeat offender: {record.strikes} strikes, the last one "
        f"{record.last_cause}"
        for record in guilty[: max(0, room)]
    }


def penalty(records: Mapping[str, Standing], node: str) -> float:
    """Return how much speaks against giving ``node`` a rank first; small things do not count."""
    record = records.get(node)
    return 0.0 if record is None or record.score < 0.2 else round(record.score, 1)  # noqa: PLR2004


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """What the breaker lets through of ``wanted``, and why not the rest."""

    allowed: tuple[str, ...]
    refused: tuple[str, ...] = ()
    reason: str = ""


def breaker(
    wanted: Sequence[str], excluded: Collection[str], fleet: int, policy: OffenderPolicy
) -> Breaker:
    """Let the machine leave out ``wanted`` as long as its share of the ``fleet`` allows."""
    limit = max(policy.excluded_least, int(policy.excluded_share_max * fleet))
    fresh = [node for node in wanted if node not in excluded]
    allowed = fresh[: max(0, limit - len(excluded))]
    refused = tuple(node for node in fresh if node not in allowed)
    kept = tuple(node for node in wanted if node not in refused)
    if not refused:
        return Breaker(allowed=kept)
    return Breaker(
        allowed=kept,
        refused=refused,
        reason=f"{', '.join(refused)} would be left out too, but {len(excluded) + len(allowed)} of "
        f"{fleet} nodes are already: no more than {limit} without a person's word",
    )
