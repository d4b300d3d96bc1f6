"""What this rank owes its sidecar, and which step it is at: pure state, no socket, no thread.

`Outbox` decides what to send and what may be forgotten.  Every connection starts with `Init` and
then repeats everything that is still owed, so that a sidecar which came back learns all of it
again; a message is owed until it is answered.  Each sending has a fresh sequence number and the
sidecar's handlers are idempotent: a report arrives at least once.

`StepCounter` turns "optimizer steps completed in this process" into the job's own step numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from worker_shim.framing import BadFrame
from worker_shim.messages import (
    Ack,
    AtBarrier,
    CheckpointAnswer,
    CheckpointInit,
    CheckpointQuery,
    CheckpointSaved,
    Envelope,
    Heartbeat,
    Init,
    JobFault,
    JobHalt,
    JobStart,
    LeftBlock,
    PastBarrier,
    RankLabels,
    Refusal,
    ScoutStatus,
    SidecarReply,
    WorkerMessage,
    worker_frame,
)

OWED_MAX: Final = 256
"""Messages kept while nobody answers: hours of checkpoints.  The oldest is dropped beyond it."""
PREFIXES_MAX: Final = 64
"""Checkpoint series of one script; each is told again on every connection."""

Waiting: TypeAlias = AtBarrier | PastBarrier
"""Answered when something comes to pass, which may be never."""
Owed: TypeAlias = JobFault | CheckpointSaved | CheckpointQuery | LeftBlock | Waiting | ScoutStatus
Standing: TypeAlias = RankLabels | CheckpointInit


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a reply changed.  ``ticket`` is the owed message that it settles."""

    reply: SidecarReply | None
    ticket: int | None = None
    note: str | None = None
    """A sentence for the rank's own log, when something was not accepted."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    message: Owed
    sent_as: int | None = None


class Outbox:
    """Everything between a rank's calls and its connection."""

    def __init__(self, *, client_id: str, generation: int, local_rank: int, pid: int) -> None:
        self._client_id = client_id
        self._generation = generation
        self._init = Init(local_rank=local_rank, pid=pid)
        self._seq = 0
        self._init_sent_as: int | None = None
        self._labels: RankLabels | None = None
        self._prefixes: dict[str, CheckpointInit] = {}
        self._unsaid: list[Standing] = []
        self._owed: dict[int, _Pending] = {}
        self._next_ticket = 1
        self.accepted = False
        """The sidecar answered `Init` on the connection that is open now."""
        self.rejected: str | None = None
        """Why the sidecar does not want this process; nothing more is sent then."""

    @property
    def owed(self) -> int:
        """How many messages wait for an answer that comes at once."""
        return sum(not isinstance(it.message, Waiting) for it in self._owed.values())

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._init.local_rank

    def owe(self, message: Owed) -> int:
        """Keep ``message`` until it is answered, and return its ticket."""
        if len(self._owed) >= OWED_MAX:
            oldest = (at for at, it in self._owed.items() if not isinstance(it.message, Waiting))
            del self._owed[next(oldest)]
        ticket = self._next_ticket
        self._next_ticket += 1
        self._owed[ticket] = _Pending(message=message)
        return ticket

    def is_owed(self, ticket: int) -> bool:
        """True until the message is answered, dropped or forgotten."""
        return ticket in self._owed

    def forget(self, ticket: int) -> None:
        """Nobody waits for this answer any more."""
        self._owed.pop(ticket, None)

    def turn_to(self, generation: int) -> None:
        """Speak for ``generation`` from now on; what is owed from before is nobody's any more."""
        self._generation = generation
        self._owed.clear()

    def set_labels(self, labels: Mapping[str, str]) -> None:
        """Replace the labels: a level, told once per connection and at every change."""
        self._labels = RankLabels(local_rank=self.local_rank, labels=dict(labels))
        self._unsaid = [said for said in self._unsaid if not isinstance(said, RankLabels)]
        self._unsaid.append(self._labels)

    def use_prefix(self, prefix: str) -> None:
        """Say, before its first report, that a checkpoint series exists."""
        if prefix not in self._prefixes and len(self._prefixes) < PREFIXES_MAX:
            self._prefixes[prefix] = CheckpointInit(local_rank=self.local_rank, prefix=prefix)
            self._unsaid.append(self._prefixes[prefix])

    def opened(self) -> None:
        """A connection opened: its first frames repeat everything that is owed."""
        self.accepted = False
        self._init_sent_as = None
        self._unsaid = [*self._prefixes.values()]
        if self._labels is not None:
            self._unsaid.append(self._labels)
        for pending in self._owed.values():
            pending.sent_as = None

    def closed(self) -> None:
        """The connection is gone; what was not answered is owed still."""
        self.accepted = False

    def frames(self) -> Iterator[dict[str, Any]]:
        """Yield what has not been said on this connection."""
        if self.rejected is not None:
            return
        if self._init_sent_as is None:
            yield self._frame(self._init)
            self._init_sent_as = self._seq
        unsaid, self._unsaid = self._unsaid, []
        for standing in unsaid:
            yield self._frame(standing)
        for pending in list(self._owed.values()):
            if pending.sent_as is None:
                frame = self._frame(pending.message)
                pending.sent_as = self._seq
                yield frame

    def heartbeat(self) -> dict[str, Any]:
        """Return the frame that shows the connection to be alive."""
        return self._frame(Heartbeat(local_rank=self.local_rank))

    def heard(self, frame: dict[str, Any] | BadFrame) -> Heard:
        """Settle what the sidecar's reply answers.  An answer to nothing changes nothing."""
        if isinstance(frame, BadFrame):
            return Heard(reply=None, note=f"the sidecar's answer is unreadable: {frame.reason}")
        reply = parse_reply(frame)
        if reply is None:
            return Heard(reply=None)
        if reply.reply_to is not None and reply.reply_to == self._init_sent_as:
            return self._heard_of_init(reply)
        ticket = next((at for at, it in self._owed.items() if it.sent_as == reply.reply_to), None)
        if ticket is not None and reply.reply_to is not None:
            del self._owed[ticket]
        else:
            ticket = None
        note = f"the sidecar refused: {reply.reason}" if isinstance(reply, Refusal) else None
        return Heard(reply=reply, ticket=ticket, note=note)

    def _heard_of_init(self, reply: SidecarReply) -> Heard:
        if isinstance(reply, Refusal):
            self.rejected = reply.reason
            self._owed.clear()
            return Heard(reply=reply, note=f"the sidecar refused this process: {reply.reason}")
        self.accepted = True
        return Heard(reply=reply)

    def _frame(self, message: WorkerMessage) -> dict[str, Any]:
        self._seq += 1
        envelope = Envelope(client_id=self._client_id, seq=self._seq, generation=self._generation)
        return worker_frame(message, envelope)


class StepCounter:
    """The job's step, counted by optimizer steps and anchored whenever the script names one.

    The script's numbering is unknown until it loads or saves a checkpoint of a known step; until
    then steps count from the start of this process.
    """

    __slots__ = ("_completed", "_offset", "step")

    def __init__(self) -> None:
        self._completed = 0
        self._offset = 0
        self.step = 0
        """Completed steps of the job, as far as this process knows.  To be read only."""

    def advance(self) -> int:
        """Count one completed optimizer step and return the job's step."""
        self._completed += 1
        self.step = self._completed + self._offset
        return self.step

    def begin_again(self) -> None:
        """The block runs again: steps count from its start until the script names one."""
        self._completed = self._offset = self.step = 0

    def anchor(self, step: int) -> None:
        """The script says that exactly ``step`` steps are complete now."""
        self._offset = step - self._completed
        self.step = step


def parse_reply(frame: Mapping[str, Any]) -> SidecarReply | None:
    """Return the reply, or None when it is of no known type or lacks what its type needs."""
    kind = frame.get("type")
    reply_to = _integer(frame.get("reply_to"))
    if kind == Refusal.TYPE:
        return Refusal(reply_to=reply_to, reason=str(frame.get("reason", "no reason given")))
    if reply_to is None:
        return None
    if kind == Ack.TYPE:
        return Ack(reply_to=reply_to)
    if kind in (JobStart.TYPE, JobHalt.TYPE):
        return _barrier_reply(frame, reply_to)
    prefix, path = frame.get("prefix"), frame.get("path")
    if kind != CheckpointAnswer.TYPE or not isinstance(prefix, str):
        return None
    return CheckpointAnswer(
        prefix=prefix,
        step=_integer(frame.get("step")),
        path=path if isinstance(path, str) else None,
        reply_to=reply_to,
    )


def _barrier_reply(frame: Mapping[str, Any], reply_to: int) -> SidecarReply | None:
    if frame.get("type") == JobHalt.TYPE:
        count = _integer(frame.get("restart_count")) or 0
        reason = str(frame.get("reason", ""))
        return JobHalt(reply_to=reply_to, restart_count=count, reason=reason)
    generation, envs = _integer(frame.get("generation")), frame.get("worker_envs")
    if generation is None or not isinstance(envs, Mapping):
        return None
    stdout, stderr = frame.get("stdout"), frame.get("stderr")
    return JobStart(
        reply_to=reply_to,
        generation=generation,
        worker_envs={str(name): str(value) for name, value in envs.items()},
        stdout=stdout if isinstance(stdout, str) else None,
        stderr=stderr if isinstance(stderr, str) else None,
    )


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
