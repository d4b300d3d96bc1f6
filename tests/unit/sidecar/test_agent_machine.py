"""The agent under any order of commands, workers' words, deaths and deadlines.

Hypothesis plays coordinator, launcher and workers; the agent's own table raises on a transition
that it does not have.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scout.clock import SECOND, Instant
from sidecar.agent import AgentCore
from sidecar.agent_config import AgentConfig
from sidecar.api import AgentState, ExitCause, Shutdown, Start, Stop
from sidecar.events import (
    AnswerWorker,
    CommandReceived,
    KillWorkers,
    Orders,
    PortReserved,
    Quit,
    ReservePort,
    SpawnWorkers,
    WorkerExited,
    WorkersGone,
    WorkerSpoke,
    WorkersSpawned,
)
from worker_shim.messages import (
    AtBarrier,
    Envelope,
    JobHalt,
    JobStart,
    LeftBlock,
    PastBarrier,
    RestartMode,
)

NPROC = 2
LOCAL = st.integers(0, NPROC - 1)


class Process:
    """A worker: the generation it was given, the one it ran last, and whether it is inside."""

    def __init__(self, pid: int, generation: int) -> None:
        self.pid, self.generation, self.epoch = pid, generation, 0
        self.inside = False
        self.halted = False


class AgentMachine(RuleBasedStateMachine):
    """One node."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Instant(0)
        config = AgentConfig(job="j", node="n", incarnation="i", nproc_per_node=NPROC)
        self.core = AgentCore(config, self.now)
        self.generation = 0
        self.running: dict[int, Process] = {}
        self.killing: KillWorkers | None = None
        self.pids = 0
        self.quit = False
        self.started: set[tuple[int, int]] = set()
        self._do(self.core.begin())

    # --- the world's side ---------------------------------------------------------------------

    def _put(self, event) -> None:
        self._do(self.core.handle(event, self.now))

    def _do(self, effects) -> None:
        for effect in effects:
            match effect:
                case ReservePort():
                    self._put(PortReserved(port=1000 + self.generation))
                case SpawnWorkers():
                    self._spawn(effect)
                case KillWorkers():
                    self.killing = effect
                case AnswerWorker():
                    self._answered(effect)
                case Quit():
                    self.quit = True

    def _spawn(self, effect: SpawnWorkers) -> None:
        generation = effect.start.generation
        carried = [local for local in self.running if local in effect.keep]
        assert set(self.running) == set(carried), "a start while others still run"
        for local in range(NPROC):
            if local in carried:
                self.running[local].generation = generation
            else:
                self.pids += 1
                self.running[local] = Process(self.pids, generation)
        pids = {local: it.pid for local, it in self.running.items()}
        orders = {local: Orders() for local in carried}
        self._put(WorkersSpawned(generation=generation, pids=pids, carried=orders))

    def _answered(self, effect: AnswerWorker) -> None:
        process = next((it for it in self.running.values() if it.pid == effect.connection), None)
        if process is None:
            return
        if isinstance(effect.reply, JobStart):
            generation = effect.reply.generation
            assert generation > process.epoch, "a generation is not run twice"
            assert generation == process.generation
            assert self.core.state in (AgentState.RUNNING, AgentState.FAULTED)
            self.started.add((process.pid, generation))
            process.epoch, process.inside, process.halted = generation, True, False
        elif isinstance(effect.reply, JobHalt):
            assert self.core.state in (AgentState.STOPPING, AgentState.SHUTDOWN)
            process.halted = True

    def _say(self, local: int, message) -> None:
        process = self.running[local]
        generation = process.epoch or process.generation
        envelope = Envelope(client_id="c", seq=1, generation=generation)
        self._put(WorkerSpoke(connection=process.pid, envelope=envelope, message=message))

    # --- rules --------------------------------------------------------------------------------

    @rule(skip=st.integers(1, 2))
    def start(self, skip: int) -> None:
        """The coordinator starts the next generation."""
        self.generation += skip
        start = Start(
            generation=self.generation,
            topology_version=1,
            group_rank=0,
            nnodes=1,
            master_addr="h",
            master_port=1,
            fault_count=0,
            node_hosts=("h",),
        )
        self._put(CommandReceived(command=start))

    @rule(mode=st.sampled_from(RestartMode), back=st.integers(0, 1))
    def stop(self, mode: RestartMode, back: int) -> None:
        """The coordinator stops this or the last generation."""
        generation = max(0, self.generation - back)
        stop = Stop(generation=generation, restart_mode=mode, reason="r", barrier_s=5.0)
        self._put(CommandReceived(command=stop))

    @rule(local=LOCAL)
    def comes_to_the_barrier(self, local: int) -> None:
        """A worker stands at its barrier: for the first time, after a failure, or called back."""
        process = self.running.get(local)
        if process is not None:
            process.inside = False
            self._say(local, AtBarrier(local_rank=local, epoch=process.epoch))

    @rule(local=LOCAL)
    def says_that_it_is_inside(self, local: int) -> None:
        """A worker that was let go says so, again after a lost connection."""
        process = self.running.get(local)
        if process is not None and process.inside:
            self._say(local, PastBarrier(local_rank=local, epoch=process.epoch))

    @rule(local=LOCAL)
    def leaves_the_block(self, local: int) -> None:
        """A worker is through."""
        process = self.running.get(local)
        if process is not None and process.inside:
            process.inside = False
            self._say(local, LeftBlock(local_rank=local))

    @rule(local=LOCAL, clean=st.booleans())
    def ends(self, local: int, clean: bool) -> None:
        """A worker's process ends."""
        process = self.running.pop(local, None)
        if process is not None:
            cause = ExitCause(code=0) if clean else ExitCause(signal=9)
            self._put(
                WorkerExited(
                    generation=process.generation, local_rank=local, pid=process.pid, cause=cause
                )
            )

    @precondition(lambda self: self.killing is not None)
    @rule()
    def everybody_is_gone(self) -> None:
        """The launcher has ended whom it had to."""
        killing, self.killing = self.killing, None
        for local, process in list(self.running.items()):
            if process.generation <= killing.generation and local not in killing.keep:
                self.ends(local, clean=False)
                self.killing = None if self.killing == killing else self.killing
        again, self.killing = self.killing, None
        kept = killing.keep if again is None else again.keep
        if again is not None:
            self.killing = again
            return
        self._put(WorkersGone(generation=killing.generation, kept=kept))

    @rule(after_s=st.sampled_from([0.1, 6.0, 30.0]))
    def time_passes(self, after_s: float) -> None:
        """Deadlines come."""
        self.now = Instant(self.now + round(after_s * SECOND))
        self._do(self.core.handle_timer(self.now))

    @rule(dice=st.integers(0, 9))
    def shutdown(self, dice: int) -> None:
        """Now and then somebody ends the node."""
        if dice == 0:
            self._put(CommandReceived(command=Shutdown(reason="r")))

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def who_is_told_to_stand_at_the_barrier_lives(self) -> None:
        """The coordinator would count on a process that is not there."""
        if self.core.state is AgentState.READY and self.killing is None:
            told = {it.local_rank for it in self.core.snapshot(self.now).ranks if it.at_barrier}
            assert told <= set(self.running)

    @invariant()
    def a_stop_ends(self) -> None:
        """A node that never says it has stopped is given up with all its devices."""
        if self.core.state is AgentState.STOPPING and self.killing is None:
            assert self.core._crew.stopping is not None
            self_waiting = self.core._crew.barrier.waiting
            assert self.core._crew.stopping.returning - self_waiting, "nothing is waited for"

    @invariant()
    def shutdown_is_the_end(self) -> None:
        """Nothing leads out of it."""
        if self.quit:
            assert self.core.state is AgentState.SHUTDOWN


AgentMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgentMachine = AgentMachine.TestCase
