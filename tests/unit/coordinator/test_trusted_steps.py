"""What the ranks' own comparison changes: who is named, and which checkpoint is loaded."""

import pytest

from coordinator.culprit import judge
from coordinator.incidents import NodeFault
from coordinator.journal_format import DurableState
from coordinator.trusted_steps import not_trusted, verified_by
from sidecar.api import (
    AgentState,
    CheckpointPointer,
    FaultKind,
    FaultReport,
    RankStatus,
    Scope,
    StatusReport,
)
from sidecar.findings import corruption
from worker_shim.messages import ScoutStatus

WORLD = ("node-0", "node-1", "node-2")
WHOLE = tuple(
    CheckpointPointer(prefix="checkpoint", step=step, path=f"/c/{step}") for step in (0, 10, 15)
)
STATE = DurableState(job="j", verified_steps=(10,))


def told_by(node, rank=None, kind=FaultKind.SDC, step=15):
    report = FaultReport(
        fault_id=1,
        kind=kind,
        scope=Scope.RANK,
        reason="SilentDataCorruption",
        message="2 of 3 ranks agree on state.parameters, the others do not",
        age_ns=0,
        rank=rank,
        step=step,
        evidence=("parameters w differs in bytes 0-8192",),
    )
    return NodeFault(node=node, at_ns=1, report=report)


def status(*scouts):
    ranks = tuple(
        RankStatus(rank=at, local_rank=at, pid=1, scout=scout) for at, scout in enumerate(scouts)
    )
    return StatusReport(
        node="node-0",
        incarnation="i",
        state=AgentState.RUNNING,
        generation=1,
        stopped_generation=0,
        topology_version=1,
        rendezvous_port=1,
        ranks=ranks,
    )


def scout(**changes):
    return ScoutStatus(local_rank=0, step=15, outcome=changes.pop("outcome", "healthy"), **changes)


def test_the_rank_that_all_name_is_named_on_its_own_node():
    """The node that told first is drained for another node's corruption."""
    finding = judge([told_by("node-0", 2), told_by("node-1", 2)], (), WORLD, 1, 10**9)
    assert (finding.culprit.node, finding.culprit.rank) == ("node-2", 2)
    assert finding.culprit.kind is FaultKind.SDC
    assert "differs in bytes" in finding.why


@pytest.mark.parametrize("ranks", [(None, None), (1, 2), (7, 7)])
def test_nobody_is_named_where_the_ranks_do_not_agree(ranks):
    """A tie, two stories or a rank that does not exist convict somebody."""
    faults = [told_by(node, rank) for node, rank in zip(WORLD, ranks, strict=False)]
    assert judge(faults, (), WORLD, 1, 10**9).culprit is None


def test_after_corruption_only_a_verified_step_or_the_beginning_is_loaded():
    """The checkpoint that holds the flipped bit is the newest, and is chosen for it."""
    excluded = not_trusted(STATE, [told_by("node-0", 2)], WHOLE)
    assert set(excluded) == {("checkpoint", 15)}
    assert "not verified" in excluded["checkpoint", 15]
    nothing = DurableState(job="j")
    assert set(not_trusted(nothing, [told_by("node-0", 2)], WHOLE)) == {
        ("checkpoint", 10),
        ("checkpoint", 15),
    }


@pytest.mark.parametrize(
    ("kind", "excluded"),
    [
        (FaultKind.CRASH, {15}),
        (FaultKind.NODE_LOST, {15}),
        (FaultKind.PROCESS_STALL, {15}),
        (FaultKind.LOG_RULE, {15}),
        (FaultKind.OPERATOR, set()),
    ],
)
def test_other_failures_prefer_a_verified_step_where_there_is_one(kind, excluded):
    """A rank dies of what corrupted its last checkpoint, and the job goes back into it."""
    found = not_trusted(STATE, [told_by("node-0", 0, kind=kind)], WHOLE)
    assert {step for _, step in found} == excluded
    unverified = DurableState(job="j", verified_steps=(7,))
    assert not_trusted(unverified, [told_by("node-0", 0, kind=kind)], WHOLE) == {}


def test_jobs_that_do_not_compare_ranks_choose_as_before():
    """A job without checks loses its checkpoints for want of verification."""
    assert not_trusted(DurableState(job="j"), [told_by("n", kind=FaultKind.CRASH)], WHOLE) == {}


def test_verified_steps_are_collected_and_taken_back():
    """A step that was rejected later stays trusted."""
    report = status(scout(verified=(5, 10)), scout(verified=(10,), rejected=(15,)), None)
    assert verified_by(report, (3, 15)) == (3, 5, 10)


@pytest.mark.parametrize("outcome", ["healthy", "straggler", "not_run"])
def test_a_slow_rank_or_a_check_that_could_not_run_stops_nothing(outcome):
    """The job is restarted for want of a capture."""
    assert corruption(scout(outcome=outcome), 0) is None


def test_corruption_is_a_fault_about_whom_it_names():
    """The rank that reports is taken for the one that is corrupt."""
    fault = corruption(scout(outcome="corrupt", corrupt_ranks=(2,), why="w"), 0)
    assert (fault.kind, fault.rank, fault.scope) == (FaultKind.SDC, 2, Scope.RANK)
    tie = corruption(scout(outcome="inconclusive"), 0)
    assert (tie.rank, tie.scope) == (None, Scope.JOB)
