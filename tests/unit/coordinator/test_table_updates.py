"""What a node is told of the table of hosts: what it lacks, and no more."""

from dataclasses import replace

from coordinator.recovery import from_table
from sidecar.api import AgentState, RankHost, Start, StatusReport, Update

HOSTS = ("a", "b", "c", "d")
START = Start(
    generation=5,
    topology_version=7,
    group_rank=2,
    nnodes=4,
    master_addr="a",
    master_port=29500,
    fault_count=1,
    node_hosts=HOSTS,
)


def a_status(table_version: int) -> StatusReport:
    return StatusReport(
        node="n",
        incarnation="1",
        state=AgentState.READY,
        generation=4,
        stopped_generation=4,
        topology_version=6,
        rendezvous_port=1,
        table_version=table_version,
    )


def test_a_survivor_is_told_of_the_ranks_that_moved_and_of_no_other():
    """The whole table to each of a thousand nodes is a million addresses for one that moved."""
    update, start = from_table(START, a_status(6), ("a", "gone", "c", "d"))
    assert isinstance(update, Update)
    assert update.changed == (RankHost(rank=1, host="b"),)
    assert (update.base_topology_version, update.topology_version) == (6, 7)
    assert start == replace(START, node_hosts=(), hosts_known=True)


def test_a_node_that_has_the_table_is_told_of_no_host():
    """Most restarts move no rank."""
    assert from_table(START, a_status(7), HOSTS) == (
        replace(START, node_hosts=(), hosts_known=True),
    )


def test_who_has_no_table_or_one_that_nobody_knows_is_told_the_whole():
    """A spare, a node that lost its memory, or another coordinator's number for other hosts."""
    assert from_table(START, a_status(0), None) == (START,)
    assert from_table(START, a_status(0), ()) == (START,)
    assert from_table(START, a_status(7), ("a", "x", "c", "d")) == (START,)
    assert from_table(START, a_status(9), HOSTS) == (START,)


def test_a_job_of_another_size_is_told_what_it_gained():
    """A rank without a host is a node that nobody can reach."""
    update, _ = from_table(START, a_status(6), ("a", "b"))
    assert isinstance(update, Update)
    assert update.changed == (RankHost(rank=2, host="c"), RankHost(rank=3, host="d"))
