"""The node's agent: obeys commands, collects findings, and says what it is.

Decides which command is legal now, what counts as a fault, when the node is done, and what the
coordinator must be told.  Refuses to know sockets, processes, files and clocks: events come in,
effects go out, and what became of an effect comes back as an event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scout.clock import MILLISECOND, SECOND, Duration, Instant, after, seconds
from sidecar.api import (
    AgentState,
    Command,
    FaultReport,
    Inspect,
    Shutdown,
    Start,
    StatusReport,
    Stop,
)
from sidecar.checkpoints import CheckpointRecord
from sidecar.commands import Answer, Refused, judge_start, judge_stop
from sidecar.events import (
    AnswerWorker,
    CommandReceived,
    Effect,
    Event,
    EvidenceTaken,
    HardwareFinding,
    HardwareRecovered,
    InspectionTaken,
    KillWorkers,
    LogFinding,
    PortReserved,
    ProcessNote,
    ProgressObserved,
    Quit,
    Reply,
    Report,
    ReservePort,
    Say,
    SpawnFailed,
    SpawnWorkers,
    UplinkOpened,
    WatchLogs,
    WorkerExited,
    WorkersGone,
    WorkerSpoke,
    WorkersSpawned,
)
from sidecar.findings import Findings, crash, hardware_fault, log_fault, spawn_failure
from sidecar.inspection import answer, look
from sidecar.lifecycle import PROCESS_RESTART, TransitionTable, Trigger, advance
from sidecar.ranks import Worker, stall_policy
from sidecar.worker_talk import hear
from worker_shim.messages import Refusal, SidecarReply, most_severe

STOP_FORCED_AFTER: Final = Duration(5 * SECOND)
"""Time beyond the grace period after which a stop that has not ended is repeated with SIGKILL."""
SHUTDOWN_MAX: Final = Duration(10 * SECOND)
"""A shutdown ends within this time whatever the workers do."""
HEARTBEAT_DEFAULT_S: Final = 1.0
"""Status interval until the coordinator names its own."""
PROGRESS_NEWS_MIN: Final = Duration(200 * MILLISECOND)
"""Least time between two statuses sent only because a step advanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the agent is told about itself once."""

    job: str
    node: str
    incarnation: str
    nproc_per_node: int


class AgentCore:
    """One node's decisions.  Drive it with `sidecar.drive`."""

    def __init__(
        self, config: AgentConfig, now: Instant, table: TransitionTable = PROCESS_RESTART
    ) -> None:
        self.config = config
        self.table = table
        self.state = AgentState.INIT
        self.transitions: dict[AgentState, Instant] = {AgentState.INIT: now}
        self.checkpoints = CheckpointRecord()
        self._start: Start | None = None
        self._generation = 0
        self._stopped_generation = 0
        self._stopping: Stop | None = None
        self._workers: dict[int, Worker] = {}
        self._completed: set[int] = set()
        self._findings = Findings()
        self._port = 0
        self._port_asked = False
        self._script_version = ""
        self._exit_code: int | None = None
        self._forced_at: Instant | None = None
        self._heartbeat = seconds(HEARTBEAT_DEFAULT_S)
        self._status_at = now
        self._news = False
        self._progress_news = False

    # --- the core's contract ----------------------------------------------------------------

    def handle(self, event: Event, now: Instant) -> Sequence[Effect]:
        """Take one event, return the effects it asks for, in order."""
        effects = self._dispatch(event, now)
        return [*effects, *self._tell(now)]

    def handle_timer(self, now: Instant) -> Sequence[Effect]:
        """Take the passing of time: heartbeat, forced stop, bounded shutdown."""
        effects: list[Effect] = []
        if self._forced_at is not None and now >= self._forced_at:
            effects += self._force(now)
        if now >= after(self._status_at, self._heartbeat):
            self._news = True
        return [*effects, *self._tell(now)]

    def next_deadline(self) -> Instant | None:
        """Return when `handle_timer` wants to be called next."""
        due = after(self._status_at, self._heartbeat)
        if self._progress_news:
            due = min(due, after(self._status_at, PROGRESS_NEWS_MIN))
        return due if self._forced_at is None else min(due, self._forced_at)

    def snapshot(self, now: Instant) -> StatusReport:
        """Return this node's whole state, as the coordinator would be told it now."""
        faults = self._findings.reports(now)
        return StatusReport(
            node=self.config.node,
            incarnation=self.config.incarnation,
            state=self.state,
            generation=self._generation,
            stopped_generation=self._stopped_generation,
            topology_version=self._start.topology_version if self._start else 0,
            rendezvous_port=self._port,
            group_rank=self._start.group_rank if self._start else None,
            reason=faults[0].reason if faults else "",
            message=faults[0].message if faults else "",
            restart_mode=most_severe(*(fault.restart_mode for fault in faults)),
            faults=faults,
            ranks=tuple(
                worker.status(self._global_rank(local_rank), local_rank, now)
                for local_rank, worker in sorted(self._workers.items())
            ),
            checkpoints=self.checkpoints.confirmations(),
            checkpoint_types=self.checkpoints.declarations(),
            script_version=self._script_version,
        )

    def _dispatch(self, event: Event, now: Instant) -> Sequence[Effect]:
        match event:
            case CommandReceived():
                return self._command(event.command, event.request_id, now)
            case WorkersSpawned():
                return self._spawned(event)
            case SpawnFailed():
                if event.generation == self._generation:
                    self._fault(spawn_failure(event.reason), now)
                return []
            case WorkerExited():
                return self._exited(event, now)
            case WorkersGone():
                return self._gone(event, now)
            case WorkerSpoke():
                return [AnswerWorker(connection=event.connection, reply=self._heard(event, now))]
            case LogFinding():
                if event.generation == self._generation:
                    report = log_fault(event, self._global_rank(event.local_rank))
                    self._fault(report, Instant(now - event.age_ns))
                return []
            case HardwareFinding():
                return self._hardware_finding(event, now)
            case HardwareRecovered():
                resting = self.state in (AgentState.INIT, AgentState.READY)
                self._news |= self._findings.recovered(event, resting=resting)
                return []
            case ProcessNote():
                ranks = {worker.pid: local for local, worker in self._workers.items()}
                if (late := self._findings.note(event, ranks)) is not None:
                    self._fault(late, now)
                return []
            case ProgressObserved():
                return self._progress(event, now)
            case InspectionTaken() | EvidenceTaken():
                return [Report(message=answer(event, self.config.node, self._workers))]
            case PortReserved():
                self._port, self._port_asked = event.port, False
                if self.state is AgentState.INIT:
                    self._move(Trigger.PREPARED, now)
                self._news = True
                return []
            case UplinkOpened():
                self._heartbeat = seconds(event.heartbeat_s)
                self._news = True
                return self._ensure_port()

    def begin(self) -> Sequence[Effect]:
        """Return the effects that prepare the agent: it is READY once a port is reserved."""
        return self._ensure_port()

    def _command(self, command: Command, request_id: int | None, now: Instant) -> Sequence[Effect]:
        match command:
            case Start():
                effects, refusal = self._start_commanded(command, now)
            case Stop():
                effects, refusal = self._stop_commanded(command, now)
            case Shutdown():
                effects, refusal = self._shutdown_commanded(command, now)
            case Inspect():
                effects, refusal = [look(command)], None
        self._news = True
        if request_id is None:
            return effects if refusal is None else [*effects, Say(level="INFO", text=refusal)]
        status = 200 if refusal is None else 409
        return [*effects, Reply(request_id=request_id, status=status, reason=refusal or "")]

    def _start_commanded(self, start: Start, now: Instant) -> tuple[list[Effect], str | None]:
        judgement = judge_start(
            start, self.state, self.table, self._generation, self._stopped_generation
        )
        if isinstance(judgement, Refused):
            return [], judgement.reason
        if judgement is Answer.DONE:
            return [], None
        self._move(Trigger.START_COMMANDED, now)
        self._start = start
        self._generation = start.generation
        self._findings.clear()
        self._completed.clear()
        self._workers = {local: Worker() for local in range(self.config.nproc_per_node)}
        self.checkpoints.rewind({item.prefix: item.step for item in start.checkpoints})
        return [SpawnWorkers(start=start)], None

    def _stop_commanded(self, stop: Stop, now: Instant) -> tuple[list[Effect], str | None]:
        judgement = judge_stop(
            stop,
            self.state,
            self.table,
            self._generation,
            self._stopped_generation,
            stopping=self._stopping.generation if self._stopping else 0,
        )
        if isinstance(judgement, Refused):
            return [], judgement.reason
        if judgement is Answer.DONE:
            return [], None
        self._move(Trigger.STOP_COMMANDED, now)
        self._stopping = stop
        self._forced_at = after(now, Duration(seconds(stop.grace_s) + STOP_FORCED_AFTER))
        return [KillWorkers(generation=stop.generation, grace_s=stop.grace_s)], None

    def _shutdown_commanded(
        self, shutdown: Shutdown, now: Instant
    ) -> tuple[list[Effect], str | None]:
        if self.state is AgentState.SHUTDOWN:
            return [], None
        self._move(Trigger.SHUTDOWN_COMMANDED, now)
        self._exit_code = shutdown.exit_code
        self._forced_at = after(now, SHUTDOWN_MAX)
        said = Say(level="INFO", text=f"shutting down: {shutdown.reason}")
        return [said, KillWorkers(generation=self._generation, grace_s=0.0)], None

    def _force(self, now: Instant) -> list[Effect]:
        if self.state is AgentState.SHUTDOWN:
            self._forced_at = None
            return [Quit(code=1, reason="workers did not end within the shutdown deadline")]
        self._forced_at = after(now, STOP_FORCED_AFTER)
        generation = self._stopping.generation if self._stopping else self._generation
        return [
            Say(level="WARNING", text="the stop did not end in time: killing again"),
            KillWorkers(generation=generation, grace_s=0.0),
        ]

    def _spawned(self, event: WorkersSpawned) -> Sequence[Effect]:
        if event.generation != self._generation or self._start is None:
            return []
        for local_rank, pid in event.pids.items():
            self._workers.setdefault(local_rank, Worker()).pid = pid
        self._script_version = event.script_version
        self._news = True
        size = self._start.nnodes * self.config.nproc_per_node
        rules = self._start.log_rules
        return [WatchLogs(generation=event.generation, rules=rules, world_size=size)]

    def _exited(self, event: WorkerExited, now: Instant) -> Sequence[Effect]:
        if event.generation != self._generation or self.state not in (
            AgentState.RUNNING,
            AgentState.FAULTED,
        ):
            return []
        if event.cause.clean:
            self._completed.add(event.local_rank)
            everyone = len(self._completed) == self.config.nproc_per_node
            if everyone and self.state is AgentState.RUNNING:
                self._move(Trigger.WORKERS_COMPLETED, now)
            self._news = True
            return []
        rank = self._global_rank(event.local_rank)
        self._fault(crash(event, rank, self._workers[event.local_rank].step), now)
        return []

    def _gone(self, event: WorkersGone, now: Instant) -> Sequence[Effect]:
        if self.state is AgentState.SHUTDOWN:
            self._forced_at = None
            return [Quit(code=self._exit_code or 0, reason="shut down")]
        if self.state is not AgentState.STOPPING or self._stopping is None:
            return []
        if event.generation < self._stopping.generation:
            return []
        self._stopped_generation = max(self._stopped_generation, self._stopping.generation)
        self._stopping, self._forced_at = None, None
        self._workers.clear()
        self._findings.clear()
        self._move(Trigger.WORKERS_STOPPED, now)
        self._port = 0
        return self._ensure_port()

    def _heard(self, event: WorkerSpoke, now: Instant) -> SidecarReply:
        seq, message = event.envelope.seq, event.message
        if event.envelope.generation != self._generation:
            return Refusal(
                reply_to=seq,
                reason=f"generation {event.envelope.generation} is over, "
                f"{self._generation} runs now",
            )
        heard = hear(
            message,
            seq,
            rank=self._global_rank(message.local_rank),
            worker=self._workers.setdefault(message.local_rank, Worker()),
            checkpoints=self.checkpoints,
            chosen=self._start.checkpoints if self._start else (),
        )
        if heard.fault is not None:
            self._fault(heard.fault, now)
        self._news |= heard.news
        return heard.reply

    def _hardware_finding(self, event: HardwareFinding, now: Instant) -> Sequence[Effect]:
        ranks = {local_rank: self._global_rank(local_rank) for local_rank in self._workers}
        if self._findings.add(hardware_fault(event, ranks), now):
            self._fault_noted(now)
        return []

    def _progress(self, event: ProgressObserved, now: Instant) -> Sequence[Effect]:
        if event.generation != self._generation or self._start is None:
            return []
        policy = stall_policy(self._start)
        for seen in event.ranks:
            worker = self._workers.get(seen.local_rank)
            if worker is None or seen.local_rank in self._completed:
                continue
            before = worker.step
            self._news |= worker.observe(seen, policy, now)
            self._progress_news |= worker.step != before
        return []

    def _fault(self, report: FaultReport, at: Instant) -> None:
        if self.state not in (AgentState.RUNNING, AgentState.FAULTED):
            return
        if self._findings.add(report, at):
            self._fault_noted(at)

    def _fault_noted(self, at: Instant) -> None:
        self._news = True
        if self.state is AgentState.RUNNING:
            self._move(Trigger.FAULT_DETECTED, at)

    def _move(self, trigger: Trigger, now: Instant) -> None:
        self.state = advance(self.table, self.state, trigger)
        self.transitions[self.state] = now
        self._news = True

    def _ensure_port(self) -> list[Effect]:
        if self._port or self._port_asked:
            return []
        self._port_asked = True
        return [ReservePort()]

    def _tell(self, now: Instant) -> list[Effect]:
        due = after(self._status_at, PROGRESS_NEWS_MIN)
        if not self._news and not (self._progress_news and now >= due):
            return []
        self._news = self._progress_news = False
        self._status_at = now
        return [Report(message=self.snapshot(now))]

    def _global_rank(self, local_rank: int) -> int:
        group_rank = self._start.group_rank if self._start else 0
        return group_rank * self.config.nproc_per_node + local_rank
