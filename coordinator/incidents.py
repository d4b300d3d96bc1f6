"""An incident: everything about one stop of the job, as stored and shown.

Vocabulary only.  Instants are wall-clock nanoseconds since the epoch, because incidents outlive
the process and are read by people; durations between them were measured on one machine's
monotonic clock.  The JSON form carries `SCHEMA_VERSION`.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from scout.hang import RankSnapshot
from scout.verdict import Evidence
from sidecar.api import FaultKind, FaultReport
from sidecar.rank_evidence import RankEvidence
from worker_shim.messages import RestartMode

SCHEMA_VERSION: Final = 1


class IncidentPhase(StrEnum):
    """Milestones of a recovery, in order."""

    FAULT = "fault"
    DETECTED = "detected"
    LOCALIZED = "localized"
    CAPTURED = "captured"
    STOPPED = "stopped"
    DECIDED = "decided"
    ASSIGNED = "assigned"
    STARTED = "started"
    FIRST_STEP = "first_step"


class Outcome(StrEnum):
    """How an incident ended."""

    OPEN = "open"
    RECOVERED = "recovered"
    SUPERSEDED = "superseded"
    """Another fault came before the first step; a new incident carries on."""
    FAILED = "failed"
    STOPPED = "stopped"
    """A person ended the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """``phase`` was reached at ``at_ns`` (wall clock, nanoseconds since the epoch)."""

    phase: IncidentPhase
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """A fault report together with the node that made it and when it happened (wall clock)."""

    node: str
    at_ns: int
    report: FaultReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The named one.  ``gpu`` is the physical device index where known."""

    kind: FaultKind
    node: str
    rank: int | None
    local_rank: int | None
    gpu: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The judgement over all reports and snapshots of one incident.

    ``outcome`` is ``attributed``, ``inconclusive`` or ``agree``; ``basis`` is that of
    `scout.verdict.Basis` when attributed.  ``dissent`` lists what speaks for somebody else.
    ``confidence`` is ``high`` when one is named by what its machine says or because everybody
    waits for it, ``medium`` when values were compared or several are named, ``low`` for weak
    evidence, ``none`` when nobody is named.
    """

    outcome: str
    basis: str | None
    why: str
    culprit: Culprit | None
    evidence: tuple[Evidence, ...] = ()
    dissent: tuple[Evidence, ...] = ()
    confidence: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done about it.  ``mode`` None means the job ends, failed or stopped."""

    mode: RestartMode | None
    reason: str
    exclude_nodes: tuple[str, ...] = ()
    backoff_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChoice:
    """The chosen checkpoint of one prefix; ``step`` and ``path`` None mean none was trustworthy."""

    prefix: str
    step: int | None
    path: str | None
    reason: str
    others: tuple[tuple[str, str], ...] = ()
    """``(type, path)`` of further types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMove:
    """A group rank that changed hands."""

    group_rank: int
    from_node: str
    to_node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Ranks whose main threads stood at the same place.  ``frames`` has the innermost first.

    ``odd`` says that they stand apart from what most ranks did, or hold the culprit.
    """

    ranks: tuple[int, ...]
    frames: tuple[str, ...]
    odd: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank ran when it broke: ``host`` is the address that its sidecar gave.

    ``gpu`` is the physical device index, None where the node knows of no device.
    """

    rank: int
    node: str
    host: str
    local_rank: int
    gpu: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Everything about one stop.  ``generation`` is the one that broke."""

    id: str
    job: str
    generation: int
    topology_version: int
    trigger: str
    world: tuple[str, ...] = ()
    """Node of each group rank when it broke."""
    places: tuple[RankPlace, ...] = ()
    """Rank -> node, host and GPU when it broke."""
    outcome: Outcome = Outcome.OPEN
    milestones: tuple[Milestone, ...] = ()
    faults: tuple[NodeFault, ...] = ()
    snapshots: tuple[RankSnapshot, ...] = ()
    log_tails: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stack_groups: tuple[StackGroup, ...] = ()
    """Stacks before the stop, the odd ones first."""
    evidence: dict[str, RankEvidence] = field(default_factory=dict)
    """Global rank (as text) -> all that was seen of it, for the few that matter most."""
    evidence_missing: tuple[str, ...] = ()
    """What could not be had of whom, and why."""
    finding: Finding | None = None
    decision: Decision | None = None
    checkpoints: tuple[CheckpointChoice, ...] = ()
    moves: tuple[RankMove, ...] = ()
    steps_at_fault: int | None = None
    """Furthest completed step of any rank when it broke."""
    steps_lost: int | None = None
    schema_version: int = SCHEMA_VERSION

    def reached(self, phase: IncidentPhase, at_ns: int) -> "Incident":
        """Return this incident with ``phase`` stamped; the first stamp of a phase stays."""
        if any(item.phase is phase for item in self.milestones):
            return self
        return replace(self, milestones=(*self.milestones, Milestone(phase=phase, at_ns=at_ns)))

    def at(self, phase: IncidentPhase) -> int | None:
        """Return when ``phase`` was reached (wall clock ns), or None."""
        return next((item.at_ns for item in self.milestones if item.phase is phase), None)

    @property
    def depth(self) -> str | None:
        """How deep the job was restarted, or that it ended ``failed`` or ``stopped``.

        None while nothing is decided.
        """
        if self.decision is None:
            return None
        over = "stopped" if self.outcome is Outcome.STOPPED else "failed"
        return over if self.decision.mode is None else self.decision.mode.value

    def span_s(self, start: IncidentPhase, end: IncidentPhase) -> float | None:
        """Return seconds from ``start`` to ``end``, or None when one was not reached."""
        first, last = self.at(start), self.at(end)
        return None if first is None or last is None else (last - first) / 1e9
