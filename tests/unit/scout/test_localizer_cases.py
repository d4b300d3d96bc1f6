"""Cases from the field, by the number that they have in our collection of them."""

import struct
from dataclasses import replace

import pytest

from scout.clock import SECOND
from scout.consensus import exact
from scout.hang import judge
from scout.mismatch import Running, judge_messages, parse
from scout.snapshot import GroupPosition, Phase, RankSnapshot
from scout.verdict import Agree, Attributed, Inconclusive

FULL = (
    "CollectiveFingerPrint(SequenceNumber={seq}, OpType={op}, TensorShape=[{shape}], "
    "TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, "
    "layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), "
    "memory_format=(nullopt)))"
)


def mismatch(one, other):
    return (
        f"RuntimeError: Detected mismatch between collectives on ranks. Rank {one[0]} is running "
        f"collective: {one[1]}, but Rank {other[0]} is running collective: {other[1]}."
    )


GATHER = FULL.format(seq=101, op="ALLGATHER", shape=4096)
MALFORMED = "CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)"


def test_case_b12_a_malformed_print_is_read_all_the_same():
    """The one rank that is in the wrong collective prints it without a comma."""
    told = parse(mismatch((4, GATHER), (7, MALFORMED)))
    assert told == {
        4: Running(seq=101, op="ALLGATHER", shape="[4096]", dtype="BFloat16"),
        7: Running(seq=0, op="REDUCE"),
    }


def test_case_b12_one_message_about_two_ranks_convicts_neither():
    """Each of the two says the same of the other."""
    message = mismatch((4, GATHER), (7, MALFORMED))
    assert isinstance(judge_messages([message], range(8)), Inconclusive)


def test_case_b12_several_messages_outvote_the_one_that_deviates():
    """What no message tells alone, all of them tell together."""
    messages = [mismatch((rank, GATHER), (7, MALFORMED)) for rank in range(5)]
    verdict = judge_messages(messages, range(8))
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (7,)


def test_a_print_without_a_count_is_read_too():
    """Older releases of torch do not count."""
    told = parse(mismatch((2, "CollectiveFingerPrint(OpType=REDUCE)"), (0, GATHER)))
    assert told[2] == Running(seq=None, op="REDUCE")


def test_other_lines_are_no_messages_of_it():
    """Any line with a rank in it would be a vote."""
    assert judge_messages(["Rank 3 is running", "RuntimeError: x"], range(8)) is None


def test_case_c33_two_replicas_that_disagree_convict_nobody():
    """One of two would be thrown out by the toss of a coin."""
    assert isinstance(exact({0: "a", 1: "b"}, (0, 1), "signature"), Inconclusive)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([float("nan")] * 4, None),
        ([1.0, 1.0, 1.0, float("nan")], (3,)),
        ([0.0, -0.0, 0.0, 0.0], (1,)),
    ],
)
def test_case_c36_values_are_compared_by_their_bits(values, named):
    """NaN equals nothing, itself included: every replica of a diverged model would dissent."""
    votes = {rank: struct.pack("<d", value) for rank, value in enumerate(values)}
    verdict = exact(votes, range(4), "loss")
    if named is None:
        assert isinstance(verdict, Agree)
    else:
        assert isinstance(verdict, Attributed)
        assert verdict.ranks == named


def test_case_c43_a_frozen_sidecar_beside_ranks_that_train_is_not_known_and_no_fault():
    """A job would be restarted because the one who watches it fell asleep."""
    group = GroupPosition(name="w", ranks=tuple(range(8)), seq=50, op="all_reduce")
    training = [
        RankSnapshot(
            rank=rank,
            node=f"n{rank}",
            local_rank=0,
            step=9,
            phase=Phase.FORWARD,
            progress_age_ns=SECOND,
            heartbeat_age_ns=0,
            groups=(group,),
        )
        for rank in range(8)
        if rank != 5
    ]
    verdict = judge(training, range(8), 30 * SECOND)
    assert isinstance(verdict, Inconclusive)
    assert verdict.why == "every rank that answered makes progress"
    assert verdict.evidence[0].ranks == (5,)
    memory = replace(training[0], rank=5, node="n5", seen_age_ns=90 * SECOND)
    assert isinstance(judge([*training, memory], range(8), 30 * SECOND), (Agree, Inconclusive))
