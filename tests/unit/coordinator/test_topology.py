"""Which spare takes a gap, and the reason that is stored."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rank_assignment import Assignment, assign
from coordinator.topology import Topology


def labels(dp: int, pp: int, tp: int) -> dict[str, str]:
    return {"dp": str(dp), "pp": str(pp), "tp": str(tp)}


def place(rack: str, switch: str = "", domain: str = "", **more: str) -> dict[str, str]:
    found = {"rack": rack, "switch": switch, "nvswitch_domain": domain, **more}
    return {key: value for key, value in found.items() if value}


def moved(topology, world, available, spares, **more):
    result = assign(world, available, spares, len(world), topology=topology, **more)
    assert isinstance(result, Assignment)
    return result


def test_the_spare_inside_the_tensor_parallel_domain_is_taken():
    """A tensor-parallel rank behind a switch makes every layer of every step wait for it."""
    ranks = {0: labels(0, 0, 0), 1: labels(0, 0, 1)}
    nodes = {
        "a": place("r1", "s1", "d1"),
        "near": place("r1", "s1", "d1"),
        "far": place("r1", "s1", "d2"),
    }
    result = moved(Topology(ranks=ranks, nodes=nodes, nproc=1), ["a", "b"], ["a"], ["far", "near"])
    assert result.world == ("a", "near")
    assert "in the NVSwitch domain of its tensor-parallel peers" in result.moves[0].reason
    only = moved(Topology(ranks=ranks, nodes=nodes, nproc=1), ["a", "b"], ["a"], ["far"])
    assert "outside the NVSwitch domain of its tensor-parallel peers (rank 0)" in (
        only.moves[0].reason
    )


def test_the_spare_next_to_its_pipeline_neighbours_is_taken():
    """Activations of every micro-batch would cross the spine for a node in the next rack."""
    ranks = {stage: labels(0, stage, 0) for stage in range(4)}
    nodes = {f"n{stage}": place("r1", "s1") for stage in range(4)}
    nodes |= {
        "a-far": place("r2", "s9"),
        "b-rack": place("r1", "s2"),
        "c-switch": place("r1", "s1"),
    }
    topology = Topology(ranks=ranks, nodes=nodes, nproc=1)
    world, rest = ["n0", "n1", "n2", "n3"], ["n0", "n2", "n3"]
    result = moved(topology, world, rest, ["a-far", "b-rack", "c-switch"])
    assert result.world == ("n0", "c-switch", "n2", "n3")
    assert "in the switch of its pipeline neighbours (ranks 0, 2)" in result.moves[0].reason
    result = moved(topology, world, rest, ["a-far", "b-rack"])
    assert result.world[1] == "b-rack"
    assert "in the rack of its pipeline neighbours" in result.moves[0].reason


def test_data_parallel_replicas_are_spread_over_racks():
    """A rack that loses power would take both copies of a stage with it."""
    ranks = {0: labels(0, 0, 0), 1: labels(1, 0, 0)}
    nodes = {"a": place("r1"), "x1": place("r1"), "x2": place("r2")}
    result = moved(Topology(ranks=ranks, nodes=nodes, nproc=1), ["a", "b"], ["a"], ["x1", "x2"])
    assert result.world == ("a", "x2")
    assert "in no rack of its data-parallel replicas" in result.moves[0].reason


def test_several_ranks_of_a_node_and_a_strike_count_together():
    """Of two nodes that fit alike, the one that broke last night is the second choice."""
    ranks = {rank: labels(0, rank // 2, rank % 2) for rank in range(4)}
    nodes = {"a": place("r1", "s1"), "x": place("r1", "s1"), "y": place("r1", "s1")}
    topology = Topology(ranks=ranks, nodes=nodes, nproc=2)
    result = moved(topology, ["a", "b"], ["a"], ["x", "y"], penalties={"x": 1.0})
    assert result.world == ("a", "y")
    assert "ranks 0, 1" in result.moves[0].reason


def test_of_spares_that_fit_alike_the_one_of_highest_priority_is_taken():
    """A node with its workers warm costs seconds less than a cold one."""
    nodes = {"a": {}, "x": {}, "y": {"priority": "5"}, "z": {"priority": "many"}}
    topology = Topology(ranks={}, nodes=nodes, nproc=1)
    result = moved(topology, ["a", "b"], ["a"], ["x", "y", "z"])
    assert result.world == ("a", "y")
    assert result.moves[0].reason == "b lost its rank (it is not available), spare y takes it"


WORDS = st.dictionaries(
    st.sampled_from(["rack", "switch", "nvswitch_domain", "priority"]),
    st.sampled_from(["1", "2", "x"]),
)
PLACES = st.dictionaries(
    st.sampled_from(["dp", "tp", "pp", "cp", "stage"]), st.sampled_from(["0", "1", "2", "odd"])
)


@given(
    st.dictionaries(st.integers(0, 7), PLACES),
    st.dictionaries(st.sampled_from("abcdefgh"), WORDS),
    st.sets(st.sampled_from("abcd")),
    st.sets(st.sampled_from("efgh")),
)
def test_survivors_keep_their_ranks_whatever_the_labels_say(ranks, nodes, survivors, spares):
    """A label that moves a healthy rank costs a reload of its shard for nothing."""
    world = list("abcd")
    result = assign(
        world,
        sorted(survivors),
        sorted(spares),
        4,
        topology=Topology(ranks=ranks, nodes=nodes, nproc=2),
    )
    if len(survivors) + len(spares) < 4:
        assert not isinstance(result, Assignment)
        return
    assert isinstance(result, Assignment)
    assert len(set(result.world)) == 4
    for group_rank, node in enumerate(world):
        assert (result.world[group_rank] == node) == (node in survivors)
    assert [move.group_rank for move in result.moves] == [
        index for index, node in enumerate(world) if node not in survivors
    ]
