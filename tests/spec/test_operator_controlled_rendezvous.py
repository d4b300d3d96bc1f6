"""Sections 4.2 and 7.4 of the orchestration article: one test per demanding sentence."""

import pytest

from coordinator.rank_assignment import Assignment, assign
from coordinator.topology import Topology
from sidecar.api import AgentState, StatusReport
from sidecar.http_bodies import BodyError, start_command, status_body, update_command
from sidecar.rank_table import RankTable, Stale, updated
from sidecar.workers.environment import WorkerPlace, worker_environment

START = {
    "rank": 1,
    "nnodes": 2,
    "faultCount": 0,
    "master_addr": "10.0.0.1",
    "master_port": 29500,
    "ipVersion": "7",
    "rankIps": [{"rank": 0, "ip": "10.0.0.1"}, {"rank": 1, "ip": "10.0.0.2"}],
}


def a_status(**more) -> StatusReport:
    fields = {
        "node": "n",
        "incarnation": "1",
        "state": AgentState.READY,
        "generation": 0,
        "stopped_generation": 0,
        "topology_version": 0,
        "rendezvous_port": 1,
    }
    return StatusReport(**(fields | more))


def an_update(**more):
    plain = {key: value for key, value in START.items() if key != "rankIps"}
    return plain | {"rankIps": []} | more


def started(**more) -> RankTable:
    """Return a node's table after its first start over HTTP."""
    return RankTable().started(start_command({**START, **more}, a_status()))


def after_update(table: RankTable, body) -> RankTable | Stale:
    """Return a node's table after an update over HTTP, or why it stays as it is."""
    return updated(table, update_command(body, table), generation=0)


def test_a_start_carries_the_topology_that_the_operator_determined():
    """Workers receive their assignment as input and compute nothing together."""
    command = start_command(START, a_status())
    assert (command.group_rank, command.nnodes) == (1, 2)
    assert (command.master_addr, command.master_port) == ("10.0.0.1", 29500)
    assert command.node_hosts == ("10.0.0.1", "10.0.0.2")
    place = WorkerPlace(
        local_rank=1,
        nproc=4,
        job="j",
        socket_path="s",
        page_path="p",
        page_token=1,
        error_file="e",
        launch_mark="m",
    )
    environment = worker_environment(command, place, {})
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("5", "8")
    assert environment["GROUP_WORLD_SIZE"] == "2"  # groups, not ranks


def test_an_update_sends_only_the_ranks_that_have_changed():
    """A whole table for each of thousands of nodes is most of the traffic of a recovery."""
    body = an_update(rankIps=[{"rank": 0, "ip": "10.0.0.9"}], ipVersion="8")
    changed = after_update(started(), body)
    assert isinstance(changed, RankTable)
    assert changed.hosts == ("10.0.0.9", "10.0.0.2")
    body = status_body(a_status(), {}, agent_version="1", spare=False, table=changed)
    assert body["ipversion"] == "8"
    # The next start need not repeat it.
    again = start_command({**START, "rankIps": []}, a_status(), changed)
    assert again.node_hosts == changed.hosts
    with pytest.raises(BodyError, match="rank 1 has no address"):
        after_update(RankTable(), an_update(rankIps=[{"rank": 0, "ip": "x"}]))


def test_the_version_is_an_optimistic_lock():
    """Two updates that were made from the same table must not both win, in whatever order."""
    table = started(topology_version=3)
    one = an_update(rankIps=[{"rank": 0, "ip": "a"}], base_topology_version=3, topology_version=4)
    two = an_update(rankIps=[{"rank": 1, "ip": "b"}], base_topology_version=3, topology_version=4)
    first = after_update(table, one)
    assert isinstance(first, RankTable)
    lost = after_update(first, two)
    assert isinstance(lost, Stale)
    assert lost.reason == "it was made from topology version 3, 4 stands here"
    assert after_update(first, one) == first  # told twice
    older = after_update(first, an_update(topology_version=2))
    assert isinstance(older, Stale)
    blind = an_update(rankIps=[{"rank": 1, "ip": "b"}], topology_version=4)
    assert isinstance(after_update(first, blind), Stale)


def test_rank_assignment_is_deterministic_and_preserved_across_restarts():
    """A replacement that shuffles the ranks of the healthy makes every one reload its shard."""
    before = ("a", "b", "c")
    given = [assign(before, ["c", "a"], ["s2", "s1"], 3) for _ in range(3)]
    assert all(isinstance(it, Assignment) and it.world == ("a", "s1", "c") for it in given)


def test_labels_from_the_workers_steer_where_a_replacement_is_placed():
    """The scheduler knows no parallelism but the one that the framework tells."""
    ranks = {rank: {"pp": str(rank), "dp": "0"} for rank in range(3)}
    nodes = {"a": {"rack": "r1"}, "c": {"rack": "r1"}, "s1": {"rack": "r2"}, "s2": {"rack": "r1"}}
    topology = Topology(ranks=ranks, nodes=nodes, nproc=1)
    result = assign(("a", "b", "c"), ["a", "c"], ["s1", "s2"], 3, topology=topology)
    assert isinstance(result, Assignment)
    assert result.world == ("a", "s2", "c")
