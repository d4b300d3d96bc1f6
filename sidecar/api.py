"""The sidecar <-> coordinator conversation and the node's HTTP bodies: vocabulary only.

The sidecar dials one WebSocket to the coordinator.  Upwards travel `Hello`, then `StatusReport`
whenever something changed and on a slow heartbeat, and when asked `ProgressReport` at once and
`EvidenceReport` when it is gathered.  A status is a whole level, not an edge: any of them may be
lost, doubled or late, and the next one still says everything.  Downwards travel commands, each
with the generation and topology version it is for.

Bodies of ``/start``, ``/stop``, ``/update`` use the HyperPod elastic agent's field names, so that
an HTTP client written for it works unchanged; ``generation`` and ``topology_version`` are
additions that such a client may leave out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final, TypeAlias

from scout.hang import RankSnapshot
from sidecar.rank_evidence import RankEvidence
from worker_shim.messages import MODEL_CHECKPOINT, RestartMode, ScoutStatus

PROTOCOL_VERSION: Final = 1
UPLINK_PATH: Final = "/v1/sidecar"
"""Where a sidecar's WebSocket is accepted."""


class AgentState(StrEnum):
    """A node's agent, as in the HyperPod elastic agent."""

    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAULTED = "faulted"
    STOPPING = "stopping"
    SHUTDOWN = "shutdown"


class FaultKind(StrEnum):
    """What broke.  A bounded set: it is a metric label."""

    CRASH = "crash"
    LOG_RULE = "log_rule"
    LOG_SLOW = "log_slow"
    LOG_HANG = "log_hang"
    PROCESS_STALL = "process_stall"
    STARTUP_TIMEOUT = "startup_timeout"
    GPU_FATAL = "gpu_fatal"
    NODE_LOST = "node_lost"
    WORKER_REPORTED = "worker_reported"
    OPERATOR = "operator"
    SDC = "sdc"
    """Values that should be equal on all ranks differ."""


class Scope(StrEnum):
    """How much a fault takes with it."""

    RANK = "rank"
    GPU = "gpu"
    NODE = "node"
    JOB = "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCause:
    """How a worker process ended: exactly one of ``code`` and ``signal`` is set.

    ``by`` names who sent the signal, where that is known (the kernel's OOM killer, for instance).
    """

    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False
    by: str = ""

    @property
    def clean(self) -> bool:
        """True for exit status 0."""
        return self.code == 0

    def __str__(self) -> str:
        if self.signal is not None:
            sender = f" from {self.by}" if self.by else ""
            return f"signal {self.signal}{sender}" + (" (core dumped)" if self.core_dumped else "")
        return f"exit code {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """A node's own finding.  ``fault_id`` is unique per node incarnation and never reused.

    ``age_ns`` is how long ago it happened when the report was made; ``step`` is the training step
    it belongs to when the evidence says so (a log line's ``step`` group).  ``gpu`` is the node's
    physical device index.
    """

    fault_id: int
    kind: FaultKind
    scope: Scope
    reason: str
    message: str
    age_ns: int
    rank: int | None = None
    local_rank: int | None = None
    gpu: int | None = None
    step: int | None = None
    exit: ExitCause | None = None
    restart_mode: RestartMode | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """A running worker in a status.  ``step`` is None until it completed one."""

    rank: int
    local_rank: int
    pid: int | None
    step: int | None = None
    progress_age_ns: int | None = None
    stalled: bool = False
    held: bool = False
    """True while its process is stopped by a signal, or in one long sleep in the kernel."""
    stall_limit_ns: int | None = None
    """Silence after which this rank counts as stalled now; None while it is not judged."""
    stall_armed: bool = False
    """True when that limit was learned from the rank's own history or declared by its script."""
    attached: bool = False
    """True once the worker has spoken to its sidecar: it will tell its steps."""
    restartable: bool = False
    """True while it has a re-executable block and can be brought back to its barrier."""
    at_barrier: bool = False
    """True while it stands there, alive and without a generation to run."""
    labels: Mapping[str, str] = field(default_factory=dict)
    scout: ScoutStatus | None = None
    """What its newest comparison with its peers found; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfirmation:
    """Which ranks of this node confirmed which step.  ``paths`` holds each distinct path told."""

    prefix: str
    step: int
    ranks: tuple[int, ...]
    paths: tuple[str, ...]
    checkpoint_type: str = MODEL_CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDeclaration:
    """How many of this node's ranks will confirm each step of a prefix's type."""

    prefix: str
    checkpoint_type: str
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A sidecar presents itself.  ``incarnation`` changes with every start of the sidecar."""

    TYPE: ClassVar[str] = "hello"
    protocol: int
    agent_version: str
    job: str
    node: str
    incarnation: str
    host: str
    http_port: int
    nproc_per_node: int
    spare: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    """Physical indexes of the node's devices, ascending; empty where none is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """Everything the coordinator needs to know of a node, whole.

    ``generation`` is that of the last start obeyed, ``stopped_generation`` the highest one whose
    stop is complete (no worker of it or of an older one runs here).  ``rendezvous_port`` is a port
    reserved on this node for the next start, should it host rank 0.
    """

    TYPE: ClassVar[str] = "status"
    node: str
    incarnation: str
    state: AgentState
    generation: int
    stopped_generation: int
    topology_version: int
    rendezvous_port: int
    table_version: int = 0
    """Version of the table of hosts that this node has; it may be ahead of the last start."""
    table_digest: str = ""
    """`sidecar.rank_table.digest_of` that table; empty where there is none."""
    group_rank: int | None = None
    reason: str = ""
    message: str = ""
    restart_mode: RestartMode | None = None
    faults: tuple[FaultReport, ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    checkpoints: tuple[CheckpointConfirmation, ...] = ()
    checkpoint_types: tuple[CheckpointDeclaration, ...] = ()
    script_version: str = ""
    """Digest of the training script's file and arguments, as they were at the last start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReport:
    """Answer to `Inspect`: this node's ranks at one moment, and their last log lines."""

    TYPE: ClassVar[str] = "progress"
    round_id: int
    node: str
    ranks: tuple[RankSnapshot, ...]
    log_tails: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Global rank (as text) -> last lines of its output, oldest first, bounded."""
    evidence_follows: bool = False
    """An `EvidenceReport` of the same round is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceReport:
    """Second answer to `Inspect`.  ``evidence`` is keyed by global rank (as text)."""

    TYPE: ClassVar[str] = "evidence"
    round_id: int
    node: str
    evidence: Mapping[str, RankEvidence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The coordinator accepts the sidecar and says how often to speak without news."""

    TYPE: ClassVar[str] = "welcome"
    job: str
    heartbeat_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The coordinator does not want this sidecar; ``retry`` says whether dialling again helps."""

    TYPE: ClassVar[str] = "goodbye"
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPointer:
    """A chosen checkpoint: ``{prefix: {progressCount, progressData}}`` on HTTP.

    ``path`` is that of the model; ``others`` holds ``(type, path)`` of further types.
    """

    prefix: str
    step: int
    path: str
    others: tuple[tuple[str, str], ...] = ()

    def path_of(self, checkpoint_type: str) -> str:
        """Return where this type of the checkpoint lies; one that is not apart lies with all."""
        return dict(self.others).get(checkpoint_type, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Run this generation with these ranks.  ``group_rank`` is the node's rank among nodes."""

    TYPE: ClassVar[str] = "start"
    generation: int
    topology_version: int
    group_rank: int
    nnodes: int
    master_addr: str
    master_port: int
    fault_count: int
    node_hosts: tuple[str, ...]
    """Host of each group rank, in order."""
    hosts_known: bool = False
    """``node_hosts`` is left out: the node has the table of this very topology version."""
    ip_version: str = ""
    """An HTTP client's own token for the table of hosts."""
    worker_data: Any = None
    """What an HTTP client tells every worker that waits at its barrier, as it is."""
    checkpoints: tuple[CheckpointPointer, ...] = ()
    log_rules: tuple[Mapping[str, Any], ...] = ()
    """Rules in the HyperPod field names, already validated by the coordinator."""
    stall_timeout_s: float = 0.0
    """Silence of a rank's progress that asks for a judgement; 0 switches it off."""
    stall_timeout_min_s: float = 60.0
    """Least silence that a limit learned from a rank's own history may ask after."""
    stall_factor: float = 10.0
    """How many times the usual silence of a phase a learned limit is."""
    observed: tuple[FaultKind, ...] = ()
    """Kinds of faults that are reported and change nothing: their detectors are on probation."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """The host of one group rank."""

    rank: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Change the table of hosts, and this node's place in it, without starting anything.

    ``changed`` holds the group ranks whose host differs from the table of
    ``base_topology_version``; where another one stands, the update is refused.  Without a
    ``topology_version`` it makes the next one.  Workers at their barrier are told their place.
    """

    TYPE: ClassVar[str] = "update"
    group_rank: int
    nnodes: int
    master_addr: str
    master_port: int
    fault_count: int
    changed: tuple[RankHost, ...] = ()
    topology_version: int | None = None
    base_topology_version: int | None = None
    generation: int | None = None
    ip_version: str = ""
    worker_data: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the run of ``generation`` and of every older one.

    With the mode ``in_process_restart`` workers that have a re-executable block are brought back
    to its barrier and live on; those that have none, or do not come back, are ended like all are
    by the deeper modes.  ``job_level_restart`` also throws away what the sidecar holds.
    """

    TYPE: ClassVar[str] = "stop"
    generation: int
    restart_mode: RestartMode
    reason: str
    grace_s: float = 0.0
    """Time between a polite signal and SIGKILL; 0 kills at once."""
    barrier_s: float = 10.0
    """Time for a worker to come back to its barrier, before it is ended instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End workers and the sidecar itself, whose exit status is ``exit_code``."""

    TYPE: ClassVar[str] = "shutdown"
    reason: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Send a `ProgressReport` with this ``round_id`` now.

    With ``evidence_budget_s`` above 0 an `EvidenceReport` follows within that time.
    """

    TYPE: ClassVar[str] = "inspect"
    round_id: int
    evidence_budget_s: float = 0.0


Upward: TypeAlias = Hello | StatusReport | ProgressReport | EvidenceReport
Downward: TypeAlias = Welcome | Goodbye | Start | Update | Stop | Shutdown | Inspect
Command: TypeAlias = Start | Update | Stop | Shutdown | Inspect

UPWARD: Final[Mapping[str, type[Upward]]] = {
    cls.TYPE: cls for cls in (Hello, StatusReport, ProgressReport, EvidenceReport)
}
DOWNWARD: Final[Mapping[str, type[Downward]]] = {
    cls.TYPE: cls for cls in (Welcome, Goodbye, Start, Update, Stop, Shutdown, Inspect)
}
