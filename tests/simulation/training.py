"""The training job that the simulated nodes run: ranks in lock-step, and what they leave on disk.

A generation's ranks step together or not at all.  When one dies the others lose their connection
and end a moment later; when one hangs they wait for it in a collective.  A value that is not
finite is in one rank's loss first and in everybody's a step later, and in every checkpoint from
then on.  What is true of ranks and files is kept here, for checkers to compare decisions with.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from scout.clock import Duration, Instant, since
from scout.hang import Phase, RankSnapshot
from sidecar.api import CheckpointPointer, ExitCause, Start
from tests.simulation.world import World
from worker_shim.messages import BEGINNING

PREFIX: Final = "model"
BEAT_NS: Final = Duration(50_000_000)
"""Age of a healthy rank's last beat: the helper thread beats every 0.1 s."""
STEP_S: Final = 0.4
CHECKPOINT_EVERY: Final = 10
LOST_PEER_LINE: Final = (
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:39443"
)


class Hang(StrEnum):
    """How a rank stops making progress without dying."""

    STOPPED = "stopped"
    """By a signal: the machine sees it."""
    SPINNING = "spinning"
    """Busy in its own code, while its helper thread beats."""
    SILENT = "silent"
    """Holding the interpreter: it does not even beat."""
    CUT_OFF = "cut off"
    """Waiting for peers that its machine's network no longer reaches."""


class Host(Protocol):
    """The node that a worker runs on."""

    name: str
    slowness: float

    def worker_ended(self, worker: "Worker", cause: ExitCause, lines: tuple[str, ...]) -> None:
        """A worker is dead."""

    def worker_saved(self, worker: "Worker", step: int, path: str) -> None:
        """A worker confirms a checkpoint."""

    def worker_printed_nan(self, worker: "Worker", step: int) -> None:
        """A worker printed a loss that is not finite."""

    def worker_failed(self, worker: "Worker", line: str) -> None:
        """A worker left its block by an exception, and says so."""


@dataclass(eq=False)
class Worker:
    """One rank's process."""

    host: Host
    rank: int
    local_rank: int
    pid: int
    generation: int
    topology_version: int
    alive: bool = True
    hang: Hang | None = None
    hung_at: Instant | None = None
    step: int | None = None
    progress_at: Instant | None = None
    collective: int | None = None
    nan_from: int | None = None
    """Step at which its loss stops being a number."""
    parked: bool = False
    """It stands at the barrier of its block and runs no generation."""
    epoch: int = 0
    """The generation in which it ran its block last."""

    def snapshot(self, now: Instant) -> RankSnapshot:
        """Return what its progress page and its machine say of it."""
        mute = self.hang in (Hang.STOPPED, Hang.SILENT) or not self.alive
        beat = None
        if self.collective is not None:
            beat = since(self.hung_at, now) if mute and self.hung_at else BEAT_NS
        state = "S" if self.hang is None else "T" if self.hang is Hang.STOPPED else "R"
        return RankSnapshot(
            rank=self.rank,
            node=self.host.name,
            local_rank=self.local_rank,
            step=self.step,
            phase=Phase.COLLECTIVE if self.collective is not None else Phase.UNKNOWN,
            collective_seq=self.collective,
            progress_age_ns=None if self.progress_at is None else since(self.progress_at, now),
            heartbeat_age_ns=beat,
            process_state=state if self.alive else "X",
        )


@dataclass(eq=False)
class Run:
    """The ranks of one generation."""

    generation: int
    world_size: int
    step: int
    broken_since: int | None
    """First step whose state holds a value that is not finite."""
    members: dict[int, Worker] = field(default_factory=dict)
    formed: bool = False
    stepping: bool = False
    severed: bool = False
    """A member died: there is no lock-step any more."""

    def may_step(self) -> bool:
        """Return True when nothing holds the ranks up."""
        return (
            self.formed
            and not self.severed
            and all(worker.hang is None for worker in self.members.values())
        )


@dataclass(frozen=True)
class Shard:
    """One rank's part of a checkpoint on the shared disk."""

    generation: int
    broken: bool


class Training:
    """Every run of the job, and the disk."""

    def __init__(
        self, world: World, world_size: int, steps: int, *, restartable: bool = False
    ) -> None:
        self.world = world
        self.restartable = restartable
        """Whether the script has a block that it runs again."""
        self.world_size = world_size
        self.steps = steps
        self.workers: list[Worker] = []
        """Those that are alive."""
        self.disk: dict[int, dict[int, Shard]] = {}
        """Step -> rank -> what lies there now."""
        self.runs: dict[int, Run] = {}
        self.furthest = 0
        self.changes = 0
        """Counts every start and end of a worker."""
        self._dice = world.dice("training")

    # --- what nodes do ----------------------------------------------------------------------

    def spawn(self, host: Host, start: Start, local_rank: int, nproc: int, pid: int) -> Worker:
        """Start a rank's process."""
        rank = start.group_rank * nproc + local_rank
        worker = Worker(host, rank, local_rank, pid, start.generation, start.topology_version)
        self.workers.append(worker)
        self.changes += 1
        self.world.note(f"rank {rank} of generation {start.generation} starts on {host.name}")
        if self.restartable:
            worker.parked = True
        else:
            self.join(worker, start)
        return worker

    def carry(self, worker: Worker, start: Start, nproc: int) -> None:
        """Give a worker at the barrier its place in ``start``."""
        worker.rank = start.group_rank * nproc + worker.local_rank
        worker.generation, worker.topology_version = start.generation, start.topology_version
        worker.step = worker.progress_at = worker.collective = worker.nan_from = None
        self.changes += 1

    def join(self, worker: Worker, start: Start) -> None:
        """Let a worker run its block in ``start``."""
        worker.parked, worker.epoch, rank = False, start.generation, worker.rank
        self.changes += 1
        run = self._run(start)
        if not run.formed and not run.severed:
            run.members[rank] = worker
            if len(run.members) == self.world_size:
                self.world.later(self._dice.uniform(0.3, 1.5), lambda: self._form(run))
        if not start.checkpoints:
            self._save_later(run, worker, BEGINNING)

    def leave(self, worker: Worker) -> None:
        """Let a worker leave its block: it stands at the barrier, and its peers lose it."""
        self.changes += 1
        worker.parked = True
        run = self.runs[worker.epoch]
        if run.members.get(worker.rank) is worker:
            if run.formed and not run.severed:
                self._cut_off_peers(run, worker)
            run.severed = True

    def end(
        self, worker: Worker, cause: ExitCause, lines: tuple[str, ...] = (), *, silent: bool = False
    ) -> None:
        """End a process; ``silent`` when not even its sockets are closed (its machine is off)."""
        if not worker.alive:
            return
        worker.alive = False
        worker.hung_at = self.world.now if worker.hang is None else worker.hung_at
        self.workers.remove(worker)
        self.changes += 1
        self.world.note(f"rank {worker.rank} of generation {worker.generation}: {cause}")
        if not silent:
            worker.host.worker_ended(worker, cause, lines)
        run = self.runs.get(worker.generation)
        if run is None or worker.parked:
            return
        if cause.clean or run.members.get(worker.rank) is not worker:
            return
        if run.formed and not run.severed and not silent:
            self._cut_off_peers(run, worker)
        run.severed = True

    # --- what faults do ---------------------------------------------------------------------

    def hang(self, worker: Worker, how: Hang) -> None:
        """Let a rank stop making progress."""
        if worker.alive and worker.hang is None:
            worker.hang, worker.hung_at = how, self.world.now
            self.world.note(f"rank {worker.rank} hangs: {how}")

    def break_loss(self, worker: Worker, *, at_checkpoint: bool) -> None:
        """Let the rank's next loss be not a number, or that of the next step that is saved."""
        if worker.parked:
            return
        step = self.runs[worker.generation].step + 1
        worker.nan_from = step + (-step % CHECKPOINT_EVERY if at_checkpoint else 0)

    # --- inside -----------------------------------------------------------------------------

    def _run(self, start: Start) -> Run:
        run = self.runs.get(start.generation)
        if run is None:
            chosen = next((item for item in start.checkpoints if item.prefix == PREFIX), None)
            step = 0 if chosen is None else chosen.step
            run = Run(start.generation, self.world_size, step, self._damage(chosen))
            self.runs[start.generation] = run
        return run

    def _damage(self, chosen: CheckpointPointer | None) -> int | None:
        if chosen is None:
            return None
        return chosen.step if any(it.broken for it in self.disk[chosen.step].values()) else None

    def _form(self, run: Run) -> None:
        if all(worker.alive for worker in run.members.values()):
            run.formed = True
            for worker in run.members.values():
                worker.collective = run.step
            self._next(run)

    def _next(self, run: Run) -> None:
        if not run.stepping and run.may_step():
            run.stepping = True
            slowest = max(worker.host.slowness for worker in run.members.values())
            takes = STEP_S * min(slowest, 3.0) * self._dice.uniform(0.9, 1.1)
            self.world.later(takes, lambda: self._step(run))

    def _step(self, run: Run) -> None:
        run.stepping = False
        if not run.may_step():
            for worker in run.members.values():
                if worker.alive and worker.hang in (None, Hang.CUT_OFF):
                    worker.collective = run.step + 1
            return
        run.step += 1
        self.furthest = max(self.furthest, run.step)
        for worker in run.members.values():
            worker.step = worker.collective = run.step
            worker.progress_at = self.world.now
        self._print_losses(run)
        if run.step >= self.steps:
            for worker in run.members.values():
                self._end_later(worker, ExitCause(code=0), ())
            return
        if run.step % CHECKPOINT_EVERY == 0:
            for worker in run.members.values():
                self._save_later(run, worker, run.step)
        self._next(run)

    def _print_losses(self, run: Run) -> None:
        first = [it for it in run.members.values() if it.nan_from and it.nan_from <= run.step]
        if run.broken_since is not None:
            first = list(run.members.values())
        elif first:
            run.broken_since = run.step
        for worker in first:
            worker.host.worker_printed_nan(worker, run.step)

    def _save_later(self, run: Run, worker: Worker, step: int) -> None:
        def save() -> None:
            if not worker.alive or worker.hang is not None:
                return
            broken = run.broken_since is not None and step >= run.broken_since
            # What the job began from is one and the same for every run.
            writer = 0 if step == BEGINNING else run.generation
            self.disk.setdefault(step, {})[worker.rank] = Shard(writer, broken)
            worker.host.worker_saved(worker, step, f"/checkpoints/{step}" if step else "")

        self.world.later(self._dice.uniform(0.05, 0.5) * worker.host.slowness, save)

    def _cut_off_peers(self, run: Run, dead: Worker) -> None:
        for worker in run.members.values():
            if worker is not dead:
                self._end_later(worker, ExitCause(code=1), (LOST_PEER_LINE,))

    def _end_later(self, worker: Worker, cause: ExitCause, lines: tuple[str, ...]) -> None:
        epoch = worker.epoch

        def end() -> None:
            if worker.hang is not None or worker.parked or worker.epoch != epoch:
                return  # one that hangs does not even notice; one that left has no peer to lose
            if self.restartable and not cause.clean and worker.alive:
                self.leave(worker)
                worker.host.worker_failed(worker, lines[-1])
            else:
                self.end(worker, cause, lines)

        self.world.later(self._dice.uniform(0.05, 0.3), end)
