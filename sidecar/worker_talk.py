"""What a worker's message means: the answer, and what is to be noted because of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.api import CheckpointPointer, FaultReport
from sidecar.checkpoints import CheckpointRecord, checkpoint_answer
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
    JobFault,
    LeftBlock,
    PastBarrier,
    RankLabels,
    Refusal,
    ScoutStatus,
    SidecarReply,
    WorkerMessage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The ``reply`` to send, a ``fault`` to take, and whether the coordinator must be told."""

    reply: SidecarReply
    fault: FaultReport | None = None
    news: bool = False


def hear(
    message: WorkerMessage,
    seq: int,
    *,
    rank: int,
    worker: Worker,
    checkpoints: CheckpointRecord,
    chosen: Sequence[CheckpointPointer],
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
            answer = checkpoint_answer(chosen, message.prefix, seq, message.checkpoint_type)
            return Heard(reply=answer)
        case CheckpointInit():
            refusal = checkpoints.declare(message.prefix, message.checkpoint_types)
            if refusal is not None:
                return Heard(reply=Refusal(reply_to=seq, reason=refusal), news=fresh)
            return Heard(reply=done, news=fresh or bool(message.checkpoint_types))
        case ScoutStatus():
            worker.scout = message
            return Heard(reply=done, fault=corruption(message, rank), news=True)
        case Init() | Heartbeat():
            return Heard(reply=done, news=fresh)
        case AtBarrier() | PastBarrier() | LeftBlock():
            raise AssertionError("where a worker stands is heard by `sidecar.barrier`")
