"""What the node's agent core hears (events) and asks for (effects).

Events are facts about the world, effects are requests to shells.  An effect never returns a
value: what came of it arrives later as an event.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from scout.hang import RankSnapshot
from sidecar.api import (
    Command,
    EvidenceReport,
    ExitCause,
    FaultKind,
    ProgressReport,
    Start,
    StatusReport,
)
from sidecar.rank_evidence import RankEvidence
from sidecar.rank_table import RankTable
from worker_shim.messages import Envelope, SidecarReply, WorkerMessage

# --- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReceived:
    """A command arrived.  ``request_id`` is set when somebody waits for a `Reply` (HTTP)."""

    command: Command
    request_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a carried worker must be told of its generation: see `JobStart`."""

    envs: Mapping[str, str] = field(default_factory=dict)
    stdout: str | None = None
    stderr: str | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)
    """What all workers of the job are told alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSpawned:
    """All workers of ``generation`` run.  ``pids`` maps local rank to process id.

    ``carried`` are those that lived before, by local rank, with what they must be told.
    """

    generation: int
    pids: Mapping[int, int]
    script_version: str = ""
    carried: Mapping[int, Orders] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnFailed:
    """The workers of ``generation`` could not be started; none is left running."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker process ended.  ``last_lines`` are the end of its standard error."""

    generation: int
    local_rank: int
    pid: int
    cause: ExitCause
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersGone:
    """No process of ``generation`` or older is left on this node, orphans included.

    ``kept`` are the local ranks whose worker was to stay, with what it has started.
    """

    generation: int
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpoke:
    """A worker's message, from a connection tied to ``local_rank`` by its credentials."""

    connection: int
    envelope: Envelope
    message: WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFinding:
    """A log rule turned bad (``kind`` LOG_RULE, LOG_SLOW or LOG_HANG).

    ``block`` is the traceback that ends in ``line``, if it is the end of one.
    """

    generation: int
    local_rank: int
    kind: FaultKind
    rule: str
    message: str
    line: str
    age_ns: int = 0
    step: int | None = None
    block: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFinding:
    """A health source convicts a device of this node.  ``gpu`` None means the node itself.

    ``local_ranks`` are those that compute on the device; None where nobody knows, and the local
    rank of the device's number is meant.
    """

    gpu: int | None
    reason: str
    message: str
    line: str
    local_ranks: tuple[int, ...] | None = None


XID_REASON: Final = "Xid"
"""What the reason of every Xid begins with; alone it means all of a device's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRecovered:
    """A device, or with ``gpu`` None the node, has what ``reason`` names no longer."""

    gpu: int | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessNote:
    """The kernel says why a process of this node ended, or why it does not go on.

    ``local_rank`` is the one whose worker or whose worker's child it is, None when that is not
    known.  ``killer`` names who sent the signal, where the kernel itself did.
    """

    pid: int
    local_rank: int | None
    reason: str
    message: str
    line: str
    killer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressObserved:
    """One tick over this node's progress pages."""

    generation: int
    ranks: tuple[RankSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionTaken:
    """What a `TakeInspection` saw.  ``evidence_follows`` announces an `EvidenceTaken`."""

    round_id: int
    ranks: tuple[RankSnapshot, ...]
    log_tails: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    evidence_follows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceTaken:
    """What a `TakeInspection` with a budget found out beyond that, by global rank (as text)."""

    round_id: int
    evidence: Mapping[str, RankEvidence]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortReserved:
    """A port is held for the next generation's rendezvous, should this node host rank 0."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkOpened:
    """The coordinator said welcome: everything must be told again."""

    heartbeat_s: float


Event: TypeAlias = (
    CommandReceived
    | WorkersSpawned
    | SpawnFailed
    | WorkerExited
    | WorkersGone
    | WorkerSpoke
    | LogFinding
    | HardwareFinding
    | HardwareRecovered
    | ProcessNote
    | ProgressObserved
    | InspectionTaken
    | EvidenceTaken
    | PortReserved
    | UplinkOpened
)

# --- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnWorkers:
    """Start this node's workers as ``start`` says.  Ends in `WorkersSpawned` or `SpawnFailed`.

    The workers of the local ranks ``keep`` stand at the barrier: those that still live become
    workers of this generation, the others are started anew.
    """

    start: Start
    keep: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorkers:
    """End every worker of ``generation`` and older but those of the local ranks ``keep``.

    Ends in `WorkersGone`.  Asked again while it is under way, the last ``keep`` holds.
    """

    generation: int
    grace_s: float
    keep: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardState:
    """Throw away whatever the sidecar holds for faster starts: its next start is a first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepTable:
    """Write the table of hosts down for scripts that read it; ``group_rank`` is this node's."""

    table: RankTable
    group_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLogs:
    """Evaluate these rules (HyperPod field names) on the workers' output from now on.

    ``world_size`` is the number of ranks in the job, for rules about its first or last one.
    """

    generation: int
    rules: tuple[Mapping[str, object], ...]
    world_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeInspection:
    """Look at every rank now.  Ends in `InspectionTaken`.

    With a budget above 0 and workers that run, `EvidenceTaken` follows within it.
    """

    round_id: int
    evidence_budget_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePort:
    """Hold a fresh port for the next rendezvous.  Ends in `PortReserved`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell the coordinator, if it is there.  A status replaces every earlier unsent one."""

    message: StatusReport | ProgressReport | EvidenceReport


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWorker:
    """Send a reply on a worker's connection."""

    connection: int
    reply: SidecarReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer the one who waits for ``request_id``: an HTTP status and one sentence."""

    request_id: int
    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """End the daemon.  No worker is left running."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """A line for the daemon's own log (``level`` is a logging level name)."""

    level: str
    text: str


Effect: TypeAlias = (
    SpawnWorkers
    | KillWorkers
    | DiscardState
    | KeepTable
    | WatchLogs
    | TakeInspection
    | ReservePort
    | Report
    | AnswerWorker
    | Reply
    | Quit
    | Say
)
