from hypothesis import given
from hypothesis import strategies as st

from coordinator.rank_assignment import Assignment, NotPossible, assign

NAMES = [f"node-{number}" for number in range(12)]


def done(result) -> Assignment:
    """Return the assignment, which must have been possible."""
    assert isinstance(result, Assignment)
    return result


def test_first_start_orders_nodes_as_people_count():
    """node-10 in front of node-2 makes every log and dashboard misleading."""
    nodes = ["node-10", "node-2", "node-1"]
    result = done(assign([], nodes, [], 3))
    assert result.world == ("node-1", "node-2", "node-10")
    assert result.moves == ()


def test_first_start_leaves_spares_idle():
    """A spare that trains from the start is no spare when the first node dies."""
    result = done(assign([], ["node-1", "node-2"], ["node-0"], 2))
    assert result.world == ("node-1", "node-2")


def test_a_spare_takes_the_dead_nodes_rank_and_nobody_else_moves():
    """Moving a survivor costs it its warm caches and local checkpoint."""
    before = ["node-0", "node-1", "node-2"]
    result = done(
        assign(before, ["node-0", "node-2"], ["node-9"], 3, unusable={"node-1": "XID 79 on GPU 0"})
    )
    assert result.world == ("node-0", "node-9", "node-2")
    (move,) = result.moves
    assert (move.group_rank, move.from_node, move.to_node) == (1, "node-1", "node-9")
    assert "XID 79 on GPU 0" in move.reason
    assert "spare node-9" in move.reason


def test_an_idle_node_is_used_before_a_spare():
    """Spending the spare first leaves the job without one although a node stood idle."""
    result = done(assign(["node-0", "node-1"], ["node-1", "node-5"], ["node-3"], 2))
    assert result.world == ("node-5", "node-1")


def test_a_promoted_spare_keeps_its_rank():
    """A spare that holds a rank must not be swapped out at the next unrelated restart."""
    result = done(assign(["node-0", "node-9"], ["node-0", "node-1"], ["node-9"], 2))
    assert result.world == ("node-0", "node-9")
    assert result.moves == ()


def test_too_few_nodes_says_how_many_are_missing():
    """'Not possible' alone sends the person on call to count nodes by hand."""
    result = assign(["node-0", "node-1"], ["node-0"], [], 2)
    assert isinstance(result, NotPossible)
    assert result.reason == "the job needs 2 nodes and 1 is missing (usable: node-0)"


@st.composite
def fleets(draw):
    """Draw (previous, available, spares, nnodes) of a fleet after some change."""
    nnodes = draw(st.integers(1, 6))
    previous = draw(st.one_of(st.just([]), st.permutations(NAMES).map(lambda p: p[:nnodes])))
    usable = draw(st.lists(st.sampled_from(NAMES), unique=True))
    spares = [name for name in usable if draw(st.booleans())]
    listed_twice = draw(st.booleans())
    available = usable if listed_twice else [name for name in usable if name not in spares]
    return previous, draw(st.permutations(available)), spares, nnodes


@given(fleets())
def test_no_rank_twice_survivors_stay_and_moves_are_minimal(fleet):
    """Two workers with one rank corrupt a checkpoint; a needless move costs a cold start."""
    previous, available, spares, nnodes = fleet
    usable = set(available) | set(spares)
    result = assign(previous, available, spares, nnodes)
    assert isinstance(result, NotPossible) == (len(usable) < nnodes)
    if isinstance(result, NotPossible):
        return
    assert len(result.world) == len(set(result.world)) == nnodes
    assert set(result.world) <= usable
    gone = [rank for rank, node in enumerate(previous) if node not in usable]
    assert [move.group_rank for move in result.moves] == gone
    for rank, node in enumerate(previous):
        assert node not in usable or result.world[rank] == node
    used_spares = [node for node in result.world if node in spares and node not in previous]
    idle_others = usable - set(spares) - set(result.world)
    assert not used_spares or not idle_others


@given(fleets(), st.randoms(use_true_random=False))
def test_the_answer_does_not_depend_on_the_order_of_the_lists(fleet, rng):
    """A coordinator that restarts must come to the same assignment from the same fleet."""
    previous, available, spares, nnodes = fleet
    shuffled = list(available)
    rng.shuffle(shuffled)
    assert assign(previous, available, spares, nnodes) == assign(
        previous, shuffled, spares[::-1], nnodes
    )


@given(st.integers(1, 5), st.sets(st.sampled_from(NAMES[:6]), min_size=1))
def test_a_smaller_world_keeps_low_ranks_and_reuses_displaced_nodes(nnodes, alive):
    """Shrinking must not hand a rank to a cold node while a warm one is sent home."""
    previous = NAMES[:6]
    result = assign(previous, sorted(alive), ["node-11"], nnodes)
    if isinstance(result, NotPossible):
        assert len(alive) + 1 < nnodes
        return
    for rank in range(nnodes):
        assert previous[rank] not in alive or result.world[rank] == previous[rank]
    assert "node-11" not in result.world or len(alive) < nnodes
