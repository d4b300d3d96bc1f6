"""A simulated node: the real agent core, and shells that need virtual time for what they do.

It spawns, kills, looks, reserves ports and dials; what came of each returns to the core as an
event, as on a real node.  A crash ends agent and workers together, and a later start is another
incarnation that knows nothing.
"""

from collections.abc import Callable
from typing import Final

from scout.clock import Instant, after, seconds
from sidecar.agent import AgentCore
from sidecar.agent_config import AgentConfig
from sidecar.api import (
    PROTOCOL_VERSION,
    Downward,
    EvidenceReport,
    ExitCause,
    FaultKind,
    Goodbye,
    Hello,
    ProgressReport,
    Start,
    StatusReport,
    Welcome,
)
from sidecar.events import (
    AnswerWorker,
    CommandReceived,
    DiscardState,
    Effect,
    Event,
    EvidenceTaken,
    HardwareFinding,
    InspectionTaken,
    KeepTable,
    KillWorkers,
    LogFinding,
    Orders,
    PortReserved,
    ProgressObserved,
    Quit,
    Reply,
    Report,
    ReservePort,
    Say,
    SpawnFailed,
    SpawnWorkers,
    TakeInspection,
    UplinkOpened,
    WatchLogs,
    WorkerExited,
    WorkersGone,
    WorkerSpoke,
    WorkersSpawned,
)
from sidecar.rank_evidence import RankEvidence, ThreadStack
from tests.simulation.network import Link, Network
from tests.simulation.training import PREFIX, Hang, Training, Worker
from tests.simulation.world import Timer, World
from worker_shim.messages import (
    AtBarrier,
    CheckpointSaved,
    Envelope,
    JobFault,
    JobHalt,
    JobStart,
    PastBarrier,
    RestartMode,
    WorkerMessage,
)

TICK_S: Final = 0.25
"""Between two looks at the progress pages."""
REDIAL_S: Final = 0.5
PORT_FIRST: Final = 30_000


class Node:
    """One machine with its sidecar."""

    def __init__(
        self, world: World, network: Network, training: Training, *, job: str, name: str, nproc: int
    ) -> None:
        self.name = name
        self.spare = False
        self.slowness = 1.0
        self.agent: AgentCore | None = None
        self.life = 0
        self.workers: list[Worker] = []
        """Those of this life that nobody has collected."""
        self.told_stopped = 0
        """The highest generation that this life said to be stopped."""
        self.cut_off_until = Instant(0)
        self.broken_gpu: int | None = None
        self.spawn_fails = 0
        """How many of the next spawns fail."""
        self.exit_status: int | None = None
        self._world, self._network, self._training = world, network, training
        self._job, self._nproc = job, nproc
        self._dice = world.dice(name)
        self._clock_ns = self._dice.randrange(10**12, 10**15)
        self._link: Link | None = None
        self._welcome = False
        self._timer: Timer | None = None
        self._pids = 0
        self._spawning: int | None = None
        self._ending: int | None = None
        self._keep: frozenset[int] = frozenset()

    # --- power ------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start a sidecar that knows nothing."""
        assert self.agent is None, "one sidecar a node"
        self.life += 1
        self.told_stopped = 0
        config = AgentConfig(
            job=self._job,
            node=self.name,
            incarnation=f"{self.name}/{self.life}",
            nproc_per_node=self._nproc,
        )
        self.agent = AgentCore(config, self.now())
        for effect in self.agent.begin():
            self._execute(effect)
        self._arm()
        self._later(0.01, self._tick)
        self._dial()
        if self.broken_gpu is not None:
            self._later(1.0, lambda: self.gpu_breaks(self.broken_gpu or 0))

    def crash(self, *, silent: bool) -> None:
        """Lose sidecar and workers; ``silent`` when the machine takes its sockets with it."""
        self.agent = None
        self.life += 1
        self._spawning = self._ending = None
        for worker in list(self.workers):
            self._training.end(worker, ExitCause(signal=9), silent=silent)
        self.workers.clear()
        self._hang_up(quiet=silent)
        self._training.changes += 1

    def cut_off(self, span_s: float, *, quiet: bool) -> None:
        """Break the link, and let no other stand for a while."""
        self.cut_off_until = max(self.cut_off_until, after(self._world.now, seconds(span_s)))
        if self._link is not None:
            self._network.drop(self._link, quiet=quiet)

    def gpu_breaks(self, gpu: int) -> None:
        """Let the health source convict a device."""
        self.broken_gpu = gpu
        line = f"NVRM: Xid (PCI:0000:0{gpu}:00): 79, GPU has fallen off the bus."
        self._handle(HardwareFinding(gpu=gpu, reason="Xid79", message="fell off", line=line))

    def now(self) -> Instant:
        """Return this machine's own clock."""
        return Instant(self._world.now + self._clock_ns)

    # --- the network's end ------------------------------------------------------------------

    def reachable(self) -> bool:
        """Return whether packets get through."""
        return self.agent is not None and self._world.now >= self.cut_off_until

    def dial_failed(self) -> None:
        """Try again a little later."""
        self._later(self._dice.uniform(0.2, 1.5) * REDIAL_S, self._dial)

    def link_up(self, link: Link) -> None:
        """Present ourselves."""
        if self._link is not None:  # dialled by an earlier life of this sidecar
            self._network.drop(link, quiet=False)
            return
        self._link, self._welcome = link, False
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            agent_version="0",
            job=self._job,
            node=self.name,
            incarnation=f"{self.name}/{self.life}",
            host=f"10.0.0.{self.name}",
            http_port=8080,
            nproc_per_node=self._nproc,
            spare=self.spare,
        )
        self._network.up(link, hello)

    def link_lost(self, link: Link) -> None:
        """Dial again."""
        if link is self._link:
            self._link, self._welcome = None, False
            self.dial_failed()

    def told(self, link: Link, message: Downward) -> None:
        """Hand a command to the core."""
        if link is not self._link:
            return
        match message:
            case Welcome():
                self._welcome = True
                self._handle(UplinkOpened(heartbeat_s=message.heartbeat_s))
            case Goodbye(retry=False):
                self._link = None  # whoever said so closes it, and coming back would help nothing
                self._world.note(f"{self.name} is not wanted: {message.reason}")
            case Goodbye():
                pass
            case _:
                self._handle(CommandReceived(command=message))

    # --- the workers' end -------------------------------------------------------------------

    def worker_ended(self, worker: Worker, cause: ExitCause, lines: tuple[str, ...]) -> None:
        """See it die, and say so a moment later."""
        event = WorkerExited(
            generation=worker.generation,
            local_rank=worker.local_rank,
            pid=worker.pid,
            cause=cause,
            last_lines=lines,
        )
        self._later(self._dice.uniform(0.001, 0.02) * self.slowness, lambda: self._handle(event))

    def worker_saved(self, worker: Worker, step: int, path: str) -> None:
        """Hear of a checkpoint."""
        self._hear(
            worker,
            CheckpointSaved(local_rank=worker.local_rank, prefix=PREFIX, step=step, path=path),
        )

    def worker_failed(self, worker: Worker, line: str) -> None:
        """Hear that it failed, and that it stands at its barrier again."""
        fault = JobFault(
            local_rank=worker.local_rank,
            reason="RuntimeError",
            message=line,
            restart_mode=RestartMode.IN_PROCESS,
        )
        self._hear(worker, fault)
        self._at_barrier(worker)

    def worker_printed_nan(self, worker: Worker, step: int) -> None:
        """Read the line a moment after it was written."""
        took = self._dice.uniform(0.01, 0.06)
        event = LogFinding(
            generation=worker.generation,
            local_rank=worker.local_rank,
            kind=FaultKind.LOG_RULE,
            rule="NonFiniteLoss",
            message="loss: nan",
            line=f"iteration {step} | loss: nan",
            age_ns=seconds(took),
            step=step,
        )
        self._later(took, lambda: self._handle(event))

    def _hear(self, worker: Worker, message: WorkerMessage) -> None:
        generation = worker.epoch if self._training.restartable else worker.generation
        envelope = Envelope(client_id=f"{worker.pid}", seq=1, generation=generation)
        event = WorkerSpoke(connection=worker.pid, envelope=envelope, message=message)

        def hear() -> None:
            if worker.alive:
                self._handle(event)

        self._later(0.001, hear)

    def _at_barrier(self, worker: Worker) -> None:
        self._hear(worker, AtBarrier(local_rank=worker.local_rank, epoch=worker.epoch))

    def _answer(self, effect: AnswerWorker) -> None:
        worker = next((it for it in self.workers if it.pid == effect.connection), None)
        start = self.agent._crew.start if self.agent is not None else None
        if worker is None or start is None:
            return
        match effect.reply:
            case JobStart(generation=generation):
                self._later(0.002, lambda: self._go(worker, start, generation))
            case JobHalt():
                takes = self._dice.uniform(0.01, 0.3) * self.slowness
                self._later(takes, lambda: self._come_back(worker, worker.epoch))

    def _go(self, worker: Worker, start: Start, generation: int) -> None:
        if worker.alive and worker.parked and worker.hang is None:
            assert worker.epoch < generation == start.generation, "a start for another generation"
            self._training.join(worker, start)
            self._hear(worker, PastBarrier(local_rank=worker.local_rank, epoch=generation))

    def _come_back(self, worker: Worker, epoch: int) -> None:
        able = worker.alive and worker.hang in (None, Hang.CUT_OFF) and worker.epoch == epoch
        if able and not worker.parked:
            worker.hang = None
            self._training.leave(worker)
            self._at_barrier(worker)

    # --- the core ---------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if self.agent is None:
            return
        for effect in self.agent.handle(event, self.now()):
            self._execute(effect)
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = None if self.agent is None else self.agent.next_deadline()
        if due is not None:
            delay_s = max(0, due - self.now()) / 1e9
            self._timer = self._later(delay_s, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        if self.agent is not None:
            for effect in self.agent.handle_timer(self.now()):
                self._execute(effect)
            self._arm()

    def _execute(self, effect: Effect) -> None:
        match effect:
            case SpawnWorkers():
                self._spawning = effect.start.generation
                took = self._dice.uniform(0.05, 0.6) * self.slowness
                self._later(took, lambda: self._spawn(effect.start, effect.keep))
            case KillWorkers():
                self._kill(effect.generation, effect.keep)
            case TakeInspection():
                took = self._dice.uniform(0.005, 0.05) * self.slowness
                self._later(took, lambda: self._inspect(effect))
            case ReservePort():
                self._later(0.002, lambda: self._handle(PortReserved(port=self._new_port())))
            case Report():
                self._report(effect.message)
            case Quit():
                self.exit_status = effect.code
                self.crash(silent=False)
            case AnswerWorker():
                self._answer(effect)
            case Reply() | WatchLogs() | Say() | DiscardState() | KeepTable():
                pass

    def _report(self, message: StatusReport | ProgressReport | EvidenceReport) -> None:
        if self._link is None or not self._welcome:
            return
        if isinstance(message, StatusReport):
            self.told_stopped = max(self.told_stopped, message.stopped_generation)
        self._network.up(self._link, message)

    # --- shells -----------------------------------------------------------------------------

    def _spawn(self, start: Start, keep: frozenset[int]) -> None:
        self._spawning = None
        assert len(start.node_hosts) == start.nnodes, "a start with a whole table of hosts"
        assert start.node_hosts[start.group_rank] == f"10.0.0.{self.name}", "and a true one"
        if self._ending is not None or self.spawn_fails > 0:
            self.spawn_fails = max(0, self.spawn_fails - 1)
            why = "cannot start a worker: No space left on device"
            self._handle(SpawnFailed(generation=start.generation, reason=why))
            return
        carried = {it.local_rank: Orders() for it in self.workers if it.local_rank in keep}
        for worker in self.workers:
            self._training.carry(worker, start, self._nproc)
        pids = {worker.local_rank: worker.pid for worker in self.workers}
        for local_rank in set(range(self._nproc)) - carried.keys():
            self._pids += 1
            worker = self._training.spawn(self, start, local_rank, self._nproc, self._pids)
            self.workers.append(worker)
            pids[local_rank] = worker.pid
            if self._training.restartable:
                self._later(self._dice.uniform(0.1, 1.0), lambda it=worker: self._at_barrier(it))
        self._handle(WorkersSpawned(generation=start.generation, pids=pids, carried=carried))

    def _kill(self, generation: int, keep: frozenset[int]) -> None:
        if self._ending is None:
            self._ending = generation
            self._later(self._dice.uniform(0.01, 0.4) * self.slowness, self._finish_killing)
        self._ending = max(self._ending, generation)
        self._keep = keep

    def _finish_killing(self) -> None:
        assert self._ending is not None, "killing is under way"
        if self._spawning is not None and self._spawning <= self._ending:
            self._later(0.05, self._finish_killing)  # the real launcher's spawn cannot be split
            return
        generation, self._ending = self._ending, None
        ended = [item for item in self.workers if item.generation <= generation]
        for worker in ended:
            if worker.local_rank not in self._keep or not worker.alive:
                self._training.end(worker, ExitCause(signal=9))
                self.workers.remove(worker)
        self._handle(WorkersGone(generation=generation, kept=self._keep))

    def _tick(self) -> None:
        self._later(TICK_S, self._tick)
        if self.workers:
            newest = max(worker.generation for worker in self.workers)
            ranks = tuple(it.snapshot(self._world.now) for it in self.workers)
            self._handle(ProgressObserved(generation=newest, ranks=ranks))

    def _inspect(self, effect: TakeInspection) -> None:
        ranks = tuple(worker.snapshot(self._world.now) for worker in self.workers)
        follows = effect.evidence_budget_s > 0 and bool(self.workers)
        self._handle(
            InspectionTaken(round_id=effect.round_id, ranks=ranks, evidence_follows=follows)
        )
        if follows:
            took = self._dice.uniform(0.02, 0.1) * self.slowness
            running = tuple(self.workers)
            self._later(min(took, effect.evidence_budget_s), lambda: self._testify(effect, running))

    def _testify(self, effect: TakeInspection, running: tuple[Worker, ...]) -> None:
        evidence = {}
        for worker in running:
            where = f"train (train.py:{100 + worker.snapshot(self._world.now).phase})"
            stack = ThreadStack(
                name="MainThread", main=True, frames=(where, "<module> (train.py:9)")
            )
            evidence[str(worker.rank)] = RankEvidence(threads=(stack,))
        self._handle(EvidenceTaken(round_id=effect.round_id, evidence=evidence))

    def _dial(self) -> None:
        if self._link is None:
            self._network.dial(self)

    def _hang_up(self, *, quiet: bool) -> None:
        link, self._link, self._welcome = self._link, None, False
        if link is not None:
            self._network.drop(link, quiet=quiet)

    def _new_port(self) -> int:
        return PORT_FIRST + self._dice.randrange(10_000)

    def _later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Do something later in this life of the sidecar, or never."""
        life = self.life
        return self._world.later(delay_s, lambda: action() if life == self.life else None)
