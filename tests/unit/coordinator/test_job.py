"""The job core, driven by hand: one fault at a time, from the first sign to the next start.

Here nodes obey at once and lose nothing; what delays, losses and crashes make of it is for the
simulator.
"""

from dataclasses import replace

from coordinator.events import (
    Accept,
    Dismiss,
    Finished,
    LinkClosed,
    LinkOpened,
    LinkSpoke,
    Persist,
    Send,
)
from coordinator.incidents import IncidentPhase, Outcome
from coordinator.job import JobCore
from coordinator.journal_format import DurableState, decode_state, encode_state
from coordinator.phases import JobPhase
from coordinator.settings import JobSettings
from scout.clock import Instant, after, seconds
from scout.hang import RankSnapshot
from sidecar.api import (
    PROTOCOL_VERSION,
    AgentState,
    CheckpointConfirmation,
    ExitCause,
    FaultKind,
    FaultReport,
    Hello,
    Inspect,
    ProgressReport,
    RankStatus,
    Scope,
    Shutdown,
    Start,
    StatusReport,
    Stop,
)

WALL_OFFSET_NS = 1_700_000_000 * 10**9
STALL_S = 5.0
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4"


class FakeNode:
    """One node's side of the conversation: it does what it is told, at once."""

    def __init__(self, bench: "Bench", name: str, *, spare: bool, life: int = 1) -> None:
        self.bench, self.name, self.life = bench, name, life
        bench.links += 1
        self.link = bench.links
        self.snapshots: tuple[RankSnapshot, ...] = ()
        self.obeys = True
        self.report = StatusReport(
            node=name,
            incarnation=f"{name}/{life}",
            state=AgentState.READY,
            generation=0,
            stopped_generation=0,
            topology_version=0,
            rendezvous_port=4000,
        )
        self.hello = Hello(
            protocol=PROTOCOL_VERSION,
            agent_version="0",
            job="j",
            node=name,
            incarnation=f"{name}/{life}",
            host=f"host-{name}",
            http_port=1,
            nproc_per_node=1,
            spare=spare,
        )
        bench.nodes[name] = self

    def dial(self) -> None:
        """Connect, and tell the present state."""
        self.bench.feed(LinkOpened(link=self.link, hello=self.hello))
        self.tell()

    def tell(self, **changes) -> None:
        """Change the state and tell it."""
        self.report = replace(self.report, **changes)
        self.bench.feed(LinkSpoke(link=self.link, message=self.report))

    def breaks(self, kind: FaultKind, **more) -> None:
        """Report a fault of this node's rank."""
        fields = {
            "fault_id": len(self.report.faults) + 1,
            "scope": Scope.RANK,
            "reason": "Reason",
            "message": f"{kind} on {self.name}",
            "age_ns": 0,
            "rank": self.report.group_rank,
        }
        fault = FaultReport(kind=kind, **(fields | more))
        state = AgentState.FAULTED if self.report.ranks else self.report.state
        self.tell(state=state, faults=(*self.report.faults, fault))

    def steps(self, step: int, *, stalled: bool = False) -> None:
        """Report progress."""
        rank = self.report.ranks[0]
        age = seconds(STALL_S + 1) if stalled else 0
        self.tell(ranks=(replace(rank, step=step, progress_age_ns=age, stalled=stalled),))

    def saves(self, *steps: int) -> None:
        """Confirm checkpoints."""
        rank = self.report.group_rank
        confirmed = tuple(
            CheckpointConfirmation(prefix="p", step=step, ranks=(rank,), paths=(f"/c/{step}",))
            for step in steps
        )
        self.tell(checkpoints=(*self.report.checkpoints, *confirmed))

    def obey(self, command) -> None:
        """Do what a command says."""
        match command:
            case Start():
                rank = RankStatus(rank=command.group_rank, local_rank=0, pid=1)
                self.tell(
                    state=AgentState.RUNNING,
                    generation=command.generation,
                    topology_version=command.topology_version,
                    group_rank=command.group_rank,
                    ranks=(rank,),
                    faults=tuple(f for f in self.report.faults if f.kind is FaultKind.GPU_FATAL),
                )
            case Stop():
                self.tell(
                    state=AgentState.READY,
                    stopped_generation=command.generation,
                    ranks=(),
                    faults=tuple(f for f in self.report.faults if f.kind is FaultKind.GPU_FATAL),
                )
            case Inspect():
                report = ProgressReport(
                    round_id=command.round_id, node=self.name, ranks=self.snapshots
                )
                self.bench.feed(LinkSpoke(link=self.link, message=report))
            case Shutdown():
                pass


class Bench:
    """A core and its nodes; every effect is done as soon as it is asked for."""

    def __init__(self, *, nnodes: int = 3, spares: int = 0, **settings) -> None:
        self.settings = JobSettings(
            job="j", nnodes=nnodes, nproc_per_node=1, stall_timeout_s=STALL_S, **settings
        )
        self.now = Instant(10**12)
        self.nodes: dict[str, FakeNode] = {}
        self.links = 0
        self.sent: list[tuple[str, object]] = []
        self.incidents = {}
        self.finished: Finished | None = None
        self.dismissed: list[Dismiss] = []
        self.journal = encode_state(DurableState(job="j"))
        self.core: JobCore
        self.boot()
        for index in range(nnodes + spares):
            FakeNode(self, f"node-{index}", spare=index >= nnodes).dial()

    def boot(self) -> None:
        """Start the core from the journal."""
        state = decode_state(self.journal)
        self.core = JobCore(self.settings, state, WALL_OFFSET_NS, self.now)

    def feed(self, event) -> None:
        """Hand an event to the core and do what it asks for."""
        self.do(self.core.handle(event, self.now))

    def do(self, effects) -> None:
        """Do effects in their order."""
        for effect in effects:
            match effect:
                case Persist():
                    self.journal = encode_state(effect.state)
                    if effect.incident is not None:
                        self.incidents[effect.incident.id] = effect.incident
                case Send():
                    node = next(it for it in self.nodes.values() if it.link == effect.link)
                    self.sent.append((node.name, effect.command))
                    if node.obeys:
                        node.obey(effect.command)
                case Finished():
                    self.finished = effect
                case Dismiss():
                    self.dismissed.append(effect)
                case Accept() | _:
                    pass

    def wait(self, span_s: float) -> None:
        """Let time pass, in the steps that the core asks for; nodes keep speaking."""
        end = after(self.now, seconds(span_s))
        while self.now < end:
            self.now = min(end, max(self.core.next_deadline(), after(self.now, seconds(0.05))))
            self.do(self.core.handle_timer(self.now))
            for node in list(self.nodes.values()):
                if self.core._desk.members.by_link(node.link) is not None:
                    node.tell()

    def started(self, generation: int) -> dict[str, Start]:
        """Return the starts of a generation that were sent."""
        return {
            node: command
            for node, command in self.sent
            if isinstance(command, Start) and command.generation == generation
        }

    def step(self, step: int) -> None:
        """Let every node of the world complete a step."""
        for name in self.core.state.world:
            self.nodes[name].steps(step)

    def incident(self, number: int = 1):
        """Return a stored incident."""
        return self.incidents[f"j-{number:04d}"]


def running(**settings) -> Bench:
    """Return a job whose three ranks made a step and saved two checkpoints."""
    bench = Bench(**settings)
    assert bench.core.state.phase is JobPhase.RUNNING
    bench.step(25)
    for name in bench.core.state.world:
        bench.nodes[name].saves(10, 20)
    return bench


def killed() -> dict[str, object]:
    return {"exit": ExitCause(signal=9)}


def test_the_first_start_waits_for_every_node_and_gives_each_its_rank():
    """A start of fewer nodes than asked for trains another job than the one that was meant."""
    bench = Bench(nnodes=3, spares=1)
    starts = bench.started(1)
    assert [starts[name].group_rank for name in ("node-0", "node-1", "node-2")] == [0, 1, 2]
    assert "node-3" not in starts
    assert {it.master_addr for it in starts.values()} == {"host-node-0"}
    assert bench.core.state.phase is JobPhase.RUNNING
    assert bench.core.state.open_incident is None


def test_a_crash_stops_everybody_and_restarts_from_the_newest_whole_checkpoint():
    """The whole point of the tool."""
    bench = running()
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    assert {node for node, command in bench.sent if isinstance(command, Stop)} == {
        "node-0",
        "node-1",
        "node-2",
    }
    starts = bench.started(2)
    assert {it.checkpoints[0].step for it in starts.values()} == {20}
    assert bench.core.state.world == ("node-0", "node-1", "node-2")
    assert bench.core.state.open_incident is not None
    bench.step(21)
    incident = bench.incident()
    assert (incident.outcome, incident.steps_lost) == (Outcome.RECOVERED, 5)
    assert (incident.finding.culprit.node, incident.finding.culprit.rank) == ("node-1", 1)
    reached = [item.phase for item in incident.milestones]
    assert reached == list(IncidentPhase)


def test_a_hang_is_found_by_looking_at_every_rank():
    """A hang reports nothing by itself; a tool that waits for a report waits for ever."""
    bench = running()
    for rank, name in enumerate(bench.core.state.world):
        bench.nodes[name].snapshots = (
            RankSnapshot(
                rank=rank,
                node=name,
                local_rank=0,
                step=25,
                collective_seq=26 - (rank == 2),
                progress_age_ns=seconds(STALL_S + 1),
                heartbeat_age_ns=0,
                process_state="T" if rank == 2 else "S",
            ),
        )
    bench.nodes["node-0"].steps(25, stalled=True)
    bench.wait(1)
    bench.step(26)
    culprit = bench.incident().finding.culprit
    assert (culprit.kind, culprit.node) == (FaultKind.PROCESS_STALL, "node-2")
    assert bench.incident().trigger == "1 rank made no progress for 6.0 s"
    assert bench.core.state.generation == 2


def test_a_pause_that_convicts_nobody_stops_nothing():
    """A long evaluation is no hang; stopping for it would make the tool the fault."""
    bench = running()
    for rank, name in enumerate(bench.core.state.world):
        bench.nodes[name].snapshots = (
            RankSnapshot(rank=rank, node=name, local_rank=0, step=26, progress_age_ns=0),
        )
    bench.nodes["node-0"].steps(25, stalled=True)
    bench.nodes["node-0"].steps(26)
    bench.wait(3)
    assert bench.core.state.phase is JobPhase.RUNNING
    assert bench.core.state.next_incident == 1
    assert not [command for _, command in bench.sent if isinstance(command, Stop)]


def test_a_coordinator_restarted_while_it_looks_at_a_stall_waits_for_its_nodes():
    """Judging an empty table would stop a job that only paused, or name nobody for a real hang."""
    bench = running()
    for rank, name in enumerate(bench.core.state.world):
        bench.nodes[name].obeys = False
        bench.nodes[name].snapshots = (
            RankSnapshot(rank=rank, node=name, local_rank=0, step=26, progress_age_ns=0),
        )
    bench.nodes["node-0"].steps(25, stalled=True)
    assert bench.core.state.phase is JobPhase.LOCALIZING
    bench.boot()
    bench.wait(3)
    assert bench.core.state.phase is JobPhase.LOCALIZING
    for node in bench.nodes.values():
        node.obeys = True
        node.dial()
    assert bench.core.state.phase is JobPhase.RUNNING
    assert bench.core.state.generation == 1


def test_a_crashed_node_is_named_although_its_victims_speak_first():
    """The dead do not report; whoever speaks first would be blamed for what was done to them."""
    bench = running(spares=1)
    bench.feed(LinkClosed(link=bench.nodes["node-1"].link))
    bench.now = after(bench.now, seconds(0.1))
    bench.nodes["node-2"].breaks(FaultKind.CRASH, exit=ExitCause(code=1), evidence=(GLOO,))
    bench.now = after(bench.now, seconds(0.1))
    bench.nodes["node-0"].breaks(FaultKind.CRASH, exit=ExitCause(code=1), evidence=(GLOO,))
    bench.wait(25)
    bench.step(21)
    culprit = bench.incident().finding.culprit
    assert (culprit.kind, culprit.node) == (FaultKind.NODE_LOST, "node-1")
    assert bench.core.state.world == ("node-0", "node-3", "node-2")
