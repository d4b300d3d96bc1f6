"""The node's agent: obeys commands, collects findings, and says what it is.

Decides which command is legal now, what counts as a fault, when the node is done, and what the
coordinator must be told.  Refuses to know sockets, processes, files and clocks: events come in,
effects go out, and what became of an effect comes back as an event.
"""

from collections.abc import Sequence
from typing import Final

from scout.clock import SECOND, Duration, Instant, after, seconds
from sidecar.agent_config import AgentConfig
from sidecar.api import (
    AgentState,
    Command,
    FaultReport,
    Inspect,
    Shutdown,
    Start,
    StatusReport,
    Stop,
    Update,
)
from sidecar.checkpoints import CheckpointRecord
from sidecar.commands import Answer, Refused, judge_start, judge_stop
from sidecar.crew import Crew
from sidecar.events import (
    AnswerWorker,
    CommandReceived,
    DiscardState,
    Effect,
    Event,
    EvidenceTaken,
    HardwareFinding,
    HardwareRecovered,
    InspectionTaken,
    KeepTable,
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
from sidecar.lifecycle import (
    IN_PROCESS_RESTART,
    PROCESS_RESTART,
    TransitionTable,
    Trigger,
    advance,
)
from sidecar.news import News
from sidecar.rank_table import RankTable, Stale, filled, updated
from sidecar.ranks import Worker
from sidecar.worker_talk import hear, stale
from worker_shim.messages import AtBarrier, LeftBlock, PastBarrier, RestartMode, most_severe

SHUTDOWN_MAX: Final = Duration(10 * SECOND)
"""A shutdown ends within this time whatever the workers do."""
_LIVE: Final = (AgentState.RUNNING, AgentState.FAULTED)


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
        self.hosts = RankTable()
        """Which host the node of each group rank has."""
        self._generation = 0
        self._stopped_generation = 0
        self._crew = Crew(config.nproc_per_node)
        self._findings = Findings()
        self._port = 0
        self._port_asked = False
        self._exit_code: int | None = None
        self._shut_by: Instant | None = None
        self._news = News(now)

    # --- the core's contract ----------------------------------------------------------------

    def handle(self, event: Event, now: Instant) -> Sequence[Effect]:
        """Take one event, return the effects it asks for, in order."""
        effects = self._dispatch(event, now)
        return [*effects, *self._tell(now)]

    def handle_timer(self, now: Instant) -> Sequence[Effect]:
        """Take the passing of time: heartbeat, missed barrier, forced stop, bounded shutdown."""
        effects = [*self._crew.go_on_stopping(now), *self._settle(now)]
        if self._shut_by is not None and now >= self._shut_by:
            self._shut_by, why = None, "workers did not end within the shutdown deadline"
            effects.append(Quit(code=1, reason=why))
        return [*effects, *self._tell(now)]

    def next_deadline(self) -> Instant | None:
        """Return when `handle_timer` wants to be called next."""
        due = self._news.next_deadline()
        if (stopping := self._crew.stopping) is not None:
            due = min(due, stopping.next_deadline(self._crew.barrier.waiting))
        return due if self._shut_by is None else min(due, self._shut_by)

    def snapshot(self, now: Instant) -> StatusReport:
        """Return this node's whole state, as the coordinator would be told it now."""
        faults, start = self._findings.reports(now), self._crew.start
        real = [it for it in faults if not self._crew.observes(it)]
        return StatusReport(
            node=self.config.node,
            incarnation=self.config.incarnation,
            state=self.state,
            generation=self._generation,
            stopped_generation=self._stopped_generation,
            topology_version=start.topology_version if start else 0,
            rendezvous_port=self._port,
            table_version=self.hosts.version,
            table_digest=self.hosts.digest,
            group_rank=start.group_rank if start else None,
            reason=real[0].reason if real else "",
            message=real[0].message if real else "",
            restart_mode=most_severe(*(fault.restart_mode for fault in real)),
            faults=faults,
            ranks=self._crew.statuses(now),
            checkpoints=self.checkpoints.confirmations(),
            checkpoint_types=self.checkpoints.declarations(),
            script_version=self._crew.script_version,
        )

    def worker_data(self) -> dict[str, str]:
        """Return what waiting ranks have to say to an operator, by global rank."""
        return self._crew.worker_data()

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
                return self._heard(event, now)
            case LogFinding():
                if event.generation == self._generation:
                    report = log_fault(event, self._crew.rank(event.local_rank))
                    self._fault(report, Instant(now - event.age_ns))
                return []
            case HardwareFinding():
                return self._hardware_finding(event, now)
            case HardwareRecovered():
                resting = self.state in (AgentState.INIT, AgentState.READY)
                self._news.urgent |= self._findings.recovered(event, resting=resting)
                return []
            case ProcessNote():
                if (late := self._findings.note(event, self._crew.pids())) is not None:
                    self._fault(late, now)
                return []
            case ProgressObserved():
                return self._progress(event, now)
            case InspectionTaken() | EvidenceTaken():
                return [Report(message=answer(event, self.config.node, self._crew.workers))]
            case PortReserved():
                self._port, self._port_asked = event.port, False
                if self.state is AgentState.INIT:
                    self._move(Trigger.PREPARED, now)
                self._news.urgent = True
                return []
            case UplinkOpened():
                self._news.heartbeat = seconds(event.heartbeat_s)
                self._news.urgent = True
                return self._ensure_port()

    def begin(self) -> Sequence[Effect]:
        """Return the effects that prepare the agent: it is READY once a port is reserved."""
        return self._ensure_port()

    def _command(self, command: Command, request_id: int | None, now: Instant) -> Sequence[Effect]:
        match command:
            case Start():
                effects, refusal = self._start_commanded(command, now)
            case Update():
                effects, refusal = self._update_commanded(command)
            case Stop():
                effects, refusal = self._stop_commanded(command, now)
            case Shutdown():
                effects, refusal = self._shutdown_commanded(command, now)
            case Inspect():
                effects, refusal = [look(command)], None
        self._news.urgent = True
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
        whole = filled(self.hosts, start)
        if isinstance(whole, Stale):
            return [], whole.reason
        start, self.hosts = whole, self.hosts.started(whole)
        self._move(Trigger.START_COMMANDED, now)
        self._generation = start.generation
        self._findings.clear()
        keep = self._crew.begin(start)
        self.checkpoints.rewind({item.prefix: item.step for item in start.checkpoints})
        return [SpawnWorkers(start=start, keep=keep)], None

    def _update_commanded(self, update: Update) -> tuple[list[Effect], str | None]:
        table = updated(self.hosts, update, generation=self._generation)
        if isinstance(table, Stale):
            return [], table.reason
        self.hosts = table
        told = self._crew.told_place(update, table.hosts)
        return [KeepTable(table=table, group_rank=update.group_rank), *told], None

    def _stop_commanded(self, stop: Stop, now: Instant) -> tuple[list[Effect], str | None]:
        judgement = judge_stop(
            stop,
            self.state,
            self.table,
            self._generation,
            self._stopped_generation,
            stopping=self._crew.stopping.stop if self._crew.stopping else None,
            holding=bool(self._crew.barrier.waiting),
        )
        if isinstance(judgement, Refused):
            return [], judgement.reason
        if judgement is Answer.DONE:
            return [], None
        self._move(Trigger.STOP_COMMANDED, now)
        return self._crew.stop(stop, now), None

    def _shutdown_commanded(
        self, shutdown: Shutdown, now: Instant
    ) -> tuple[list[Effect], str | None]:
        if self.state is AgentState.SHUTDOWN:
            return [], None
        self._move(Trigger.SHUTDOWN_COMMANDED, now)
        self._crew.shut(self._generation)
        self._exit_code, self._shut_by = shutdown.exit_code, after(now, SHUTDOWN_MAX)
        said = Say(level="INFO", text=f"shutting down: {shutdown.reason}")
        return [said, KillWorkers(generation=self._generation, grace_s=0.0)], None

    def _settle(self, now: Instant) -> list[Effect]:
        """End the stop if it waits for nobody any more."""
        stopping = self._crew.settled()
        if stopping is None:
            return []
        self._stopped_generation = max(self._stopped_generation, stopping.stop.generation)
        self._findings.clear()
        self._move(Trigger.BARRIER_MISSED if stopping.missed else Trigger.WORKERS_STOPPED, now)
        self._port = 0
        effects = self._ensure_port()
        if stopping.stop.restart_mode is not RestartMode.JOB:
            return effects
        self.checkpoints, self.table = CheckpointRecord(), PROCESS_RESTART
        self.hosts = RankTable()
        return [DiscardState(), *effects]

    def _spawned(self, event: WorkersSpawned) -> Sequence[Effect]:
        start = self._crew.start
        if event.generation != self._generation or start is None:
            return []
        self._crew.script_version = event.script_version
        self._news.urgent = True
        size = start.nnodes * self.config.nproc_per_node
        watch = WatchLogs(generation=event.generation, rules=start.log_rules, world_size=size)
        return [watch, *self._crew.spawned(event)]

    def _exited(self, event: WorkerExited, now: Instant) -> Sequence[Effect]:
        if event.generation != self._generation:
            return []
        if self.state not in _LIVE:
            return self._lost_at_rest(event, now)
        self._crew.barrier.forget(event.local_rank)
        if event.cause.clean:
            self._crew.completed.add(event.local_rank)
            everyone = len(self._crew.completed) == self.config.nproc_per_node
            if everyone and self.state is AgentState.RUNNING:
                self._move(Trigger.WORKERS_COMPLETED, now)
            self._news.urgent = True
            return []
        rank = self._crew.rank(event.local_rank)
        self._fault(crash(event, rank, self._crew.workers[event.local_rank].step), now)
        return []

    def _lost_at_rest(self, event: WorkerExited, now: Instant) -> list[Effect]:
        effects = self._crew.lost(event, ready=self.state is AgentState.READY)
        if effects and self.state is AgentState.READY:
            self._move(Trigger.BARRIER_MISSED, now)
            self._move(Trigger.PREPARED, now)
        return effects

    def _gone(self, event: WorkersGone, now: Instant) -> Sequence[Effect]:
        if self.state is AgentState.SHUTDOWN:
            self._shut_by = None
            return [Quit(code=self._exit_code or 0, reason="shut down")]
        self._crew.gone(event)
        return self._settle(now)

    def _heard(self, event: WorkerSpoke, now: Instant) -> list[Effect]:
        seq, message = event.envelope.seq, event.message
        if (refusal := stale(event, self._generation)) is not None:
            return [AnswerWorker(connection=event.connection, reply=refusal)]
        worker = self._crew.workers.setdefault(message.local_rank, Worker())
        if isinstance(message, AtBarrier | PastBarrier | LeftBlock):
            worker.attached = self._news.urgent = True
            worker.data = None if isinstance(message, PastBarrier) else worker.data
            self.table = IN_PROCESS_RESTART
            answers = self._crew.barrier.heard(message, event.connection, seq, self._generation)
            return [*answers, *self._settle(now)]
        heard = hear(
            message,
            seq,
            rank=self._crew.rank(message.local_rank),
            worker=worker,
            checkpoints=self.checkpoints,
            start=self._crew.start,
        )
        if heard.fault is not None:
            self._fault(heard.fault, now)
        self._news.urgent |= heard.news
        return [AnswerWorker(connection=event.connection, reply=heard.reply)]

    def _hardware_finding(self, event: HardwareFinding, now: Instant) -> Sequence[Effect]:
        report = hardware_fault(event, self._crew.ranks())
        if self._findings.add(report, now):
            self._fault_noted(report, now)
        return []

    def _progress(self, event: ProgressObserved, now: Instant) -> Sequence[Effect]:
        start = self._crew.start
        if event.generation != self._generation or start is None:
            return []
        news, stepped = self._crew.observe(event, start, now)
        self._news.urgent |= news
        self._news.progress |= stepped
        return self._crew.go_on_stopping(now)

    def _fault(self, report: FaultReport, at: Instant) -> None:
        if self.state in _LIVE and self._findings.add(report, at):
            self._fault_noted(report, at)

    def _fault_noted(self, report: FaultReport, at: Instant) -> None:
        self._news.urgent = True
        if self.state is AgentState.RUNNING and not self._crew.observes(report):
            self._move(Trigger.FAULT_DETECTED, at)

    def _move(self, trigger: Trigger, now: Instant) -> None:
        self.state = advance(self.table, self.state, trigger)
        self.transitions[self.state] = now
        self._news.urgent = True

    def _ensure_port(self) -> list[Effect]:
        if self._port or self._port_asked:
            return []
        self._port_asked = True
        return [ReservePort()]

    def _tell(self, now: Instant) -> list[Effect]:
        return [Report(message=self.snapshot(now))] if self._news.take(now) else []
