"""What a worker's message means: the answer, and what is to be noted because of it."""

from dataclasses import dataclass
from typing import Final

from sidecar.api import FaultReport, Start
from sidecar.checkpoints import CheckpointRecord, checkpoint_answer
from sidecar.events import WorkerSpoke
from sidecar.findings import corruption, reported_fault
from sidecar.names import labels_problem
from sidecar.ranks import Worker
from worker_shim.messages import (
    Ack,
    AtBarrier,
    CheckpointInit,
    CheckpointQuery,
    CheckpointSaved,
    Heartbeat,
    Init,
    JobData,
    JobFault,
    LeftBlock,
    PastBarrier,
    RankLabels,
    Refusal,
    RendezvousAnswer,
    RendezvousQuery,
    ScoutStatus,
    SidecarReply,
    WorkerMessage,
)

DATA_CHARS_MAX: Final = 4096
"""What a rank may have an operator know; it is shown in every status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The ``reply`` to send, a ``fault`` to take, and whether the coordinator must be told."""

    reply: SidecarReply
    fault: FaultReport | None = None
    news: bool = False


def stale(event: WorkerSpoke, generation: int) -> Refusal | None:
    """Return the answer to a message of another generation than the one that runs, if it is one.

    Who a worker is, that it lives and that it waits holds over generations.
    """
    said, seq = event.envelope.generation, event.envelope.seq
    if said == generation or isinstance(event.message, Init | AtBarrier | JobData | Heartbeat):
        return None
    return Refusal(reply_to=seq, reason=f"generation {said} is over, {generation} runs now")


def hear(
    message: WorkerMessage,
    seq: int,
    *,
    rank: int,
    worker: Worker,
    checkpoints: CheckpointRecord,
    start: Start | None,
) -> Heard:
    """Take in a message of the present generation from global ``rank``."""
    done = Ack(reply_to=seq)
    fresh, worker.attached = not worker.attached, True
    match message:
        case JobFault():
            return Heard(reply=done, fault=reported_fault(message, rank), news=True)
        case RankLabels():
            unusable = labels_problem(message.labels)
            if unusable is not None:
                return Heard(reply=Refusal(reply_to=seq, reason=f"labels: {unusable}"), news=fresh)
            worker.labels = message.labels
            return Heard(reply=done, news=True)
        case JobData():
            if len(message.data) > DATA_CHARS_MAX:
                why = f"data: {len(message.data)} characters; {DATA_CHARS_MAX} are the most"
                return Heard(reply=Refusal(reply_to=seq, reason=why), news=fresh)
            worker.data = message.data
            return Heard(reply=done, news=fresh)
        case CheckpointSaved():
            refusal = checkpoints.saved(
                prefix=message.prefix,
                step=message.step,
                rank=rank,
                path=message.path,
                kind=message.checkpoint_type,
            )
            if refusal is not None:
                return Heard(reply=Refusal(reply_to=seq, reason=refusal), news=fresh)
            return Heard(reply=done, news=True)
        case CheckpointQuery():
            chosen = start.checkpoints if start else ()
            answer = checkpoint_answer(chosen, message.prefix, seq, message.checkpoint_type)
            return Heard(reply=answer)
        case CheckpointInit():
            refusal = checkpoints.declare(message.prefix, message.checkpoint_types)
            if refusal is not None:
                return Heard(reply=Refusal(reply_to=seq, reason=refusal), news=fresh)
            return Heard(reply=done, news=fresh or bool(message.checkpoint_types))
        case RendezvousQuery():
            worker.attached = False  # torchrun itself makes no steps
            return Heard(reply=_place(start, seq), news=True)
        case ScoutStatus():
            worker.scout = message
            return Heard(reply=done, fault=corruption(message, rank), news=True)
        case Init() | Heartbeat():
            return Heard(reply=done, news=fresh)
        case AtBarrier() | PastBarrier() | LeftBlock():
            raise AssertionError("where a worker stands is heard by `sidecar.barrier`")


def _place(start: Start | None, seq: int) -> RendezvousAnswer | Refusal:
    if start is None:
        return Refusal(reply_to=seq, reason="no start has told this node its place yet")
    return RendezvousAnswer(
        rank=start.group_rank,
        nnodes=start.nnodes,
        master_addr=start.master_addr,
        master_port=start.master_port,
        generation=start.generation,
        topology_version=start.topology_version,
        reply_to=seq,
    )
