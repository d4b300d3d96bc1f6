"""The stop and the last look before it: who is waited for, and for how long."""

from coordinator.incidents import IncidentPhase
from coordinator.phases import JobPhase
from scout.clock import seconds
from scout.hang import RankSnapshot
from sidecar.api import EvidenceReport, FaultKind, Inspect, ProgressReport, Stop
from sidecar.rank_evidence import RankEvidence, ThreadStack
from tests.unit.coordinator.test_job import (
    STALL_S,
    Bench,
    LinkClosed,
    LinkSpoke,
    killed,
    running,
)

BUDGET_S = 2.0


def asked(bench: Bench) -> Inspect:
    """Return the last look that was asked for."""
    return [command for _, command in bench.sent if isinstance(command, Inspect)][-1]


def stopped(bench: Bench) -> bool:
    return any(isinstance(command, Stop) for _, command in bench.sent)


def announces(bench: Bench, name: str, *, follows: bool = True, **more) -> None:
    """Answer the look at once, and say that evidence follows."""
    rank = bench.core.state.world.index(name)
    seen = RankSnapshot(rank=rank, node=name, local_rank=0, step=25, **more)
    report = ProgressReport(
        round_id=asked(bench).round_id, node=name, ranks=(seen,), evidence_follows=follows
    )
    bench.feed(LinkSpoke(link=bench.nodes[name].link, message=report))


def delivers(bench: Bench, name: str, *, round_id: int | None = None) -> None:
    """Send the evidence."""
    rank = bench.core.state.world.index(name)
    stack = ThreadStack(name="MainThread", main=True, frames=(f"where (train.py:{rank})",))
    report = EvidenceReport(
        round_id=asked(bench).round_id if round_id is None else round_id,
        node=name,
        evidence={str(rank): RankEvidence(threads=(stack,))},
    )
    bench.feed(LinkSpoke(link=bench.nodes[name].link, message=report))


def broken(*, announce: bool = True, **settings) -> Bench:
    """Return a job of which rank 1 was killed, and whose nodes announced evidence."""
    bench = running(**settings)
    for node in bench.nodes.values():
        node.obeys = False
    bench.nodes["node-1"].breaks(FaultKind.CRASH, **killed())
    for name in bench.core.state.world if announce else ():
        announces(bench, name)
    return bench


def test_the_stop_waits_for_the_evidence_that_was_announced_and_no_longer():
    """What a stop destroys cannot be had afterwards, and every second costs the whole job."""
    bench = broken(evidence_budget_s=BUDGET_S)
    assert 0 < asked(bench).evidence_budget_s < BUDGET_S
    delivers(bench, "node-0")
    delivers(bench, "node-2")
    assert not stopped(bench)
    assert bench.core.view(bench.now).waiting_for == "a last look at every rank"
    delivers(bench, "node-1")
    assert stopped(bench)
    incident = bench.incident()
    assert [group.ranks for group in incident.stack_groups] == [(1,), (0,), (2,)]
    assert next(iter(incident.evidence)) == "1"
    assert incident.evidence_missing == ()
    captured, localized = IncidentPhase.CAPTURED, IncidentPhase.LOCALIZED
    assert incident.at(captured) >= incident.at(localized)


def test_a_node_that_never_delivers_holds_the_stop_for_the_budget_only():
    """A node that hangs in the look must not keep the job from being restarted."""
    bench = broken(evidence_budget_s=BUDGET_S)
    delivers(bench, "node-0")
    bench.wait(BUDGET_S / 2)
    assert not stopped(bench)
    bench.wait(BUDGET_S)
    assert stopped(bench)
    assert bench.incident().evidence_missing == (
        "node-1: nothing came in time",
        "node-2: nothing came in time",
    )
    assert [group.ranks for group in bench.incident().stack_groups] == [(0,)]


def test_nobody_waits_for_a_node_that_hung_up():
    """A node that died with its rank sends nothing any more; two seconds of the job are gone."""
    bench = broken(evidence_budget_s=BUDGET_S)
    delivers(bench, "node-0")
    delivers(bench, "node-2")
    bench.feed(LinkClosed(link=bench.nodes["node-1"].link))
    assert stopped(bench)


def test_nobody_waits_for_evidence_that_was_not_announced():
    """An older sidecar knows no evidence, and would cost every recovery the whole budget."""
    bench = broken(announce=False)
    for name in bench.core.state.world:
        announces(bench, name, follows=False)
    assert stopped(bench)
    assert bench.incident().stack_groups == ()


def test_a_budget_of_nothing_asks_for_nothing():
    """Whoever wants the fastest stop gets it."""
    bench = broken(announce=False, evidence_budget_s=0.0)
    assert asked(bench).evidence_budget_s == 0


def test_evidence_of_another_round_is_not_taken_for_this_ones():
    """The stacks of a pause an hour ago would explain a crash of now."""
    bench = broken(evidence_budget_s=BUDGET_S)
    for name in bench.core.state.world:
        delivers(bench, name, round_id=asked(bench).round_id + 1)
    assert not stopped(bench)


def test_a_pause_that_convicts_nobody_does_not_wait_for_evidence():
    """A job that goes on is not to be held in suspense for stacks that nobody will read."""
    bench = running(evidence_budget_s=BUDGET_S)
    for node in bench.nodes.values():
        node.obeys = False
    bench.nodes["node-0"].steps(25, stalled=True)
    for name in bench.core.state.world:
        announces(bench, name, progress_age_ns=0)
    assert bench.core.state.phase is JobPhase.RUNNING
    delivers(bench, "node-0")  # late, and of no use to anybody
    assert bench.core.state.phase is JobPhase.RUNNING
    assert not stopped(bench)


def test_a_hang_is_stopped_with_the_stack_of_its_culprit():
    """'rank 2 hangs' is a rumour until somebody sees in which line."""
    bench = running(evidence_budget_s=BUDGET_S)
    for node in bench.nodes.values():
        node.obeys = False
    bench.nodes["node-0"].steps(25, stalled=True)
    for rank, name in enumerate(bench.core.state.world):
        announces(
            bench,
            name,
            collective_seq=26 - (rank == 2),
            progress_age_ns=seconds(STALL_S + 1),
            heartbeat_age_ns=0,
            process_state="T" if rank == 2 else "S",
        )
    for name in bench.core.state.world:
        delivers(bench, name)
    assert stopped(bench)
    first = bench.incident().stack_groups[0]
    assert (first.ranks, first.odd, first.frames) == ((2,), True, ("where (train.py:2)",))
