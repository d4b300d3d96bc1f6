"""The job core, driven by hand: one fault at a time, from the first sign to the next start.

Here nodes obey at once and lose nothing; what delays, losses and crashes make of it is for the
simulator.
"""

import re
from dataclasses import replace
from itertools import count

import pytest

from coordinator.escalation import RestartPolicy
from coordinator.events import (
    Accept,
    Dismiss,
    Finished,
    LinkClosed,
    LinkOpened,
    LinkSpoke,
    OperatorAsked,
    Persist,
    Say,
    Send,
)
from coordinator.incidents import IncidentPhase, Outcome
from coordinator.job import JobCore
from coordinator.journal_format import DurableState, decode_state, encode_state
from coordinator.offenders import Strike
from coordinator.phases import JobPhase
from coordinator.settings import JobSettings
from scout.clock import Instant, after, seconds
from scout.hang import GroupPosition, Phase, RankSnapshot
from sidecar.api import (
    PROTOCOL_VERSION,
    AgentState,
    CheckpointConfirmation,
    CheckpointPointer,
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
from worker_shim.messages import RestartMode

WALL_OFFSET_NS = 1_700_000_000 * 10**9
STALL_S = 5.0
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4"


class FakeNode:
    """One node's side of the conversation: it does what it is told, at once."""

    def __init__(self, bench: "Bench", name: str, *, spare: bool, life: int = 1) -> None:
        self.bench, self.name, self.life = bench, name, life
        self.only_quiet = False
        """It answers looks that ask for no evidence, and no others."""
        bench.links += 1
        self.link = bench.links
        self.snapshots: tuple[RankSnapshot, ...] = ()
        self.obeys = True
        self.fault_ids = count(1)
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
            "fault_id": next(self.fault_ids),
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
                newest = max((it.step for it in command.checkpoints), default=-1)
                self.tell(
                    state=AgentState.RUNNING,
                    generation=command.generation,
                    topology_version=command.topology_version,
                    group_rank=command.group_rank,
                    ranks=(rank,),
                    checkpoints=tuple(it for it in self.report.checkpoints if it.step <= newest),
                    faults=tuple(f for f in self.report.faults if f.kind is FaultKind.GPU_FATAL),
                )
            case Stop():
                self.tell(
                    state=AgentState.READY,
                    stopped_generation=command.generation,
                    ranks=(),
                    faults=tuple(f for f in self.report.faults if f.kind is FaultKind.GPU_FATAL),
                )
            case Inspect() if self.only_quiet and command.evidence_budget_s:
                pass
            case Inspect():
                report = ProgressReport(
                    round_id=command.round_id, node=self.name, ranks=self.snapshots
                )
                self.bench.feed(LinkSpoke(link=self.link, message=report))
            case Shutdown():
                pass


class Bench:
    """A core and its nodes; every effect is done as soon as it is asked for."""

    def __init__(self, *, nnodes: int = 3, spares: int = 0, wanted: int = 0, **settings) -> None:
        self.settings = JobSettings(
            job="j",
            nnodes=nnodes,
            nproc_per_node=1,
            spares=wanted,
            **({"stall_timeout_s": STALL_S} | settings),
        )
        self.now = Instant(10**12)
        self.nodes: dict[str, FakeNode] = {}
        self.links = 0
        self.sent: list[tuple[str, object]] = []
        self.incidents = {}
        self.finished: Finished | None = None
        self.dismissed: list[Dismiss] = []
        self.said: list[str] = []
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
                case Say():
                    self.said.append(effect.text)
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


def attached(bench: Bench) -> None:
    """Let every rank of the world attach, without another step."""
    for name in bench.core.state.world:
        rank = bench.nodes[name].report.ranks[0]
        bench.nodes[name].tell(ranks=(replace(rank, attached=True),))


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


@pytest.mark.parametrize(("there", "said"), [(0, "0 of 2"), (1, "1 of 2"), (2, None)])
def test_spares_that_are_wanted_and_not_there_are_told(there, said):
    """That nothing can replace a node is learned when one breaks."""
    bench = Bench(spares=there, wanted=2)
    for step in (1, 2):
        bench.step(step)
    missing = [text for text in bench.said if "spares stand by" in text]
    assert [text[:6] for text in missing] == ([] if said is None else [said])
    assert bench.core.state.phase is JobPhase.RUNNING  # nobody waits for them


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


def test_a_crash_before_the_first_checkpoint_goes_back_to_where_the_job_began():
    """The first minutes are when most jobs break."""
    bench = Bench()
    bench.step(3)
    for node in bench.nodes.values():
        rank = node.report.group_rank
        began = CheckpointConfirmation(prefix="p", step=0, ranks=(rank,), paths=("",))
        node.tell(checkpoints=(began,))
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    chosen = {it.checkpoints for it in bench.started(2).values()}
    assert chosen == {(CheckpointPointer(prefix="p", step=0, path=""),)}
    assert "where it first began" in bench.core.state.open_incident.checkpoints[0].reason


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


def pause(bench: Bench, ages, *, limit_s=STALL_S, **more) -> None:
    """Let every rank be silent for so many seconds, and node-0 say that it is stalled."""
    for rank, name in enumerate(bench.core.state.world):
        bench.nodes[name].snapshots = (
            RankSnapshot(
                rank=rank,
                node=name,
                local_rank=0,
                step=25,
                progress_age_ns=seconds(ages[rank]),
                stall_limit_ns=seconds(limit_s),
                heartbeat_age_ns=0,
                **{key: value[rank] for key, value in more.items()},
            ),
        )
    bench.nodes["node-0"].steps(25, stalled=True)


def test_a_pause_that_convicts_nobody_stops_nothing():
    """A long evaluation is no hang; stopping for it would make the tool the fault."""
    bench = running()
    pause(bench, (STALL_S + 1, 0, 0))
    bench.nodes["node-0"].steps(26)
    bench.wait(3)
    assert bench.core.state.phase is JobPhase.RUNNING
    assert bench.core.state.next_incident == 1
    assert not [command for _, command in bench.sent if isinstance(command, Stop)]


def test_a_rank_that_is_rightly_waited_for_is_looked_at_in_silence():
    """A job whose phase flickers, and whose stacks are read every second, looks broken and is not.

    The status says meanwhile for whom the others wait.
    """
    bench = running()
    evaluates = (None, None, seconds(600))
    positions = (26, 26, 25)
    pause(
        bench,
        [STALL_S + 1] * 3,
        phase_limit_ns=evaluates,
        collective_seq=positions,
        phase=(Phase.FORWARD, Phase.FORWARD, Phase.EVALUATE),
    )
    journal, phases = bench.journal, set()
    for _ in range(40):
        bench.wait(0.25)
        phases.add(bench.core.state.phase)
    assert phases == {JobPhase.RUNNING}
    assert bench.journal == journal
    assert "rank 2, which is evaluating" in bench.core.view(bench.now).waiting_for
    asked = [command for _, command in bench.sent if isinstance(command, Inspect)]
    assert 3 * 8 <= len(asked) <= 3 * 13
    assert {command.evidence_budget_s for command in asked} == {0.0}
    bench.nodes["node-0"].steps(26)
    assert bench.core.view(bench.now).waiting_for == ""


@pytest.mark.parametrize("limit_s", [STALL_S, STALL_S / 10])
def test_a_stall_of_everybody_is_an_incident_as_soon_as_the_last_rank_is_overdue(limit_s):
    """Nobody can be named, so nobody would restart it, and half a limit more is minutes lost."""
    bench = running()
    together = (26, 26, 26)
    pause(
        bench, [limit_s + 1, limit_s + 1, 0.2 * limit_s], limit_s=limit_s, collective_seq=together
    )
    bench.wait(2)
    assert bench.core.state.phase is JobPhase.RUNNING
    pause(bench, [limit_s] * 3, limit_s=limit_s, collective_seq=together)
    bench.nodes["node-1"].steps(25, stalled=True)  # looked at at once, not at the next turn
    assert bench.core.state.generation == 2
    incident = bench.core.state.open_incident
    assert incident is not None
    assert incident.finding.outcome == "inconclusive"
    assert "every rank stopped at the same position" in incident.finding.why


def test_a_stopped_process_is_an_incident_long_before_the_limit():
    """A rank under SIGSTOP does nothing for as long as one likes to wait."""
    bench = running(stall_timeout_s=300.0)
    world = GroupPosition(name="w", ranks=(0, 1, 2), seq=26, op="all_reduce", inside=True)
    late = replace(world, seq=25, inside=False)
    pause(
        bench,
        [2.3, 2.2, 2.4],
        limit_s=300,
        groups=((world,), (world,), (late,)),
        held_ns=(None, None, seconds(2.2)),
        process_state=("S", "S", "T"),
    )
    node = bench.nodes["node-2"]
    node.tell(ranks=(replace(node.report.ranks[0], held=True),))
    bench.nodes["node-0"].steps(25)
    bench.wait(1)
    bench.step(26)
    culprit = bench.incident().finding.culprit
    assert (culprit.node, culprit.reason) == ("node-2", "process_stall: the process is stopped")


def test_a_coordinator_restarted_while_it_looks_at_a_pause_waits_for_its_nodes():
    """Judging an empty table would stop a job that only paused, or name nobody for a real hang."""
    bench = running()
    for name in bench.core.state.world:
        bench.nodes[name].obeys = False
    pause(bench, (STALL_S + 1, 0, 0))
    bench.boot()
    bench.wait(3)
    for node in bench.nodes.values():
        node.obeys = True
        node.dial()
    bench.wait(3)
    assert bench.core.state.phase is JobPhase.RUNNING
    assert (bench.core.state.generation, bench.core.state.next_incident) == (1, 1)


def test_a_coordinator_restarted_after_it_saw_a_hang_looks_again():
    """Its nodes have their evidence still, and the job has hung for no shorter time."""
    bench = running(lease_s=5.0)
    for node in bench.nodes.values():
        node.only_quiet = True
    ages = [STALL_S + 1] * 3
    pause(bench, ages, collective_seq=(26, 26, 25), process_state=("S", "S", "T"))
    assert bench.core.state.phase is JobPhase.LOCALIZING
    assert bench.core.state.open_incident.finding.culprit.node == "node-2"
    bench.boot()
    bench.wait(1)
    assert bench.core.state.phase is JobPhase.LOCALIZING
    for node in bench.nodes.values():
        node.only_quiet = False
        node.dial()
    bench.wait(1)
    bench.step(26)
    assert bench.incident().finding.culprit.node == "node-2"
    assert bench.core.state.generation == 2


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


def test_a_broken_gpu_costs_its_node_the_rank_and_promotes_a_spare():
    """A node with a broken device that gets its rank back breaks the next run in seconds."""
    bench = running(spares=1)
    bench.nodes["node-1"].breaks(FaultKind.GPU_FATAL, gpu=0, scope=Scope.GPU)
    bench.wait(1)
    assert bench.core.state.world == ("node-0", "node-3", "node-2")
    assert "node-1" in bench.core.state.excluded
    assert bench.started(2)["node-3"].group_rank == 1
    move = bench.core.state.open_incident.moves[0]
    assert (move.group_rank, move.from_node, move.to_node) == (1, "node-1", "node-3")


def test_a_spare_with_a_broken_gpu_is_left_out_and_nothing_stops():
    """Promoting it would turn the next fault into two."""
    bench = running(spares=1)
    bench.nodes["node-3"].breaks(FaultKind.GPU_FATAL, gpu=0, scope=Scope.GPU)
    assert "node-3" in bench.core.state.excluded
    assert bench.core.state.phase is JobPhase.RUNNING
    assert not [command for _, command in bench.sent if isinstance(command, Stop)]


def test_a_gpu_that_breaks_while_a_person_restarts_the_job_is_left_out_all_the_same():
    """A fault that is told once, at an awkward moment, must not be forgotten."""
    bench = running(spares=1)
    for node in bench.nodes.values():
        node.obeys = False
    ask(bench, "restart")
    bench.nodes["node-1"].breaks(FaultKind.GPU_FATAL, gpu=0, scope=Scope.GPU)
    for node in bench.nodes.values():
        node.obeys = True
    bench.wait(5)
    assert bench.core.state.world == ("node-0", "node-3", "node-2")


def test_a_node_that_comes_back_with_old_workers_is_stopped_while_the_job_runs():
    """Until then its workers hold its GPUs and write to the job's disk."""
    bench = running(spares=1)
    lost = bench.nodes["node-1"]
    bench.feed(LinkClosed(link=lost.link))
    bench.wait(40)
    assert bench.core.state.world == ("node-0", "node-3", "node-2")
    bench.step(21)
    assert bench.core.state.phase is JobPhase.RUNNING
    lost.link = bench.links = bench.links + 1
    lost.dial()
    assert lost.report.stopped_generation >= 1
    assert lost.report.state is AgentState.READY
    assert bench.core.state.phase is JobPhase.RUNNING
    assert bench.core.state.generation == 2


def test_a_node_whose_workers_somebody_else_stopped_restarts_the_job():
    """It answers and runs nothing: waiting for its steps would last for ever."""
    bench = running()
    node = bench.nodes["node-1"]
    node.obey(Stop(generation=1, restart_mode="process_level_restart", reason="by hand"))
    bench.wait(2)
    assert bench.core.state.generation == 2
    assert bench.core.state.phase is JobPhase.RUNNING


def test_a_restarted_sidecar_restarts_the_job_on_the_same_node():
    """Its workers ended with it; a node that is there again is as good as any other."""
    bench = running(spares=1)
    bench.feed(LinkClosed(link=bench.nodes["node-1"].link))
    FakeNode(bench, "node-1", spare=False, life=2).dial()
    bench.wait(2)
    assert bench.core.state.world == ("node-0", "node-1", "node-2")
    assert bench.core.state.generation == 2
    bench.step(21)
    assert bench.incident().finding.culprit.node == "node-1"


def test_a_restarted_coordinator_goes_on_without_stopping_anybody():
    """Losing the coordinator must cost no training."""
    bench = running()
    bench.boot()
    for node in bench.nodes.values():
        node.dial()
    bench.wait(20)
    assert bench.core.state.phase is JobPhase.RUNNING
    assert bench.core.state.generation == 1
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    assert {it.checkpoints[0].step for it in bench.started(2).values()} == {20}


def test_a_coordinator_restarted_between_two_generations_lets_survivors_keep_their_ranks():
    """Spares that dial in first would take the ranks of healthy nodes that are a moment later."""
    bench = running(spares=2)
    for node in bench.nodes.values():
        node.obeys = False
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    assert bench.core.state.phase is JobPhase.STOPPING
    for node in bench.nodes.values():
        node.tell(state=AgentState.STOPPING)
        node.obey(Stop(generation=1, restart_mode="process_level_restart", reason="x"))
        if node.name != "node-2":
            node.report = replace(node.report, rendezvous_port=0)
    assert bench.core.state.phase in (JobPhase.WAITING, JobPhase.STARTING)
    state = replace(bench.core.state, phase=JobPhase.WAITING, generation=1)
    bench.journal = encode_state(state)
    bench.boot()
    for name in ("node-3", "node-4", "node-2", "node-1", "node-0"):
        node = bench.nodes[name]
        node.obeys = True
        node.report = replace(node.report, rendezvous_port=4000)
        node.dial()
    assert bench.core.state.world == ("node-0", "node-1", "node-2")
    assert bench.core.state.phase is JobPhase.RUNNING


def test_a_spent_budget_ends_the_job_with_the_reason():
    """A crash loop must not burn a night."""
    bench = running(restart=RestartPolicy(retries_max=1))
    for step in (21, 22):
        bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
        bench.wait(2)
        if bench.finished is None:
            bench.step(step)
    assert bench.core.state.phase is JobPhase.FAILED
    assert bench.finished is not None
    assert "jobMaxRetryCount" in bench.finished.reason
    assert bench.core.state.generation == 2
    assert bench.incident(2).outcome is Outcome.FAILED
    told = {node for node, command in bench.sent if isinstance(command, Shutdown)}
    assert told == set(bench.nodes)


def test_a_job_without_enough_nodes_fails_after_its_wait():
    """A job that waits for ever looks like one that runs."""
    bench = running(wait_for_nodes_s=30.0)
    bench.nodes["node-1"].breaks(FaultKind.GPU_FATAL, gpu=0, scope=Scope.GPU)
    bench.wait(40)
    assert bench.core.state.phase is JobPhase.FAILED
    assert "1 is missing" in bench.finished.reason


def test_every_rank_that_ends_cleanly_completes_the_job():
    """The end of training is not a fault."""
    bench = running()
    for node in bench.nodes.values():
        node.tell(state=AgentState.COMPLETED)
    assert bench.core.state.phase is JobPhase.COMPLETED
    assert bench.core.state.next_incident == 1


def test_a_person_can_stop_the_job():
    """Nothing that follows may start it again, and nobody is woken for a failure."""
    bench = running()
    ask(bench, "stop")
    bench.wait(2)
    assert bench.core.state.phase is JobPhase.STOPPED
    assert (bench.finished.outcome, bench.finished.reason) == (
        "stopped",
        "mia asked to stop: a drill",
    )
    assert bench.core.state.generation == 1
    assert bench.incident().outcome is Outcome.STOPPED
    told = [command for _, command in bench.sent if isinstance(command, Shutdown)]
    assert {command.exit_code for command in told} == {0}


def test_a_job_that_waits_for_nodes_is_stopped_the_same_way():
    """A person who gives up waiting has not seen a failure either."""
    bench = running()
    ask(bench, "exclude", "node-1")
    bench.wait(8)
    assert bench.core.state.phase is JobPhase.WAITING
    ask(bench, "stop")
    bench.wait(2)
    assert bench.core.state.phase is JobPhase.STOPPED
    assert bench.finished.outcome == "stopped"


def test_a_person_who_asks_to_stop_during_a_restart_they_asked_for_is_heard():
    """The second word counts as well as the first."""
    bench = running()
    for node in bench.nodes.values():
        node.obeys = False
    ask(bench, "restart")
    ask(bench, "stop")
    for node in bench.nodes.values():
        node.obeys = True
    bench.wait(3)
    assert bench.core.state.phase is JobPhase.STOPPED


def test_a_person_can_take_an_exclusion_back_and_the_wait_says_how():
    """A node excluded by mistake would be lost to the job until it is begun anew."""
    bench = running()
    ask(bench, "exclude", "node-1")
    bench.wait(8)
    view = bench.core.view(bench.now)
    assert view.phase is JobPhase.WAITING
    assert "excluded: node-1, which `outrider include NODE` takes back" in view.waiting_for
    ask(bench, "include", "node-1")
    bench.wait(2)
    assert bench.core.state.excluded == {}
    assert bench.core.state.world == ("node-0", "node-1", "node-2")
    assert bench.core.state.phase is JobPhase.RUNNING
    bench.boot()
    assert bench.core.state.excluded == {}


def test_a_node_whose_device_is_broken_is_not_included_by_a_wish():
    """It would be excluded again at the next look, and the person told that all is well."""
    bench = running(spares=1)
    bench.nodes["node-1"].breaks(FaultKind.GPU_FATAL, gpu=0, scope=Scope.GPU)
    bench.wait(3)
    assert "node-1" in bench.core.state.excluded
    nodes = {node.node: node for node in bench.core.view(bench.now).nodes}
    assert "restart its sidecar" in nodes["node-1"].unfit
    assert nodes["node-0"].unfit is None
    ask(bench, "include", "node-1")
    assert "node-1" in bench.core.state.excluded
    assert "node-1 stays left out: its sidecar says" in bench.said[-1]


def test_joins_losses_and_recoveries_are_said():
    """A log that is silent between a stop and the next fault leaves people guessing."""
    bench = running()
    assert bench.said[:3] == [f"node-{n} on host-node-{n} has joined" for n in range(3)]
    bench.feed(LinkClosed(link=bench.nodes["node-2"].link))
    assert bench.said[-1].startswith("node-2 is not connected any more; it is waited for")
    bench.nodes["node-2"].dial()
    assert bench.said[-1] == "node-2 on host-node-2 is back"
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    bench.step(21)
    assert re.fullmatch(
        r"recovered in \d+\.\d s, resumed from step 20 \(incident j-0001\)", bench.said[-1]
    )


def test_a_person_can_take_a_node_out_of_the_job():
    """Its rank goes to a spare, and no budget is charged."""
    bench = running(spares=1, restart=RestartPolicy(retries_max=0))
    ask(bench, "exclude", "node-1")
    bench.wait(2)
    assert bench.core.state.world == ("node-0", "node-3", "node-2")
    assert bench.core.state.excluded["node-1"] == "mia asked to exclude: a drill"
    assert bench.core.state.phase is JobPhase.RUNNING


def test_a_step_after_a_value_that_is_not_finite_is_never_resumed_from():
    """The weights that produced it may be damaged, and so is everything saved from then on."""
    bench = running()
    line = "iteration 18 | loss: nan"
    bench.nodes["node-1"].breaks(FaultKind.LOG_RULE, step=18, message="loss: nan", evidence=(line,))
    bench.wait(2)
    assert {it.checkpoints[0].step for it in bench.started(2).values()} == {10}
    bench.boot()
    kept = [pointer.step for pointer in bench.core.state.complete_checkpoints]
    assert kept == [10]


def test_nothing_is_commanded_before_it_is_durable():
    """A coordinator that crashed in between would give the same number to another start."""
    bench = Bench(nnodes=1)
    effects = []
    core = JobCore(bench.settings, DurableState(job="j"), WALL_OFFSET_NS, bench.now)
    node = FakeNode(bench, "node-0", spare=False)
    effects += core.handle(LinkOpened(link=node.link, hello=node.hello), bench.now)
    effects = core.handle(LinkSpoke(link=node.link, message=node.report), bench.now)
    kinds = [type(effect).__name__ for effect in effects]
    assert kinds.index("Persist") < kinds.index("Send")
    persisted = next(effect for effect in effects if isinstance(effect, Persist))
    assert persisted.state.generation == 1


def test_a_node_whose_end_was_noticed_late_is_named_all_the_same():
    """A connection may look open for seconds after its machine died."""
    bench = running()
    bench.now = after(bench.now, seconds(0.5))
    bench.nodes["node-1"].obeys = False
    bench.nodes["node-2"].breaks(FaultKind.CRASH, exit=ExitCause(code=1), evidence=(GLOO,))
    bench.nodes["node-0"].tell()
    for _ in range(8):
        bench.now = after(bench.now, seconds(0.5))
        bench.do(bench.core.handle_timer(bench.now))
    assert bench.core.state.phase is JobPhase.STOPPING
    bench.feed(LinkClosed(link=bench.nodes["node-1"].link))
    FakeNode(bench, "node-1", spare=False, life=2).dial()
    bench.wait(2)
    bench.step(21)
    assert bench.incident().finding.culprit.node == "node-1"


def test_c42_a_frozen_node_is_lost_by_this_clock_and_its_return_changes_nothing():
    """The others would wait for hours, or old workers would write beside the new ones."""
    bench = running(spares=1)
    frozen = bench.nodes["node-1"]
    old = frozen.report
    frozen.obeys = False
    heard_from = bench.core._desk.members
    end = after(bench.now, seconds(120))
    while bench.now < end:  # every node but the frozen one speaks on
        bench.now = after(bench.now, seconds(1))
        bench.do(bench.core.handle_timer(bench.now))
        for name, node in bench.nodes.items():
            if name != "node-1" and heard_from.by_link(node.link) is not None:
                node.tell()
    assert bench.core.state.world == ("node-0", "node-3", "node-2")
    bench.step(26)
    incident = bench.incident()
    assert (incident.finding.culprit.node, incident.outcome) == ("node-1", Outcome.RECOVERED)
    frozen.obeys = True
    frozen.report = old
    frozen.link = bench.links = bench.links + 1
    frozen.dial()  # it goes on, and tells of the generation that it still runs
    frozen.breaks(FaultKind.CRASH, **killed())
    bench.wait(5)
    assert frozen.report.stopped_generation >= 1
    assert frozen.report.ranks == ()
    assert (bench.core.state.generation, bench.core.state.phase) == (2, JobPhase.RUNNING)
    assert len(bench.incidents) == 1


def test_c78_a_node_that_cannot_end_its_workers_is_left_out_after_a_limit():
    """One process that hangs in the kernel would keep the whole job waiting for ever."""
    bench = running(spares=1, stop_timeout_s=20.0)
    stuck = bench.nodes["node-1"]
    stuck.obeys = False
    bench.nodes["node-2"].breaks(FaultKind.CRASH, **killed())
    bench.wait(10)
    assert bench.core.state.phase is JobPhase.STOPPING
    bench.wait(20)
    assert bench.core.state.phase is JobPhase.RUNNING
    assert bench.core.state.world == ("node-0", "node-3", "node-2")
    assert bench.core.state.excluded == {"node-1": "it did not confirm the stop in time"}


def test_c81_each_start_of_a_generation_has_the_port_that_its_first_node_holds_now():
    """A port of the last run is held by an orphan, or waits for its time to pass."""
    bench = running()
    bench.nodes["node-0"].report = replace(bench.nodes["node-0"].report, rendezvous_port=4321)
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    first, second = bench.started(1), bench.started(2)
    assert {it.master_port for it in first.values()} == {4000}
    assert {it.master_port for it in second.values()} == {4321}
    assert set(second) == set(bench.core.state.world)


def test_c84_a_restart_of_many_nodes_is_one_rendezvous_and_nobody_is_started_before_it_is_known():
    """Hundreds of ranks that look for each other at different places never meet."""
    bench = running(nnodes=64)
    bench.nodes["node-40"].breaks(FaultKind.CRASH, **killed())
    bench.wait(3)
    starts = bench.started(2)
    assert set(starts) == set(bench.nodes)
    places = {(it.master_addr, it.master_port, it.topology_version) for it in starts.values()}
    assert len(places) == 1
    orders = [command for _, command in bench.sent if isinstance(command, Start | Stop)]
    first = next(index for index, it in enumerate(orders) if it == starts["node-0"])
    assert {type(it) for it in orders[first:]} == {Start}  # no start among the stops
    sent = [n for n, it in bench.sent if isinstance(it, Start) and it.generation == 2]
    assert len(sent) == len(set(sent))  # and none of them twice


def test_c83_one_budget_for_the_job_that_outlives_the_coordinator():
    """A counter on each node, or one that a restart resets, allows far more than was meant."""
    bench = running(spares=1, restart=RestartPolicy(retries_max=3))
    ask(bench, "exclude", "node-0")  # another set of nodes is no failure
    bench.wait(2)
    for number in range(3):
        bench.step(30 + 10 * number)
        for name in bench.core.state.world:
            bench.nodes[name].saves(30 + 10 * number)
        assert bench.core.state.phase is JobPhase.RUNNING
        name = bench.core.state.world[number % 3]
        bench.nodes[name].breaks(FaultKind.CRASH, **killed())
        bench.wait(2)
        bench.boot()
        for node in bench.nodes.values():
            node.dial()
    bench.step(60)
    bench.nodes["node-2"].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    assert bench.core.state.phase is JobPhase.FAILED
    assert "3 restarts" in bench.finished.reason
    assert "jobMaxRetryCount" in bench.finished.reason


def test_c87_of_several_modes_asked_for_the_deepest_holds_and_a_late_word_is_dropped():
    """The mildest would leave broken what the deepest was asked for; the late one restart twice."""
    bench = running(nnodes=4)
    modes = (
        RestartMode.IN_PROCESS,
        RestartMode.PROCESS,
        RestartMode.IN_PROCESS,
        RestartMode.JOB,
    )
    told = bench.nodes["node-2"]
    for node, mode in zip(bench.nodes.values(), modes, strict=True):
        node.breaks(FaultKind.WORKER_REPORTED, restart_mode=mode)
    asked = told.report.faults
    told.obeys = False
    bench.wait(2)
    told.obey(Stop(generation=1, restart_mode="process_level_restart", reason="x"))
    bench.wait(1)
    assert (bench.core.state.generation, bench.core.state.phase) == (2, JobPhase.STARTING)
    told.tell(faults=(replace(asked[0], fault_id=next(told.fault_ids)),))  # of generation 1 still
    told.obeys = True
    bench.wait(3)
    bench.step(26)
    assert bench.incident().decision.reason.startswith(
        "job restart (job_level_restart was asked for)"
    )
    assert len(bench.incidents) == 1
    assert (bench.core.state.generation, bench.core.state.phase) == (2, JobPhase.RUNNING)


def test_a_start_without_a_first_step_is_no_recovery():
    """A job that crashes at every start would look healthy in every chart."""
    bench = running()
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    attached(bench)
    bench.wait(60)
    assert bench.incident().outcome is Outcome.OPEN
    bench.step(21)
    assert bench.incident().outcome is Outcome.RECOVERED
    assert bench.incident().at(IncidentPhase.FIRST_STEP) is not None


def test_workers_that_tell_no_steps_count_as_recovered_after_a_while():
    """A script without the shim would keep its incident open for ever."""
    bench = Bench()
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(20)
    assert bench.incident().outcome is Outcome.OPEN
    bench.wait(20)
    assert bench.incident().outcome is Outcome.RECOVERED
    assert bench.incident().at(IncidentPhase.FIRST_STEP) is None


def test_a_slow_import_after_a_fault_is_waited_for_until_the_first_step():
    """Half a minute of imports closed the incident as recovered, without its time to recover."""
    bench = running()
    attached(bench)
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(120)
    assert not any(rank.attached for node in bench.nodes.values() for rank in node.report.ranks)
    bench.boot()
    for node in list(bench.nodes.values()):
        node.dial()
    bench.wait(120)
    assert bench.incident().outcome is Outcome.OPEN
    bench.step(21)
    assert bench.incident().outcome is Outcome.RECOVERED
    assert bench.incident().at(IncidentPhase.FIRST_STEP) is not None


def test_a_restart_whose_imports_never_end_is_a_fault():
    """Workers that told their steps before and hang while they load would never be noticed."""
    bench = running(startup_deadline_s=100.0)
    attached(bench)
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(90)
    assert bench.core.state.generation == 2
    bench.wait(30)
    assert bench.core.state.generation == 3
    assert bench.incident(2).faults[0].report.message == "3 ranks made no first step in 100 s"


def test_a_start_that_hangs_before_its_first_step_is_a_fault():
    """Nothing else would ever notice: there is no progress yet that could fall silent."""
    bench = Bench(startup_deadline_s=100.0)
    attached(bench)
    bench.wait(90)
    assert bench.core.state.generation == 1
    bench.wait(20)
    assert bench.core.state.generation == 2
    assert bench.incident().faults[0].report.kind is FaultKind.STARTUP_TIMEOUT


def ask(bench: Bench, action: str, node: str | None = None) -> None:
    """Let a person ask."""
    bench.feed(OperatorAsked(action=action, who="mia", why="a drill", node=node))


def torn(step: int) -> dict[str, object]:
    line = f"train.py: cannot resume: /c/{step} is not a whole checkpoint; remove it"
    return {"exit": ExitCause(code=2), "evidence": (line,)}


def newest_started(bench: Bench) -> int:
    starts = bench.started(bench.core.state.generation)
    return {it.checkpoints[0].step for it in starts.values()}.pop()


def test_torn_checkpoints_are_given_up_step_by_step_until_one_loads():
    """A missing newest checkpoint was tried three times, and then the job was over."""
    bench = running()
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    assert newest_started(bench) == 20
    for name in bench.core.state.world:
        bench.nodes[name].breaks(FaultKind.CRASH, **torn(20))
    bench.wait(2)
    assert newest_started(bench) == 10
    assert "step 20 is given up: it could not be loaded" in (
        bench.core.state.open_incident.decision.reason
    )
    bench.boot()  # what was given up stays given up over a restart of the coordinator
    for node in bench.nodes.values():
        node.dial()
    bench.step(11)
    assert bench.core.state.phase is JobPhase.RUNNING
    for name in bench.core.state.world:
        bench.nodes[name].breaks(FaultKind.CRASH, **killed())
    bench.wait(2)
    for name in bench.core.state.world:
        bench.nodes[name].breaks(FaultKind.CRASH, **torn(10))
    bench.wait(2)
    assert bench.core.state.phase is JobPhase.FAILED
    assert "no checkpoint is left that can be loaded" in bench.core.state.outcome_reason


def test_the_same_crash_on_node_after_node_ends_with_the_sentence_about_the_script():
    """A bad record in the data would otherwise cost every spare in turn."""
    bench = Bench(spares=2)
    bug = {"exit": ExitCause(code=1), "evidence": ("IndexError: index 7 of 5",)}
    bench.step(25)
    for name in bench.core.state.world:
        bench.nodes[name].saves(10, 20)
    for _ in range(6):
        if bench.core.state.phase is not JobPhase.RUNNING:
            break
        bench.step(25)
        bench.nodes[bench.core.state.world[1]].breaks(FaultKind.CRASH, **bug)
        bench.wait(2)
    assert bench.core.state.phase is JobPhase.FAILED
    assert "it is the script or its data, not a node" in bench.core.state.outcome_reason
    assert list(bench.core.state.excluded) == ["node-1"]


def test_a_preempted_node_costs_nothing_and_the_spare_goes_on():
    """A scheduler's wish is neither the node's fault nor the job's."""
    bench = running(spares=1)
    bench.nodes["node-1"].tell(state=AgentState.SHUTDOWN)
    bench.nodes["node-1"].obeys = False
    bench.feed(LinkClosed(link=bench.nodes["node-1"].link))
    bench.wait(40)
    assert bench.core.state.world == ("node-0", "node-3", "node-2")
    bench.step(26)
    incident = bench.incident()
    assert (incident.finding.outcome, incident.outcome) == ("preempted", Outcome.RECOVERED)
    assert bench.core.state.excluded == {}
    view = bench.core.view(bench.now)
    assert (view.restarts_total, view.restart_budget_remaining) == (1, 10)


def test_restarts_without_progress_wait_longer_and_longer():
    """A crash loop of seconds hammers the storage that it waits for."""
    bench = running()
    pauses = []
    for number in range(1, 4):
        line = f"OSError: attempt {chr(96 + number)} failed"
        cause = {"exit": ExitCause(code=1), "evidence": (line,)}
        bench.nodes[f"node-{number % 3}"].breaks(FaultKind.CRASH, **cause)
        bench.wait(5)
        pauses.append(bench.core.state.open_incident.decision.backoff_s)
        bench.step(25)
    assert pauses[0] == 0
    assert 0 < pauses[1] <= 1
    assert 0 < pauses[2] <= 2


def test_the_jobs_own_deadline_ends_it():
    """A job that runs into the next one's reservation loses what it did since its checkpoint."""
    bench = running(active_deadline_s=100.0)
    bench.wait(90)
    assert bench.core.state.phase is JobPhase.RUNNING
    bench.wait(12)
    assert bench.core.state.phase is JobPhase.FAILED
    assert "activeDeadlineSeconds" in bench.core.state.outcome_reason
    assert any(isinstance(command, Shutdown) for _, command in bench.sent)


def test_an_observed_detector_stops_nothing_and_is_scored():
    """A rule that is tried out in the night must not cost the night."""
    bench = running(observed=frozenset({FaultKind.LOG_SLOW, FaultKind.PROCESS_STALL}))
    assert set(bench.started(1)["node-0"].observed) == {"log_slow", "process_stall"}
    bench.nodes["node-1"].breaks(FaultKind.LOG_SLOW, message="300 ms a step")
    bench.nodes["node-1"].tell(state=AgentState.RUNNING)
    bench.nodes["node-0"].steps(25, stalled=True)
    bench.wait(5)
    assert bench.core.state.phase is JobPhase.RUNNING
    assert bench.core.state.generation == 1
    bench.boot()
    for node in bench.nodes.values():
        node.dial()
    bench.step(60)
    bench.wait(61)
    bench.step(61)
    view = bench.core.view(bench.now)
    told = {score.kind: score for score in view.observed_scores}
    assert (told[FaultKind.LOG_SLOW].stops, told[FaultKind.LOG_SLOW].false_alarms) == (1, 1)
    assert bench.incidents == {}


def test_the_breaker_stops_mass_exclusion_and_a_person_still_may():
    """One line that every kernel log prints would leave the job without a fleet."""
    bench = running(nnodes=3, spares=3)
    for index, name in enumerate(("node-0", "node-1", "node-2")):
        bench.nodes[name].breaks(FaultKind.GPU_FATAL, scope=Scope.GPU, gpu=0)
        bench.wait(2)
        bench.step(30 + index)
    assert list(bench.core.state.excluded) == ["node-0", "node-1"]
    last = bench.incident(3).decision.reason
    assert "node-2 would be left out too, but 2 of 6 nodes are already" in last
    asked = OperatorAsked(action="exclude", who="ann", why="it smells", node="node-2")
    bench.feed(asked)
    bench.wait(2)
    assert "node-2" in bench.core.state.excluded


def test_a_node_that_broke_before_is_the_last_that_fills_a_gap():
    """Strikes of other jobs are worth nothing if nobody looks at them."""
    bench = running(spares=2)
    at_ns = WALL_OFFSET_NS + bench.now
    strikes = tuple(
        Strike(node="node-3", cause="node_lost", at_ns=at_ns, weight=1.0, job="k", incident=str(n))
        for n in range(2)
    )
    bench.core._desk.strikes = strikes
    bench.nodes["node-1"].breaks(FaultKind.GPU_FATAL, scope=Scope.GPU, gpu=0)
    bench.wait(2)
    assert bench.core.state.world == ("node-0", "node-4", "node-2")
    bench.step(26)
    records = {record.node: record for record in bench.core.view(bench.now).offenders}
    assert records["node-1"].strikes == 1
    assert records["node-3"].strikes == 2


def test_the_spare_near_its_pipeline_neighbours_is_taken_and_the_reason_is_stored():
    """Whoever asks in the morning why node 4 and not node 3 finds it in the incident."""
    bench = Bench(spares=2)
    places = {"node-0": "s1", "node-1": "s1", "node-2": "s1", "node-3": "s2", "node-4": "s1"}
    for name, switch in places.items():
        node = bench.nodes[name]
        bench.feed(LinkClosed(link=node.link))
        bench.links += 1
        node.link = bench.links
        node.hello = replace(node.hello, labels={"switch": switch})
        node.dial()
    bench.step(25)
    for stage, name in enumerate(bench.core.state.world):
        rank = replace(bench.nodes[name].report.ranks[0], labels={"pp": str(stage), "dp": "0"})
        bench.nodes[name].tell(ranks=(rank,))
    bench.boot()
    for node in bench.nodes.values():
        node.dial()
    bench.nodes["node-1"].breaks(FaultKind.GPU_FATAL, scope=Scope.GPU, gpu=0)
    bench.wait(2)
    assert bench.core.state.world == ("node-0", "node-4", "node-2")
    (move,) = bench.core.state.open_incident.moves
    assert "in the switch of its pipeline neighbours (ranks 0, 2)" in move.reason


def test_case_c40_who_is_ended_by_our_own_stop_has_not_failed():
    """One failure would be counted as many, and the budget of restarts spent on its victims."""
    bench = running()
    for node in bench.nodes.values():
        node.obeys = False
    bench.nodes["node-2"].breaks(FaultKind.CRASH, **killed())
    bench.wait(4)
    assert bench.core.state.phase is JobPhase.STOPPING
    for name in ("node-0", "node-1"):
        bench.nodes[name].breaks(FaultKind.CRASH, exit=ExitCause(code=143))
    for node in bench.nodes.values():
        node.obeys = True
        node.obey(next(it for to, it in reversed(bench.sent) if isinstance(it, Stop)))
    bench.wait(3)
    bench.step(26)
    incident = bench.incident()
    assert [fault.node for fault in incident.faults] == ["node-2"]
    assert incident.finding.culprit.node == "node-2"
    assert len(bench.core.state.restarts) == 1


def test_case_c108_a_sidecar_whose_loop_stands_still_is_lost_after_a_lease():
    """Its connection stays open, its files stay fresh; only a word of its loop is a sign of life.

    What follows is defined: the node counts as lost, and a spare takes its ranks.
    """
    bench = running(spares=1, lease_s=5.0)
    wedged = bench.nodes["node-1"]
    wedged.tell = lambda **_: None
    wedged.obeys = False
    bench.wait(30)
    bench.step(26)
    culprit = bench.incident().finding.culprit
    assert (culprit.kind, culprit.node) == (FaultKind.NODE_LOST, "node-1")
    assert "node-1" not in bench.core.state.world
