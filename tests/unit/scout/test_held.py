"""A process that is held is named within seconds, and one that only looks like it is not."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout.clock import SECOND, Instant
from scout.hang import judge
from scout.held import ASLEEP_NS_MIN, STOPPED_NS_MIN, HeldWatch, is_held
from scout.snapshot import GroupPosition, Phase, RankSnapshot
from scout.verdict import Agree, Attributed, Basis
from tests.unit.scout.parallel_job import SHAPES, Trace

LIMIT_NS = 300 * SECOND
EVERYBODY = (0, 1, 2, 3)
SMALL = [shape for shape in SHAPES if 3 <= shape.size <= 64]


def at(seq, *, inside=True, ranks=EVERYBODY, name="world"):
    return GroupPosition(name=name, ranks=ranks, seq=seq, op="all_reduce", inside=inside)


def waits(rank, *groups, **changed):
    """Return a rank that has stood still for two seconds inside its collective."""
    seen = RankSnapshot(
        rank=rank,
        node=f"node-{rank}",
        local_rank=0,
        step=9,
        phase=Phase.COLLECTIVE,
        progress_age_ns=2 * SECOND,
        heartbeat_age_ns=SECOND // 10,
        process_state="S",
        groups=groups or (at(7),),
        stall_limit_ns=LIMIT_NS,
    )
    return replace(seen, **changed)


def held(rank, state="T", for_s=2.5, *groups, **changed):
    """Return a rank whose process is held in front of what the others wait in."""
    groups = groups or (at(6, inside=False),)
    fields = {"phase": Phase.FORWARD, "held_ns": int(for_s * SECOND)} | changed
    return waits(rank, *groups, process_state=state, **fields)


def judged(*ranks):
    return judge(ranks, EVERYBODY, LIMIT_NS)


@pytest.mark.parametrize(("state", "for_s"), [("T", 2.5), ("D", 5.5)])
def test_a_held_process_that_others_wait_for_is_named_long_before_its_limit(state, for_s):
    """Five minutes of a thousand GPUs for what one look could tell."""
    verdict = judged(waits(0), waits(1), held(2, state, for_s), waits(3))
    assert isinstance(verdict, Attributed)
    assert (verdict.ranks, verdict.basis) == ((2,), Basis.DIRECT)
    assert "rank 0 waits for it" in verdict.why
    assert [it.ranks for it in verdict.evidence] == [(2,), (0,), (1,), (3,)]


@pytest.mark.parametrize(
    "innocent",
    [
        held(2, "T", 1.5),  # a profiler's stop
        held(2, "t", 30.0, held_ns=None),  # a debugger's stop is not counted by the watch
        held(2, "D", 3.0),  # a disk that retries
        held(2, "D", 30.0, phase=Phase.DATA),
        held(2, "D", 30.0, phase=Phase.CHECKPOINT),
        held(2, "D", 30.0, phase=Phase.UNKNOWN),
        held(2, "D", 30.0, phase=Phase.COMPILE, phase_limit_ns=600 * SECOND),
        held(2, "D", 30.0, held_ns=None),  # one of many sleeps, or a frozen control group
        held(2, "S", 30.0),
    ],
)
def test_what_is_a_moment_or_meant_convicts_nobody(innocent):
    """A restart of the whole job is a high price for somebody's glance at one process."""
    assert isinstance(judged(waits(0), waits(1), innocent, waits(3)), Agree)


def test_a_held_process_for_which_nobody_waits_has_the_time_of_its_limit():
    """Before the others come to where it is missing, it costs nobody anything."""
    moving = [waits(rank, progress_age_ns=SECOND // 2) for rank in (0, 1, 3)]
    assert isinstance(judged(*moving, held(2)), Agree)
    behind = [waits(rank, at(5), progress_age_ns=2 * SECOND) for rank in (0, 1, 3)]
    assert isinstance(judged(*behind, held(2)), Agree)


def test_a_process_held_inside_the_same_collective_is_named():
    """It has entered like all the others, and its share of the sum never comes."""
    verdict = judged(waits(0), waits(1), held(2, "T", 2.5, at(7)), waits(3))
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (2,)


@pytest.mark.parametrize(("usual", "is_named"), [(SECOND // 2, True), (2 * SECOND, False)])
def test_peers_that_wait_in_cpp_count_once_they_are_silent_for_longer_than_ever(usual, is_named):
    """DDP's reducer waits where no hook sees it; a long step looks the same from outside."""
    same = at(7, inside=False)
    peers = [waits(rank, same, phase=Phase.BACKWARD, usual_silence_ns=usual) for rank in (0, 1, 3)]
    verdict = judged(*peers, held(2, "T", 2.5, same))
    assert isinstance(verdict, Attributed) is is_named


def test_half_of_the_job_held_is_somebody_s_intention():
    """Whoever stops a whole job to look at it does not want it restarted."""
    assert isinstance(judged(waits(0), held(1), held(2), held(3)), Agree)
    two = judge([held(0), waits(1, at(7, ranks=(0, 1)))], (0, 1), LIMIT_NS)
    assert isinstance(two, Agree)  # of another group: nobody is known to wait
    pair = (0, 1)
    first = held(0, "T", 2.5, at(6, inside=False, ranks=pair))
    assert isinstance(judge([first, waits(1, at(7, ranks=pair))], pair, LIMIT_NS), Attributed)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SMALL),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.randoms(use_true_random=False),
)
def test_in_any_layout_only_the_held_rank_is_named(shape, culprit, stop_at, random):
    """Its peers of every group stand just as still."""
    trace = Trace(shape, culprit % shape.size, stop_at)
    seen = [
        replace(it, progress_age_ns=2 * SECOND, stall_limit_ns=LIMIT_NS)
        for it in trace.snapshots(random, tells_inside=True)
    ]
    culprit = trace.culprit
    seen[culprit] = replace(seen[culprit], process_state="T", held_ns=3 * SECOND)
    verdict = judge(seen, range(shape.size), LIMIT_NS)
    assert isinstance(verdict, Attributed)
    assert (verdict.ranks, verdict.basis) == ((culprit,), Basis.DIRECT)


def test_the_watch_counts_one_stop_and_one_sleep_at_a_time():
    """Ten short sleeps, each seen once, would be taken for one that lasts."""
    watch, second = HeldWatch(), SECOND
    looks = [
        ("S", None, None),
        ("T", None, 0),
        ("T", None, second),
        ("t", None, None),
        ("T", None, 0),
        ("D", 5, 0),
        ("D", 5, second),
        ("D", 6, 0),
        ("D", None, None),
        ("R", None, None),
    ]
    for number, (state, sleeps, expected) in enumerate(looks):
        assert watch.observe(state, sleeps, Instant(number * second)) == expected, number
    assert not is_held(waits(1))
    assert is_held(held(1, "T", STOPPED_NS_MIN / SECOND))
    assert is_held(held(1, "D", ASLEEP_NS_MIN / SECOND))
