"""Messages that are too large for a frame: what goes first, and what never goes."""

from dataclasses import replace

from scout.hang import RankSnapshot
from sidecar.api import (
    UPWARD,
    AgentState,
    CheckpointConfirmation,
    EvidenceReport,
    FaultKind,
    FaultReport,
    Hello,
    ProgressReport,
    RankStatus,
    Scope,
    StatusReport,
)
from sidecar.codec import decode, encode
from sidecar.fitting import FAULTS_KEPT, LEFT_OUT, fitted
from sidecar.rank_evidence import RankEvidence, ThreadStack

LONG = "x" * 5_000


def a_fault(number: int) -> FaultReport:
    return FaultReport(
        fault_id=number,
        kind=FaultKind.CRASH,
        scope=Scope.RANK,
        reason=LONG,
        message=LONG,
        age_ns=0,
        rank=number,
        evidence=(LONG,),
    )


def a_status(ranks: int = 4) -> StatusReport:
    return StatusReport(
        node="n",
        incarnation="i",
        state=AgentState.FAULTED,
        generation=7,
        stopped_generation=6,
        topology_version=3,
        rendezvous_port=1,
        message=LONG,
        faults=tuple(a_fault(number) for number in range(20)),
        ranks=tuple(
            RankStatus(rank=it, local_rank=it, pid=it, step=41, labels={"dp": LONG})
            for it in range(ranks)
        ),
        checkpoints=tuple(
            CheckpointConfirmation(prefix="model", step=step, ranks=(0, 1), paths=(LONG,))
            for step in range(50)
        ),
    )


def test_a_message_that_fits_is_sent_as_it_is():
    """What is left out without need is missed by whoever looks for it."""
    told = fitted(a_status())
    assert told is not None
    assert told.left_out == ()
    assert decode(told.data, UPWARD) == a_status()


def test_less_and_less_is_told_until_it_fits_and_the_core_of_it_always_stays():
    """A node that is not heard is lost: its workers are stopped for the length of a label."""
    whole = len(fitted(a_status()).data)
    said_before = ()
    for limit in range(whole - 1, 17_000, -4_000):
        told = fitted(a_status(), limit)
        assert told is not None
        assert len(told.data) <= limit
        assert told.left_out[: len(said_before)] == said_before
        said_before = told.left_out
        heard = decode(told.data, UPWARD)
        assert (heard.node, heard.state, heard.generation) == ("n", AgentState.FAULTED, 7)
        assert [rank.step for rank in heard.ranks] == [41, 41, 41, 41]
        assert heard.checkpoints[-1].step == 49
        assert heard.faults[0].fault_id == 0
    assert said_before[0] == "ranks' labels"
    heard = decode(fitted(a_status(), 17_000).data, UPWARD)
    assert len(heard.faults) == FAULTS_KEPT
    assert fitted(a_status(), 100) is None


def test_what_an_inspection_shows_is_shortened_and_says_so():
    """The verdict needs the positions; the last words of a thousand ranks it does not."""
    ranks = tuple(RankSnapshot(rank=it, node="n", local_rank=it, step=5) for it in range(3))
    tails = {str(it): tuple(LONG for _ in range(20)) for it in range(3)}
    report = ProgressReport(round_id=1, node="n", ranks=ranks, log_tails=tails)
    heard = decode(fitted(report, 10_000).data, UPWARD)
    assert [rank.step for rank in heard.ranks] == [5, 5, 5]
    assert all(len(lines) == 3 for lines in heard.log_tails.values())
    bare = len(encode(replace(report, log_tails={})))
    assert decode(fitted(report, bare).data, UPWARD).log_tails == {}

    stack = ThreadStack(name="MainThread", main=True, frames=("a (b:1)",))
    other = replace(stack, name="other", main=False, frames=(LONG,))
    seen = {str(it): RankEvidence(threads=(stack, other)) for it in range(3)}
    evidence = EvidenceReport(round_id=1, node="n", evidence=seen)
    heard = decode(fitted(evidence, 3_000).data, UPWARD)
    assert all(it.threads == (stack,) for it in heard.evidence.values())
    assert all(it.missing == (LEFT_OUT,) for it in heard.evidence.values())
    least = decode(fitted(evidence, len(fitted(evidence, 3_000).data) - 1).data, UPWARD)
    assert not any(it.threads for it in least.evidence.values())
    assert list(least.evidence) == ["0", "1", "2"]


def test_an_introduction_is_never_cut():
    """Half an introduction would present another node."""
    hello = Hello(
        protocol=1,
        agent_version="1",
        job="j",
        node="n",
        incarnation="i",
        host="h",
        http_port=1,
        nproc_per_node=1,
        spare=False,
        labels={"rack": LONG},
    )
    assert fitted(hello).left_out == ()
    assert fitted(hello, 1_000) is None
