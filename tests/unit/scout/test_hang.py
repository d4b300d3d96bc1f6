from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout.clock import SECOND
from scout.hang import Phase, RankSnapshot, judge
from scout.verdict import Agree, Attributed, Basis, Inconclusive

STALL_NS = 4 * SECOND


def waiting(rank, **changed):
    """Return a healthy rank inside a collective that does not complete."""
    healthy = RankSnapshot(
        rank=rank,
        node=f"node-{rank}",
        local_rank=0,
        step=12,
        phase=Phase.OPTIMIZER,
        collective_seq=80,
        progress_age_ns=5 * SECOND,
        heartbeat_age_ns=SECOND // 20,
        process_state="S",
    )
    return replace(healthy, **changed)


CULPRITS = {
    "stopped": {"process_state": "T", "heartbeat_age_ns": 5 * SECOND},
    "gone": {"process_state": "X", "heartbeat_age_ns": 5 * SECOND},
    "stuck in the kernel": {"process_state": "D", "collective_seq": 79},
    "holding the interpreter": {"heartbeat_age_ns": 5 * SECOND},
    "late for the collective": {"collective_seq": 79},
    "late before its first step": {"collective_seq": 3, "step": None, "progress_age_ns": None},
}


@pytest.mark.parametrize("kind", CULPRITS)
@pytest.mark.parametrize("culprit", range(4))
def test_a_single_culprit_is_named(kind, culprit):
    """The wrong node would be replaced, and the job would hang again."""
    ranks = [waiting(rank, **(CULPRITS[kind] if rank == culprit else {})) for rank in range(4)]
    verdict = judge(ranks, range(4), STALL_NS)
    assert isinstance(verdict, Attributed), verdict
    assert verdict.ranks == (culprit,)


@pytest.mark.parametrize("kind", ["stopped", "late for the collective"])
def test_of_two_ranks_the_one_waited_for_is_named(kind):
    """Causes need no majority; a job of two would never be told what broke."""
    verdict = judge([waiting(0), waiting(1, **CULPRITS[kind])], (0, 1), STALL_NS)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (1,)


def test_a_rank_that_nobody_could_look_at_is_named():
    """A dead node sends no snapshot; its silence would hide it."""
    verdict = judge([waiting(0), waiting(1), waiting(3)], range(4), STALL_NS)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (2,)
    assert verdict.basis is Basis.DIRECT


def test_a_rank_without_an_answer_is_not_named_while_the_others_go_on():
    """A lost packet would cost a healthy job its node."""
    moving = [waiting(rank, progress_age_ns=SECOND) for rank in range(3)]
    assert isinstance(judge(moving, range(4), STALL_NS), Inconclusive)


def test_most_ranks_missing_convicts_none_of_them():
    """The observer's own cut network would evict the whole fleet."""
    verdict = judge([waiting(0)], range(4), STALL_NS)
    assert isinstance(verdict, Inconclusive)
    assert "3 of 4" in verdict.why


def test_progress_everywhere_is_agreement():
    """A healthy job would be stopped for being asked about."""
    moving = [waiting(rank, progress_age_ns=SECOND) for rank in range(4)]
    assert isinstance(judge(moving, range(4), STALL_NS), Agree)


def test_the_same_position_everywhere_convicts_nobody():
    """A switch or a file server that stops everyone would be blamed on one rank."""
    verdict = judge([waiting(rank) for rank in range(4)], range(4), STALL_NS)
    assert isinstance(verdict, Inconclusive)
    assert verdict.why.startswith("every rank stopped at the same position (step 12")


def test_half_of_the_ranks_behind_convicts_nobody():
    """A split network would be blamed on one of its halves."""
    ranks = [waiting(rank, collective_seq=79 if rank < 2 else 80) for rank in range(4)]
    verdict = judge(ranks, range(4), STALL_NS)
    assert isinstance(verdict, Inconclusive)
    assert verdict.why.startswith("2 of 4 ranks share the lowest position")


def test_two_of_five_behind_are_both_named():
    """One of two culprits would stay in the job."""
    ranks = [waiting(rank, collective_seq=79 if rank < 2 else 80) for rank in range(5)]
    verdict = judge(ranks, range(5), STALL_NS)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (0, 1)
    assert verdict.basis is Basis.CAUSAL


def test_an_unknown_position_orders_nobody():
    """The rank that is behind may be waiting for the one that tells nothing."""
    ranks = [waiting(0), waiting(1, collective_seq=79), waiting(2, collective_seq=None, step=None)]
    assert isinstance(judge(ranks, range(3), STALL_NS), Inconclusive)


def test_a_rank_that_waits_in_the_kernel_but_is_ahead_is_not_named():
    """A disk access of one moment would convict an innocent rank."""
    ranks = [waiting(0, process_state="D"), waiting(1), waiting(2, collective_seq=79)]
    verdict = judge(ranks, range(3), STALL_NS)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (2,)


def test_a_rank_without_any_beat_is_not_called_silent():
    """A script that could not open its page would be convicted for it."""
    ranks = [waiting(0, heartbeat_age_ns=None), *(waiting(rank) for rank in (1, 2, 3))]
    assert isinstance(judge(ranks, range(4), STALL_NS), Inconclusive)


def test_a_checkpoint_in_progress_is_part_of_the_evidence():
    """The reader would look for a network fault while a file server is slow."""
    behind = waiting(1, collective_seq=79, phase=Phase.CHECKPOINT)
    verdict = judge([waiting(0), behind, waiting(2)], range(3), STALL_NS)
    assert isinstance(verdict, Attributed)
    assert "last seen in checkpoint" in verdict.why


AGES = st.sampled_from([None, 0, SECOND, 3 * SECOND, 9 * SECOND])
SNAPSHOTS = st.builds(
    RankSnapshot,
    rank=st.integers(0, 7),
    node=st.just("n"),
    local_rank=st.just(0),
    step=st.one_of(st.none(), st.integers(0, 3)),
    phase=st.sampled_from(Phase),
    collective_seq=st.one_of(st.none(), st.integers(0, 3)),
    progress_age_ns=AGES,
    heartbeat_age_ns=AGES,
    process_state=st.sampled_from([None, "S", "R", "T", "D", "Z", "X"]),
)
JOBS = st.lists(SNAPSHOTS, unique_by=lambda it: it.rank, max_size=8)


@given(JOBS, st.integers(1, 8).map(range))
def test_a_majority_is_never_named(ranks, electorate):
    """Most of a job would be thrown away on one observer's word."""
    verdict = judge(ranks, electorate, STALL_NS)
    if isinstance(verdict, Attributed):
        assert set(verdict.ranks) <= set(electorate)
        assert len(electorate) == 1 or 2 * len(verdict.ranks) <= len(electorate)


@given(JOBS, st.integers(1, 8).map(range), st.randoms())
def test_the_order_of_snapshots_does_not_matter(ranks, electorate, random):
    """Two coordinators would come to two verdicts."""
    shuffled, members = list(ranks), list(electorate)
    random.shuffle(shuffled)
    random.shuffle(members)
    assert judge(shuffled, members, STALL_NS) == judge(ranks, electorate, STALL_NS)


@given(
    st.integers(2, 12),
    st.sampled_from(sorted(CULPRITS)),
    st.randoms(),
)
def test_only_the_culprit_is_named_whatever_the_jitter(size, kind, random):
    """Ages differ by up to a step between ranks; a healthy rank would be named for it."""
    culprit = random.randrange(size)
    ranks = [
        waiting(
            rank,
            progress_age_ns=random.randrange(STALL_NS, STALL_NS + SECOND),
            heartbeat_age_ns=random.randrange(SECOND // 2),
            process_state=random.choice("SR"),
        )
        for rank in range(size)
    ]
    ranks[culprit] = replace(ranks[culprit], **CULPRITS[kind])
    verdict = judge(ranks, range(size), STALL_NS)
    if kind == "holding the interpreter" and size == 2:
        assert isinstance(verdict, Inconclusive)
    else:
        assert isinstance(verdict, Attributed)
        assert verdict.ranks == (culprit,)
