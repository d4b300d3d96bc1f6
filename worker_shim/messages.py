"""The worker <-> sidecar conversation: every message, its fields and its direction.

Type names are those of the HyperPod elastic agent's IPC, so that a client written for it is
understood; ``protocol``, ``seq`` and ``generation`` are ours.  This module knows JSON objects,
not sockets: `framing` cuts the byte stream, `client` and the sidecar's server do the I/O.

Every worker message is answered: `Ack`, `Refusal`, or the reply its type names; those of the
barrier when what they wait for comes to pass.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final

PROTOCOL_VERSION: Final = 1

SOCKET_ENV: Final = "OUTRIDER_WORKER_SOCKET"
"""Path of the sidecar's Unix stream socket."""
PROGRESS_PAGE_ENV: Final = "OUTRIDER_PROGRESS_PAGE"
"""Path of this rank's progress page, created by the sidecar."""
FLIGHT_RECORD_SUFFIX: Final = ".flight.json"
"""What is added to the page's path for the file in which a rank may leave torch's Flight Recorder,
as torch's JSON.  Whoever reads it does without when there is none."""
PROGRESS_TOKEN_ENV: Final = "OUTRIDER_PROGRESS_TOKEN"  # noqa: S105 - the name of a variable
"""The page's ownership token, a decimal integer."""
GENERATION_ENV: Final = "OUTRIDER_GENERATION"
"""The job's run number that this process belongs to."""

CHECKPOINTS_ENV: Final = "OUTRIDER_CHECKPOINTS"
"""What this generation was told to load, as JSON ``{prefix: {"step": n, type: path}}``: the answer
that every rank has in hand even when its sidecar is too busy to give one."""

MODEL_CHECKPOINT: Final = "model_checkpoint"
DATA_CHECKPOINT: Final = "data_checkpoint"
CHECKPOINT_TYPES: Final = (MODEL_CHECKPOINT, DATA_CHECKPOINT)
"""What a step consists of: the model's state, and where its data loader stood."""

SCOUT_ENV: Final = "OUTRIDER_SCOUT"
"""Where it is set, ranks compare one another without a line in the script: a JSON object of
`scout.settings.ReplayHarnessConfig`'s fields."""

BEGINNING: Final = 0
"""The step that stands for what the job first began from: each rank confirms it when it is told
of no choice and takes its own.  An empty path says that it began from nothing."""


class RestartMode(StrEnum):
    """How deep a restart goes, mildest first."""

    IN_PROCESS = "in_process_restart"
    LOCAL_PROCESS = "local_process_level_restart"
    PROCESS = "process_level_restart"
    JOB = "job_level_restart"

    @property
    def severity(self) -> int:
        """Position in the order of severity; larger is more severe."""
        return list(RestartMode).index(self)


def most_severe(*modes: RestartMode | None) -> RestartMode | None:
    """Return the most severe of the modes asked for, or None when nobody asked."""
    asked = [mode for mode in modes if mode is not None]
    return max(asked, key=lambda mode: mode.severity) if asked else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """First message of a connection: which local rank speaks."""

    TYPE: ClassVar[str] = "init"
    local_rank: int
    pid: int
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFault:
    """This rank failed, or asks for a restart at least as deep as ``restart_mode``."""

    TYPE: ClassVar[str] = "job_fault"
    local_rank: int
    reason: str
    message: str = ""
    restart_mode: RestartMode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLabels:
    """Where this rank stands in the parallel layout, e.g. ``{"dp": "3", "pp": "0"}``."""

    TYPE: ClassVar[str] = "rank_labels"
    local_rank: int
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInit:
    """This rank will report checkpoints named by ``prefix``.

    ``checkpoint_types`` maps a type to the number of this node's ranks that report it; a type that
    is not named is reported by every rank, once any rank reports it.  It is a declaration only:
    however late it comes, nothing that was confirmed is forgotten.
    """

    TYPE: ClassVar[str] = "ckpt_init"
    local_rank: int
    prefix: str
    checkpoint_types: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """This rank's part of the checkpoint of ``step`` is complete and durable at ``path``."""

    TYPE: ClassVar[str] = "ckpt_info_update"
    local_rank: int
    prefix: str
    step: int
    path: str
    checkpoint_type: str = MODEL_CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuery:
    """Which checkpoint should this rank load?  Answered by `CheckpointAnswer`."""

    TYPE: ClassVar[str] = "ckpt_info_get"
    local_rank: int
    prefix: str
    checkpoint_type: str = MODEL_CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAnswer:
    """The job-wide choice; ``step`` and ``path`` are None when nothing has been chosen.

    An empty ``path`` is a choice too: begin from nothing, whatever lies on the disk.
    """

    TYPE: ClassVar[str] = "ckpt_info_get"
    prefix: str
    step: int | None
    path: str | None
    reply_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBarrier:
    """This rank waits before its re-executable block.  Answered by `JobStart`, whenever that is.

    ``epoch`` is the generation in which it ran the block last, 0 for never: a start of that
    generation is over for it.  None is said by clients that do not know of epochs.
    """

    TYPE: ClassVar[str] = "at_rcb_barrier"
    local_rank: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastBarrier:
    """This rank runs its block in generation ``epoch``.

    Answered by `JobHalt` if that is called off, and not at all otherwise.
    """

    TYPE: ClassVar[str] = "past_rcb_barrier"
    local_rank: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBlock:
    """This rank is through with its block and cannot be brought back to the barrier any more."""

    TYPE: ClassVar[str] = "left_rcb"
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobData:
    """What this rank has an operator know before the next start, as a text that only both read.

    Shown in the node's status until the rank runs its block.
    """

    TYPE: ClassVar[str] = "job_data"
    local_rank: int
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousQuery:
    """Which place does this node have?  Asked by torchrun; answered by `RendezvousAnswer`."""

    TYPE: ClassVar[str] = "rdzv_get"
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousAnswer:
    """This node's group rank of ``nnodes``, and where group rank 0 opens its store."""

    TYPE: ClassVar[str] = "rdzv_info"
    rank: int
    nnodes: int
    master_addr: str
    master_port: int
    generation: int
    topology_version: int
    reply_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The connection is alive although nothing happened."""

    TYPE: ClassVar[str] = "heartbeat"
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """Leave the barrier and run the block in ``generation``.

    ``worker_envs`` is to be set in the environment first.  ``stdout`` and ``stderr`` are the files
    of this generation, None where the process writes to the right ones already.
    """

    TYPE: ClassVar[str] = "job_start"
    reply_to: int
    generation: int
    worker_envs: Mapping[str, str]
    stdout: str | None = None
    stderr: str | None = None
    aggregate_worker_data: Mapping[str, Any] = field(default_factory=dict)
    """``rank_ips``, the host of each group rank, and what an operator tells all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRankInfo:
    """This rank's place has changed while it waits at the barrier; a `JobStart` still follows.

    It tells a framework early what it will have to prepare for; the start says all of it again.
    """

    TYPE: ClassVar[str] = "job_rank_info"
    reply_to: int
    worker_envs: Mapping[str, str]
    aggregate_worker_data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHalt:
    """Leave the block, whatever it does, and come back to the barrier."""

    TYPE: ClassVar[str] = "job_fault"
    reply_to: int
    restart_count: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The message with sequence number ``reply_to`` was accepted."""

    TYPE: ClassVar[str] = "ack"
    reply_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The message was not accepted, and why.  ``reply_to`` is None when it could not be read."""

    TYPE: ClassVar[str] = "error"
    reply_to: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoutStatus:
    """What SCOUT's newest check in this rank found; every rank of a job says the same.

    ``outcome`` is ``healthy``, ``straggler``, ``inconclusive``, ``corrupt`` or ``not_run``.
    ``verified`` and ``rejected`` are steps whose state was found good and bad, newest last;
    ``interval`` and ``worst_case_steps`` are 0 while they are not known.
    """

    TYPE: ClassVar[str] = "scout_status"
    local_rank: int
    step: int
    outcome: str
    why: str = ""
    corrupt_ranks: tuple[int, ...] = ()
    straggler_ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    verified: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()
    checks: int = 0
    checks_not_run: int = 0
    check_ms: float = 0.0
    interval: int = 0
    worst_case_steps: int = 0


WorkerMessage = (
    Init
    | JobFault
    | RankLabels
    | CheckpointInit
    | CheckpointSaved
    | CheckpointQuery
    | AtBarrier
    | PastBarrier
    | LeftBlock
    | JobData
    | RendezvousQuery
    | Heartbeat
    | ScoutStatus
)
SidecarReply = (
    Ack | Refusal | CheckpointAnswer | RendezvousAnswer | JobStart | JobRankInfo | JobHalt
)

WORKER_MESSAGES: Final[Mapping[str, type[WorkerMessage]]] = {
    cls.TYPE: cls
    for cls in (
        Init,
        JobFault,
        RankLabels,
        CheckpointInit,
        CheckpointSaved,
        CheckpointQuery,
        AtBarrier,
        PastBarrier,
        LeftBlock,
        JobData,
        RendezvousQuery,
        Heartbeat,
        ScoutStatus,
    )
}
SIDECAR_REPLIES: Final[Mapping[str, type[SidecarReply]]] = {
    cls.TYPE: cls
    for cls in (Ack, Refusal, CheckpointAnswer, RendezvousAnswer, JobStart, JobRankInfo, JobHalt)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What surrounds a worker message on the wire.

    ``client_id`` names the client object, ``seq`` numbers its messages from 1, ``generation`` is
    the job's run number; a message of another generation is refused.
    """

    client_id: str
    seq: int
    generation: int


def worker_frame(message: WorkerMessage, envelope: Envelope) -> dict[str, Any]:
    """Return the JSON object for ``message``; `framing.encode` makes the bytes."""
    return {"type": message.TYPE, **asdict(envelope), **_plain(message)}


def reply_frame(reply: SidecarReply) -> dict[str, Any]:
    """Return the JSON object for a sidecar's answer."""
    return {"type": reply.TYPE, **_plain(reply)}


def _plain(message: WorkerMessage | SidecarReply) -> dict[str, Any]:
    return {key: value for key, value in asdict(message).items() if value is not None}
