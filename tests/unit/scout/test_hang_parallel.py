"""Property: in a job of dp x tp x pp ranks, only the rank that stopped is ever named."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout.clock import SECOND
from scout.hang import judge
from scout.snapshot import Phase
from scout.verdict import Agree, Attributed, Basis, Inconclusive
from tests.unit.scout.parallel_job import LIMIT_NS, SHAPES, Shape, Trace

SMALL = [shape for shape in SHAPES if shape.size <= 64]
SMALLER = [shape for shape in SHAPES if shape.size <= 16]


@st.composite
def traces(draw, shapes):
    """Return a job in which one rank stops at one place of its program, and which."""
    shape = draw(st.sampled_from(shapes))
    return Trace(shape, draw(st.integers(0, shape.size - 1)), draw(st.integers(0, 10_000)))


@settings(deadline=None, max_examples=150)
@given(traces(SMALL), st.booleans(), st.randoms(use_true_random=False))
def test_the_rank_that_stopped_is_named_and_nobody_else(trace, tells_inside, random):
    """A healthy node would be replaced, and the job would hang again on the sick one."""
    seen = trace.snapshots(random, tells_inside=tells_inside)
    verdict = judge(seen, range(trace.shape.size), LIMIT_NS)
    assert isinstance(verdict, Attributed), verdict
    assert verdict.ranks == (trace.culprit,)
    assert verdict.basis is Basis.CAUSAL


@settings(deadline=None, max_examples=8)
@given(
    traces([shape for shape in SHAPES if shape.size >= 512]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_thousand_ranks_do_not_hide_the_one_that_stopped(trace, tells_inside, random):
    """What holds for eight ranks and not for a thousand is of no use to those who pay most."""
    seen = trace.snapshots(random, tells_inside=tells_inside)
    verdict = judge(seen, range(trace.shape.size), LIMIT_NS)
    assert isinstance(verdict, Attributed), verdict
    assert verdict.ranks == (trace.culprit,)


LARGEST = [shape for shape in SHAPES if shape.size == 1024]
ALL_THREE = [
    Shape(dp, tp, pp)
    for dp in (2, 4, 8, 16, 32)
    for tp in (2, 4, 8)
    for pp in (2, 4, 8, 16)
    if 128 <= dp * tp * pp <= 1024
]


@pytest.mark.parametrize("shape", [*LARGEST[:2], *ALL_THREE[::5]], ids=str)
def test_tensor_data_and_pipeline_parallelism_together_hide_nobody(shape, rng):
    """With three kinds of groups everybody waits for everybody, through two others."""
    culprit = rng.randrange(shape.size)
    trace = Trace(shape, culprit, rng.randrange(10_000))
    seen = trace.snapshots(rng, tells_inside=bool(culprit % 2))
    verdict = judge(seen, range(shape.size), LIMIT_NS)
    assert isinstance(verdict, Attributed), verdict
    assert (verdict.ranks, verdict.basis) == ((culprit,), Basis.CAUSAL)
    # Of what two nodes tell, nothing is known: whoever is named then is still the culprit.
    hidden = {rng.randrange(shape.size // 8 + 1) for _ in range(2)}
    partial = [replace(it, groups=()) if it.rank // 8 in hidden else it for it in seen]
    verdict = judge(partial, range(shape.size), LIMIT_NS)
    assert not isinstance(verdict, Attributed) or verdict.ranks == (culprit,)


@settings(deadline=None, max_examples=6)
@given(
    st.sampled_from([shape for shape in ALL_THREE if shape.size <= 512]),
    st.data(),
    st.randoms(use_true_random=False),
)
def test_in_three_dimensions_half_of_a_group_convicts_nobody(shape, data, random):
    """A tie over what the collective is would send the wrong half of a rack home."""
    culprit = data.draw(st.integers(0, shape.size - 1))
    seen = Trace(shape, culprit, data.draw(st.integers(0, 999))).snapshots(
        random, tells_inside=True
    )
    victim = data.draw(st.integers(0, shape.size - 1))
    members = shape.tensor_group(victim)
    odd = set(members[: len(members) // 2])
    split = [
        replace(
            it,
            groups=tuple(
                replace(g, fingerprint=11 + (it.rank in odd)) if g.ranks == members else g
                for g in it.groups
            ),
        )
        for it in seen
    ]
    verdict = judge(split, range(shape.size), LIMIT_NS)
    assert not isinstance(verdict, Attributed) or verdict.ranks == (culprit,)


@settings(deadline=None, max_examples=150)
@given(traces(SMALLER), st.data(), st.randoms(use_true_random=False))
def test_no_healthy_rank_is_named_on_partial_knowledge(trace, data, random):
    """Pages that cannot be read, ranks still on the move and clocks apart are everyday things."""
    ranks = st.integers(0, trace.shape.size - 1)
    moving, untold = data.draw(st.sets(ranks)), data.draw(st.sets(ranks))
    seen = [
        replace(
            it,
            progress_age_ns=0 if it.rank in moving else it.progress_age_ns,
            groups=() if it.rank in untold else it.groups,
        )
        for it in trace.snapshots(random, tells_inside=data.draw(st.booleans()))
    ]
    verdict = judge(seen, range(trace.shape.size), LIMIT_NS)
    if isinstance(verdict, Attributed):
        assert verdict.ranks == (trace.culprit,)


@settings(deadline=None, max_examples=100)
@given(traces(SMALL), st.sampled_from("TXZ"), st.randoms(use_true_random=False))
def test_a_stopped_or_dead_process_is_named_in_any_layout(trace, state, random):
    """The process that a signal stopped is the plainest culprit there is."""
    seen = trace.snapshots(random, tells_inside=True)
    seen[trace.culprit] = replace(
        seen[trace.culprit], process_state=state, heartbeat_age_ns=LIMIT_NS
    )
    verdict = judge(seen, range(trace.shape.size), LIMIT_NS)
    assert isinstance(verdict, Attributed)
    assert (verdict.ranks, verdict.basis) == ((trace.culprit,), Basis.DIRECT)


@settings(deadline=None, max_examples=100)
@given(traces(SMALL), st.randoms(use_true_random=False))
def test_a_rank_that_nobody_can_look_at_is_named_in_any_layout(trace, random):
    """A node that lost its power sends nothing; everybody else stands still for it."""
    seen = [it for it in trace.snapshots(random, tells_inside=True) if it.rank != trace.culprit]
    verdict = judge(seen, range(trace.shape.size), LIMIT_NS)
    if trace.shape.size == 2:
        assert verdict.ranks == (trace.culprit,)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (trace.culprit,)


@settings(deadline=None, max_examples=100)
@given(traces(SMALL), st.randoms(use_true_random=False))
def test_a_declared_pause_is_nobodys_fault_in_any_layout(trace, random):
    """A job whose first rank evaluates for ten minutes would be stopped every time it does."""
    seen = trace.snapshots(random, tells_inside=True)
    seen[trace.culprit] = replace(
        seen[trace.culprit],
        phase=Phase.EVALUATE,
        phase_started_age_ns=LIMIT_NS,
        phase_limit_ns=600 * SECOND,
    )
    verdict = judge(seen, range(trace.shape.size), LIMIT_NS)
    assert isinstance(verdict, Agree)
    assert f"rank {trace.culprit}, which is evaluating" in verdict.why


@settings(deadline=None, max_examples=60)
@given(traces(SMALLER), st.data(), st.randoms(use_true_random=False))
def test_nobody_dissents_from_a_collective_without_a_strict_majority(trace, data, random):
    """Half of a group would be convicted by the other half, and either may be the sick one."""
    seen = trace.snapshots(random, tells_inside=True)
    names = st.sampled_from([11, 22, 33])
    seen = [
        replace(it, groups=tuple(replace(g, fingerprint=data.draw(names)) for g in it.groups))
        for it in seen
    ]
    verdict = judge(seen, range(trace.shape.size), LIMIT_NS)
    if not (isinstance(verdict, Attributed) and verdict.basis is Basis.MAJORITY):
        return
    for rank in verdict.ranks:
        assert any(_outvoted(rank, group, seen) for group in seen[rank].groups)


def _outvoted(rank, mine, seen) -> bool:
    """True when a strict majority of a group is in one collective at this rank's count."""
    told = [
        group.fingerprint
        for other in mine.ranks
        for group in seen[other].groups
        if (group.name, group.ranks, group.seq) == (mine.name, mine.ranks, mine.seq)
    ]
    most = max(set(told), key=told.count)
    return most != mine.fingerprint and 2 * told.count(most) > len(mine.ranks)


@pytest.mark.parametrize("tells_inside", [True, False])
def test_a_tensor_parallel_peer_of_the_culprit_is_not_named(tells_inside, rng):
    """Both stand at the same count of the whole job's group; one of them only waits."""
    stop_at = 1  # after its batch, before its first forward pass
    seen = Trace(Shape(dp=4, tp=2, pp=1), 2, stop_at).snapshots(rng, tells_inside=tells_inside)
    verdict = judge(seen, range(8), LIMIT_NS)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (2,)
    assert "group tp, in which rank 3 waits" in verdict.why


def test_a_circle_is_told_and_nobody_named(rng):
    """Two groups entered in another order lock each other; no rank of them is sick."""
    shape = Shape(dp=2, tp=2, pp=1)
    seen = Trace(shape, 0, 1).snapshots(rng, tells_inside=True)
    # Rank 0 went to its data group first, rank 1 to the tensor group; each lacks the other.
    crossed = [
        replace(
            it,
            groups=tuple(
                replace(g, seq=5 if (g.name == "dp") == (it.rank in (0, 3)) else 4)
                for g in it.groups
                if g.name in ("dp", "tp")
            ),
        )
        for it in seen
    ]
    crossed = [
        replace(it, groups=tuple(replace(g, inside=g.seq == 5) for g in it.groups))
        for it in crossed
    ]
    verdict = judge(crossed, range(4), LIMIT_NS)
    assert isinstance(verdict, Inconclusive)
    assert verdict.why.startswith("ranks wait for one another in a circle: rank 0 waits for rank 2")


@pytest.fixture
def rng():
    """Return dice that fall alike every time."""
    import random  # noqa: PLC0415 - tests only

    return random.Random(5)


def test_the_properties_are_about_verdicts_and_not_about_silence(rng):
    """A judgement that always said 'inconclusive' would never name a healthy rank either."""
    named = {"whole": 0, "partial": 0}
    for number in range(200):
        shape = SMALLER[number % len(SMALLER)]
        trace = Trace(shape, rng.randrange(shape.size), rng.randrange(10_000))
        seen = trace.snapshots(rng, tells_inside=number % 2 == 0)
        hidden = [replace(it, groups=()) if rng.random() < 0.15 else it for it in seen]
        for kind, looked in (("whole", seen), ("partial", hidden)):
            verdict = judge(looked, range(shape.size), LIMIT_NS)
            if isinstance(verdict, Attributed):
                assert verdict.ranks == (trace.culprit,)
                named[kind] += 1
    assert named["whole"] == 200
    assert named["partial"] > 60


@pytest.mark.parametrize("tells_inside", [True, False])
def test_a_node_that_answers_late_is_not_blamed_for_what_the_others_prove(tells_inside, rng):
    """Its sidecar was busy for a second; the rank that hangs is another one's."""
    trace = Trace(Shape(dp=8, tp=1, pp=1), 3, 3)
    seen = [it for it in trace.snapshots(rng, tells_inside=tells_inside) if it.rank != 6]
    verdict = judge(seen, range(8), LIMIT_NS)
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (3,)
