"""What a job looks like from outside: the read-only picture behind the API and the metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.checkpoint_choice import PendingCheckpoint
from coordinator.health_events import HealthNotice
from coordinator.incidents import Incident
from coordinator.observing import Observation, Score
from coordinator.offenders import Standing
from coordinator.phases import JobPhase
from sidecar.api import AgentState, CheckpointPointer, RankStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node.  ``state`` is None while nothing has been heard of it."""

    node: str
    connected: bool
    spare: bool
    state: AgentState | None
    generation: int | None
    topology_version: int | None
    group_rank: int | None
    last_heard_age_s: float | None
    excluded: str | None
    """Why it gets no ranks any more."""
    reason: str
    host: str
    http_port: int
    ranks: tuple[RankStatus, ...]
    unfit: str | None = None
    """What speaks against it at this moment: an excluded node cannot be included before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job.  ``step`` is the furthest step any rank of this generation reported."""

    job: str
    phase: JobPhase
    phase_age_s: float
    generation: int
    topology_version: int
    nnodes: int
    nproc_per_node: int
    world: tuple[str, ...]
    step: int | None
    complete_checkpoints: tuple[CheckpointPointer, ...]
    chosen_checkpoints: tuple[CheckpointPointer, ...]
    nodes: tuple[NodeStatus, ...]
    excluded: Mapping[str, str]
    open_incident: Incident | None
    restarts_total: int
    restart_budget_remaining: int
    outcome_reason: str
    waiting_for: str
    """Why the job does not go on by itself at this moment, or empty."""
    pending_checkpoints: tuple[PendingCheckpoint, ...] = ()
    """Newer steps that not every rank confirmed, and whom they lack."""
    offenders: tuple[Standing, ...] = ()
    """Nodes with strikes of this and other jobs, faded to this moment."""
    observed: tuple[Observation, ...] = ()
    """What detectors said that are only observed, the newest last."""
    observed_scores: tuple[Score, ...] = ()
    """How those detectors would have done."""
    health: tuple[HealthNotice, ...] = ()
    """What others say of nodes, as long as it stands."""
    health_counts: Mapping[str, int] = field(default_factory=dict)
