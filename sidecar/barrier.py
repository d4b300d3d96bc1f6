"""Who of this node's workers stands at the barrier of its re-executable block, and who is inside.

A worker's question at the barrier stays open until there is a start for it, and its word that it
is inside until it is called back; either is asked again on a new connection.  A start carries
its generation and the question the last one that the worker ran, so no start is lost and none is
obeyed twice, whatever order messages come in.  It refuses to know processes and deadlines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sidecar.events import AnswerWorker, Orders
from worker_shim.messages import (
    Ack,
    AtBarrier,
    JobHalt,
    JobRankInfo,
    JobStart,
    LeftBlock,
    PastBarrier,
    Refusal,
)


@dataclass(frozen=True, slots=True)
class _Asked:
    connection: int
    seq: int
    epoch: int


class Barrier:
    """The barrier of one node, by local rank."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._waiting: dict[int, _Asked] = {}
        self._inside: dict[int, _Asked] = {}
        self._ran: dict[int, int] = {}
        self._orders: dict[int, tuple[int, Orders]] = {}
        self._halt: tuple[int, int, str] | None = None

    @property
    def restartable(self) -> frozenset[int]:
        """The workers that have a block and can be brought back to its barrier."""
        return frozenset(self._known)

    @property
    def waiting(self) -> frozenset[int]:
        """The workers that stand at the barrier now."""
        return frozenset(self._waiting)

    def heard(
        self,
        message: AtBarrier | PastBarrier | LeftBlock,
        connection: int,
        seq: int,
        generation: int,
    ) -> list[AnswerWorker]:
        """Take a worker's word of where it stands; ``generation`` is the one this node is in."""
        local_rank = message.local_rank
        if isinstance(message, LeftBlock):
            self.forget(local_rank)
            return [AnswerWorker(connection=connection, reply=Ack(reply_to=seq))]
        self._known.add(local_rank)
        self._waiting.pop(local_rank, None)
        self._inside.pop(local_rank, None)
        if isinstance(message, PastBarrier):
            epoch = generation if message.epoch is None else message.epoch
            self._ran[local_rank] = epoch
            self._inside[local_rank] = _Asked(connection, seq, epoch)
            return self._called_back(local_rank)
        epoch = self._ran.get(local_rank, 0) if message.epoch is None else message.epoch
        if epoch > generation:
            reason = f"generation {epoch} has not been here, {generation} is the newest"
            return [AnswerWorker(connection=connection, reply=Refusal(reply_to=seq, reason=reason))]
        self._waiting[local_rank] = _Asked(connection, seq, epoch)
        return self._let_go(local_rank)

    def forget(self, local_rank: int) -> None:
        """The worker is gone, or through with its block."""
        self._known.discard(local_rank)
        for known in (self._waiting, self._inside, self._ran, self._orders):
            known.pop(local_rank, None)

    def halt(self, generation: int, restart_count: int, reason: str) -> list[AnswerWorker]:
        """Call everybody back who runs ``generation`` or an older one, now or when he says so."""
        self._halt = (generation, restart_count, reason)
        answers = [self._called_back(local_rank) for local_rank in list(self._inside)]
        return [answer for some in answers for answer in some]

    def tell(
        self, places: Mapping[int, Mapping[str, str]], shared: Mapping[str, Any]
    ) -> list[AnswerWorker]:
        """Tell everybody who waits his place in the next start; his question stays open."""
        return [
            AnswerWorker(
                connection=asked.connection,
                reply=JobRankInfo(
                    reply_to=asked.seq,
                    worker_envs=places[local_rank],
                    aggregate_worker_data=shared,
                ),
            )
            for local_rank, asked in self._waiting.items()
        ]

    def start(self, generation: int, orders: Mapping[int, Orders]) -> list[AnswerWorker]:
        """Let everybody run ``generation``, now or when he comes to the barrier."""
        self._halt = None
        self._orders = {local_rank: (generation, it) for local_rank, it in orders.items()}
        answers = [self._let_go(local_rank) for local_rank in list(self._waiting)]
        return [answer for some in answers for answer in some]

    def _let_go(self, local_rank: int) -> list[AnswerWorker]:
        asked, (generation, orders) = (
            self._waiting[local_rank],
            self._orders.get(local_rank, (0, Orders())),
        )
        if generation <= asked.epoch or (self._halt is not None and generation <= self._halt[0]):
            return []
        del self._waiting[local_rank]
        start = JobStart(
            reply_to=asked.seq,
            generation=generation,
            worker_envs=orders.envs,
            stdout=orders.stdout,
            stderr=orders.stderr,
            aggregate_worker_data=orders.shared,
        )
        return [AnswerWorker(connection=asked.connection, reply=start)]

    def _called_back(self, local_rank: int) -> list[AnswerWorker]:
        asked, halt = self._inside[local_rank], self._halt
        if halt is None or asked.epoch > halt[0]:
            return []
        reply = JobHalt(reply_to=asked.seq, restart_count=halt[1], reason=halt[2])
        return [AnswerWorker(connection=asked.connection, reply=reply)]
