"""The workers of one node from start to stop: who they are, who stands at the barrier, who must go.

It keeps what the agent's decisions about single workers need, and turns a stop into what is to be
done with each of them.  States of the agent, faults and commands are none of its business.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from scout.clock import Instant, after
from sidecar.api import FaultReport, RankStatus, Start, Stop, Update
from sidecar.barrier import Barrier
from sidecar.events import (
    AnswerWorker,
    Effect,
    KillWorkers,
    Orders,
    ProgressObserved,
    Say,
    WorkerExited,
    WorkersGone,
    WorkersSpawned,
)
from sidecar.ranks import Worker, stall_policy
from sidecar.stopping import STOP_FORCED_AFTER, Stopping
from sidecar.workers.environment import rank_variables
from worker_shim.messages import RestartMode

STUCK: Final = "stopped and hears nothing"


class Crew:
    """One node's workers, by local rank."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self.barrier = Barrier()
        self.stopping: Stopping | None = None
        """The stop that is under way."""
        self.workers: dict[int, Worker] = {}
        self.completed: set[int] = set()
        """Those that ended with exit status 0."""
        self.start: Start | None = None
        """The last start that was obeyed."""
        self.script_version = ""
        """Of what the workers of that start run."""

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local one."""
        return (self.start.group_rank if self.start else 0) * self.nproc + local_rank

    def observes(self, report: FaultReport) -> bool:
        """Return True for a fault whose detector is on probation: it changes nothing."""
        return self.start is not None and report.kind in self.start.observed

    def ranks(self) -> dict[int, int]:
        """Return local rank -> global rank of every worker."""
        return {local_rank: self.rank(local_rank) for local_rank in self.workers}

    def pids(self) -> dict[int | None, int]:
        """Return process id -> local rank; None stands for those that are being started."""
        return {worker.pid: local for local, worker in self.workers.items()}

    def statuses(self, now: Instant) -> tuple[RankStatus, ...]:
        """Return what the coordinator is told of each worker."""
        restartable, waiting = self.barrier.restartable, self.barrier.waiting
        return tuple(
            worker.status(
                self.rank(local_rank),
                local_rank,
                now,
                restartable=local_rank in restartable,
                at_barrier=local_rank in waiting,
            )
            for local_rank, worker in sorted(self.workers.items())
        )

    # --- starting -----------------------------------------------------------------------------

    def begin(self, start: Start) -> frozenset[int]:
        """Prepare the workers of ``start``; return the local ranks whose process stays."""
        self.start = start
        keep = self.barrier.waiting
        self.completed.clear()
        self.workers = {
            local: self.workers[local].carried() if local in keep else Worker()
            for local in range(self.nproc)
        }
        return keep

    def told_place(self, update: Update, hosts: tuple[str, ...]) -> list[AnswerWorker]:
        """Tell those who wait at the barrier where they will stand."""
        places = {local: rank_variables(update, local, self.nproc) for local in range(self.nproc)}
        return self.barrier.tell(places, shared_data(hosts, update.worker_data))

    def worker_data(self) -> dict[str, str]:
        """Return what waiting ranks have to say to an operator, by global rank."""
        said = ((self.rank(local), worker.data) for local, worker in self.workers.items())
        return {str(rank): data for rank, data in said if data is not None}

    def spawned(self, event: WorkersSpawned) -> list[AnswerWorker]:
        """Take in the processes of a start, and let those go that stand at the barrier."""
        for local_rank, pid in event.pids.items():
            self.workers.setdefault(local_rank, Worker()).pid = pid
        if self.stopping is not None:  # called off already: nobody may pass
            return []
        for local_rank in self.barrier.restartable - event.carried.keys():
            self.barrier.forget(local_rank)  # another process stands for it now
        start = self.start
        shared = {} if start is None else shared_data(start.node_hosts, start.worker_data)
        orders = {
            local: replace(event.carried.get(local, Orders()), shared=shared)
            for local in event.pids
        }
        return self.barrier.start(event.generation, orders)

    def observe(self, event: ProgressObserved, start: Start, now: Instant) -> tuple[bool, bool]:
        """Take a look at every rank.  Returns whether there is news, and whether any stepped."""
        policy = stall_policy(start)
        news = stepped = False
        for seen in event.ranks:
            worker = self.workers.get(seen.local_rank)
            if worker is None or seen.local_rank in self.completed:
                continue
            before = worker.step
            worker.look(seen.process_state)
            news |= worker.observe(seen, policy, now)
            stepped |= worker.step != before
        return news, stepped

    # --- stopping -----------------------------------------------------------------------------

    def stop(self, stop: Stop, now: Instant) -> list[Effect]:
        """Begin a stop, or a deeper one in the place of the one that is under way."""
        self.stopping = Stopping.begin(stop, self.barrier.restartable, now)
        count = self.start.fault_count + 1 if self.start else 0
        called = self.barrier.halt(stop.generation, count, stop.reason)
        answers = called if stop.restart_mode is RestartMode.IN_PROCESS else []
        stuck = (local for local, worker in self.workers.items() if worker.is_stuck)
        said = self._given_up(self.stopping.give_up(stuck), STUCK)
        return [*answers, *said, self._kill(self.stopping, stop.grace_s)]

    def shut(self, generation: int) -> None:
        """Let nobody pass the barrier any more: the node is going away."""
        self.stopping = None
        self.barrier.halt(generation, 0, "the node shuts down")

    def go_on_stopping(self, now: Instant) -> list[Effect]:
        """Give up who is late or stuck, and kill again what should be gone."""
        stopping = self.stopping
        if stopping is None:
            return []
        stuck = (local for local, worker in self.workers.items() if worker.is_stuck)
        effects = self._fall_back(stuck, STUCK)
        late = f"not back at the barrier within {stopping.stop.barrier_s:g} s"
        effects += self._fall_back(stopping.overdue(self.barrier.waiting, now), late)
        if now >= stopping.forced_at:
            stopping.forced_at = after(now, STOP_FORCED_AFTER)
            text = "the stop did not end in time: killing again"
            effects += [Say(level="WARNING", text=text), self._kill(stopping, 0.0)]
        return effects

    def lost(self, event: WorkerExited, *, ready: bool) -> list[Effect]:
        """Take the end of a worker that does not run: it was to come back, or stood there."""
        gone = f"gone ({event.cause})"
        if self.stopping is not None:
            return self._fall_back([event.local_rank], gone)
        if not ready or event.local_rank not in self.barrier.waiting:
            return []
        del self.workers[event.local_rank]
        return self._given_up(frozenset({event.local_rank}), gone)

    def gone(self, event: WorkersGone) -> None:
        """Everybody is gone who had to."""
        if self.stopping is not None and event.generation >= self.stopping.stop.generation:
            self.stopping.gone(event.kept)

    def settled(self) -> Stopping | None:
        """Return the stop that has ended just now, if one has."""
        stopping = self.stopping
        if stopping is None or not stopping.is_over(self.barrier.waiting):
            return None
        self.stopping = None
        if stopping.stop.restart_mode is RestartMode.JOB:
            self.barrier = Barrier()
        for local_rank in self.barrier.restartable - stopping.returning:
            self.barrier.forget(local_rank)
        self.workers = {
            local: worker.carried()
            for local, worker in self.workers.items()
            if local in stopping.returning
        }
        return stopping

    def _fall_back(self, local_ranks: Iterable[int], why: str) -> list[Effect]:
        assert self.stopping is not None, "only a stop expects somebody back"
        given_up = self.stopping.give_up(local_ranks)
        if not given_up:
            return []
        return [*self._given_up(given_up, why), self._kill(self.stopping, 0.0)]

    def _kill(self, stopping: Stopping, grace_s: float) -> KillWorkers:
        """Ask for the end of everybody who is not to come back."""
        stopping.emptied = False
        generation, keep = stopping.stop.generation, stopping.returning
        return KillWorkers(generation=generation, grace_s=grace_s, keep=keep)

    def _given_up(self, local_ranks: frozenset[int], why: str) -> list[Effect]:
        """Say, for each, that its in-process restart became a process restart."""
        for local_rank in local_ranks:
            self.barrier.forget(local_rank)
        return [
            Say(level="WARNING", text=f"rank {self.rank(it)} is {why}: it gets a new process")
            for it in sorted(local_ranks)
        ]


def shared_data(hosts: tuple[str, ...], worker_data: Any) -> dict[str, Any]:
    """Return what every waiting worker is told, in the HyperPod agent's field names.

    Empty where no operator told anything, so that a start's frame stays small.
    """
    if worker_data is None:
        return {}
    return {"rank_ips": list(hosts), "aggregate_worker_data": worker_data}
