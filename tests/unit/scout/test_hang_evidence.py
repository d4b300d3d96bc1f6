"""What each kind of evidence may and may not say."""

from dataclasses import replace

import pytest

from scout.clock import SECOND
from scout.hang import judge
from scout.snapshot import GroupPosition, Phase, RankSnapshot
from scout.stages import StageThresholds, StageWatch
from scout.verdict import Agree, Attributed, Basis, Inconclusive

LIMIT_NS = 10 * SECOND
EVERYBODY = (0, 1, 2, 3)


def at(seq, *, op="all_reduce", print_=7, inside=True, ranks=EVERYBODY, name="world"):
    return GroupPosition(name=name, ranks=ranks, seq=seq, op=op, fingerprint=print_, inside=inside)


def rank(number, *groups, **changed):
    """Return a rank that has been silent for longer than the limit, and beats."""
    seen = RankSnapshot(
        rank=number,
        node=f"node-{number}",
        local_rank=0,
        step=40,
        phase=Phase.BACKWARD,
        progress_age_ns=LIMIT_NS + SECOND,
        phase_started_age_ns=LIMIT_NS + SECOND,
        heartbeat_age_ns=SECOND // 10,
        process_state="S",
        groups=groups,
    )
    return replace(seen, **changed)


def judged(*ranks, electorate=EVERYBODY):
    return judge(ranks, electorate, LIMIT_NS)


# --- symmetric ------------------------------------------------------------------------------


def test_one_rank_in_another_collective_is_named():
    """Everybody waits inside something; only the metadata says who is in the wrong place."""
    other = at(9, op="all_gather", print_=8)
    verdict = judged(rank(0, at(9)), rank(1, other), rank(2, at(9)), rank(3, at(9)))
    assert isinstance(verdict, Attributed)
    assert (verdict.ranks, verdict.basis) == ((1,), Basis.MAJORITY)
    assert "ranks 0, 2, 3 are in all_reduce, rank 1 in all_gather" in verdict.why


def test_one_rank_with_another_shape_is_named():
    """The operation is the same by name, and the buffers do not fit."""
    verdict = judged(*(rank(n, at(9, print_=8 if n == 2 else 7)) for n in EVERYBODY))
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (2,)
    assert "another kind, type or shape" in verdict.why


@pytest.mark.parametrize("prints", [(7, 8), (7, 7, 8, 8), (7, 7, 8, 9)])
def test_a_split_over_what_to_do_names_nobody(prints):
    """Whichever half is called wrong, the other may be."""
    members = tuple(range(len(prints)))
    ranks = [rank(n, at(9, print_=prints[n], ranks=members)) for n in members]
    verdict = judge(ranks, members, LIMIT_NS)
    assert isinstance(verdict, Inconclusive)
    assert "no strict majority" in verdict.why


def test_members_that_tell_nothing_count_against_a_majority():
    """Two of five that agree are no majority, however few contradict them."""
    members = tuple(range(5))
    prints = (7, 7, 8, 0, 0)
    ranks = [rank(n, at(9, print_=prints[n], ranks=members)) for n in members]
    assert isinstance(judge(ranks, members, LIMIT_NS), Inconclusive)


def test_another_collective_of_a_rank_that_moves_on_is_no_desync():
    """It was seen between two looks, and its count is of another moment."""
    moving = rank(1, at(9, print_=8), progress_age_ns=0)
    verdict = judged(rank(0, at(9)), moving, rank(2, at(9)), rank(3, at(9)))
    assert isinstance(verdict, Inconclusive)


# --- causal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_the_one_that_is_waited_for_is_named(culprit):
    """Causes need no majority: the smallest job has a culprit too."""
    pair = (0, 1)
    ranks = [
        rank(n, at(8, ranks=pair, inside=False) if n == culprit else at(9, ranks=pair))
        for n in pair
    ]
    verdict = judge(ranks, pair, LIMIT_NS)
    assert isinstance(verdict, Attributed)
    assert (verdict.ranks, verdict.basis) == ((culprit,), Basis.CAUSAL)


def late(number, **changed):
    return rank(number, at(8, inside=False), **changed)


WAITING = [rank(n, at(9)) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("phase", "said"), [(Phase.DATA, "data"), (Phase.CHECKPOINT, "checkpoint")]
)
def test_the_stage_of_the_culprit_is_said(phase, said):
    """The reader would look at the network while a file server is slow."""
    verdict = judged(late(0, phase=phase), *WAITING)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (0,)
    assert f"last seen in {said}" in verdict.why


def test_a_phase_that_may_last_is_waited_for():
    """Rank 0 evaluates for minutes, and all others stand in a barrier, in every healthy job."""
    busy = {"phase": Phase.EVALUATE, "phase_limit_ns": 600 * SECOND}
    verdict = judged(late(0, **busy), *WAITING)
    assert isinstance(verdict, Agree)
    assert verdict.why == (
        "the others wait for rank 0, which is evaluating, which was declared to take up to 600 s"
    )


def test_a_phase_that_outlasts_its_declaration_is_a_fault():
    """A declared pause would hide a hang for ever."""
    busy = {"phase": Phase.EVALUATE, "phase_limit_ns": 2 * SECOND}
    verdict = judged(late(0, **busy), *WAITING)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (0,)


def test_a_rank_within_what_it_usually_takes_is_waited_for():
    """The others' short limits would convict the one that has a longer one for good reason."""
    slow = late(0, progress_age_ns=12 * SECOND, stall_limit_ns=60 * SECOND)
    verdict = judged(slow, *WAITING)
    assert isinstance(verdict, Agree)
    assert "and may take 60.0 s" in verdict.why


def test_a_rank_beyond_what_it_usually_takes_is_named_before_the_jobs_limit():
    """What a job's own history says a hang is would have to wait for a guess made beforehand."""
    ranks = [
        replace(it, stall_limit_ns=3 * SECOND, progress_age_ns=4 * SECOND)
        for it in (late(0), *WAITING)
    ]
    verdict = judged(*ranks)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (0,)


def test_a_rank_whose_interpreter_is_held_is_named_though_its_count_is_old():
    """Its page stands still with it, so its place proves nothing; its silence does."""
    verdict = judged(late(0, heartbeat_age_ns=LIMIT_NS), *WAITING)
    assert isinstance(verdict, Attributed)
    assert (verdict.ranks, verdict.basis) == ((0,), Basis.MAJORITY)


def test_a_rank_that_may_wait_for_one_of_unknown_place_is_not_named():
    """The one that nobody can see may be the one that everybody waits for."""
    pair = at(3, name="tp", ranks=(0, 1), inside=False)
    seems_last = rank(0, at(8, inside=False), pair)
    verdict = judged(seems_last, rank(1, step=None), *WAITING[1:])
    assert isinstance(verdict, Inconclusive)


def test_a_rank_that_others_have_left_behind_waits_for_nobody_there():
    """One page that cannot be read would protect every culprit of the job."""
    verdict = judged(late(0), rank(1, step=None), *WAITING[1:])
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (0,)


def test_everybody_inside_the_same_collective_is_a_matter_of_the_network():
    """One rank would be replaced while a switch is down."""
    verdict = judged(*(rank(n, at(9)) for n in EVERYBODY))
    assert isinstance(verdict, Inconclusive)
    assert "look at the network" in verdict.why


def test_everybody_in_a_checkpoint_is_a_matter_of_the_storage():
    """One rank would be replaced while a file server is down."""
    verdict = judged(*(rank(n, at(9, inside=False), phase=Phase.CHECKPOINT) for n in EVERYBODY))
    assert isinstance(verdict, Inconclusive)
    assert "such as storage" in verdict.why


# --- direct ---------------------------------------------------------------------------------


def test_a_silent_rank_is_named_with_what_was_last_seen_of_it():
    """A dead node would be named without a hint where its training stood."""
    memory = rank(2, at(8, inside=False), seen_age_ns=4 * SECOND)
    verdict = judged(rank(0, at(9)), rank(1, at(9)), memory, rank(3, at(9)))
    assert isinstance(verdict, Attributed)
    assert (verdict.ranks, verdict.basis) == ((2,), Basis.DIRECT)
    assert "last seen 4.0 s ago at step 40, last seen in backward" in verdict.why


# --- stages ---------------------------------------------------------------------------------


def fetching(number, seconds, phase=Phase.DATA):
    return rank(
        number,
        at(9, inside=False),
        phase=phase,
        phase_started_age_ns=seconds * SECOND,
        progress_age_ns=seconds * SECOND,
    )


def observe(watch, *spent, stage=Phase.DATA):
    ranks = [fetching(n, spent[n], stage if spent[n] else Phase.FORWARD) for n in range(len(spent))]
    return watch.observe(ranks, range(len(spent)))


def test_a_slow_loader_is_named_once_it_stays_slow():
    """One long batch is no fault, and a loader that is stuck for good is one."""
    watch = StageWatch(thresholds=StageThresholds(rounds=2))
    assert observe(watch, 0, 11, 0, 0) is None
    verdict = observe(watch, 0, 12, 0, 0)
    assert verdict is not None
    assert (verdict.ranks, verdict.basis) == ((1,), Basis.MAJORITY)
    assert verdict.why == "rank 1 has been fetching data for 12.0 s, most of 4 ranks are not"


@pytest.mark.parametrize(
    "rounds",
    [
        [(0, 9, 0, 0)] * 3,  # below the absolute time
        [(9, 12, 9, 9)] * 3,  # below twice the usual
        [(0, 12, 0, 0), (0, 1, 0, 0), (0, 12, 0, 0)],  # not in rounds that follow each other
        [(12, 12, 0, 0)] * 3,  # half of the job: what they share is the cause
    ],
)
def test_each_threshold_of_a_stage_forgives(rounds):
    """A loader that is merely slow, slow for all, or slow once, would cost a restart."""
    watch = StageWatch()
    assert [observe(watch, *spent) for spent in rounds] == [None] * len(rounds)


def test_checkpoints_have_a_time_of_their_own():
    """Writing a checkpoint takes longer than fetching a batch."""
    watch = StageWatch(thresholds=StageThresholds(rounds=1))
    assert observe(watch, 0, 59, 0, 0, stage=Phase.CHECKPOINT) is None
    assert observe(watch, 0, 61, 0, 0, stage=Phase.CHECKPOINT).ranks == (1,)


def test_a_rank_whose_observer_died_long_ago_is_not_named_for_it():
    """An observer's death would convict a healthy rank at the next stall of another."""
    memory = rank(2, at(5, inside=False), seen_age_ns=600 * SECOND)
    verdict = judged(late(0), WAITING[0], memory, WAITING[2])
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (0,)


def test_a_silent_observer_beside_a_job_that_goes_on_names_nobody():
    """A node would be taken out of a healthy job because a helper on it froze."""
    memory = rank(2, at(5, inside=False), seen_age_ns=600 * SECOND)
    moving = [rank(n, at(9, inside=False), progress_age_ns=0) for n in (0, 1, 3)]
    assert not isinstance(judged(*moving, memory), Attributed)
