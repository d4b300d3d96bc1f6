from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coordinator.membership import NODES_MAX, Accepted, Ignored, Membership, NodeView, Rejected
from scout.clock import SECOND, Duration, Instant
from sidecar.api import PROTOCOL_VERSION, AgentState, Hello, StatusReport

LEASE = Duration(15 * SECOND)


def at(seconds: float) -> Instant:
    """Return an instant in the test's time."""
    return Instant(round(seconds * SECOND))


def a_hello(node="node-1", incarnation="a", **more) -> Hello:
    """Return a fitting hello."""
    fields = {
        "protocol": PROTOCOL_VERSION,
        "agent_version": "0.1.0",
        "job": "job",
        "host": "10.0.0.1",
        "http_port": 1,
        "nproc_per_node": 2,
        "spare": False,
    }
    return Hello(node=node, incarnation=incarnation, **(fields | more))


def a_status(node="node-1", incarnation="a") -> StatusReport:
    """Return a status of a ready node."""
    return StatusReport(
        node=node,
        incarnation=incarnation,
        state=AgentState.READY,
        generation=0,
        stopped_generation=0,
        topology_version=0,
        rendezvous_port=1,
    )


def a_table() -> Membership:
    """Return an empty table."""
    return Membership(job="job", nproc_per_node=2, lease_ns=LEASE)


def test_a_fitting_sidecar_is_accepted_and_usable():
    """A node that is turned away for no reason leaves the job short."""
    table = a_table()
    answer = table.open(1, a_hello(), at(0))
    assert isinstance(answer, Accepted)
    assert not answer.restarted
    assert [view.node for view in table.usable(at(1))] == ["node-1"]


def test_misfits_are_rejected_for_good_with_the_way_out():
    """A sidecar of another job that gets ranks would train somebody else's script."""
    for hello, words in (
        (a_hello(protocol=99), "install the same outrider"),
        (a_hello(job="other\x1b[2J"), "serves job 'other'"),
        (a_hello(nproc_per_node=8), "runs 8 workers and the job asks for 2"),
        (a_hello(node=" "), "--node-name"),
        (a_hello(node=""), "--node-name"),
        (a_hello(node="../../etc"), "--node-name"),
        (a_hello(node="n\x1b[2J"), "'n\\x1b[2J' is not a name"),
        (a_hello(node="n" * 64), "--node-name"),
        (a_hello(host="a b"), "--host"),
        (a_hello(host="h" * 300), "longer than the 253 characters"),
        (a_hello(host=""), "--host"),
        (a_hello(http_port=0), "0 is not a port"),
        (a_hello(http_port=-5), "--http-port"),
        (a_hello(http_port=70_000), "70000 is not a port"),
        (a_hello(labels={"": "x"}), "--label"),
        (a_hello(labels={"rack": "x" * 300}), "--label"),
        (a_hello(labels={"rack": "\x1b[2J"}), "'\\x1b[2J' of 'rack' cannot be used"),
        (a_hello(labels={str(it): "" for it in range(65)}), "65 of them are too many"),
        (a_hello(gpus=(0, 0)), "devices"),
        (a_hello(gpus=(-1,)), "-1 is not the index"),
        (a_hello(agent_version="v" * 65), "version"),
        (a_hello(incarnation="\n"), "incarnation"),
    ):
        answer = a_table().open(1, hello, at(0))
        assert isinstance(answer, Rejected)
        assert not answer.retry
        assert words in answer.reason
        assert answer.reason.isprintable()


def test_a_second_sidecar_of_a_live_node_is_a_duplicate():
    """Two machines under one name would both be told to run the same ranks."""
    table = a_table()
    table.open(1, a_hello(), at(0))
    table.status(1, a_status(), at(9))
    answer = table.open(2, a_hello(incarnation="b"), at(10))
    assert isinstance(answer, Rejected)
    assert answer.retry
    assert "node-1" in answer.reason
    view = table.by_link(1)
    assert view is not None
    assert view.link == 1


def test_a_restarted_sidecar_takes_over_from_a_dead_connection():
    """A half-open connection of the killed sidecar must not lock its successor out."""
    for dies in (lambda table: table.close(1, at(1)), lambda table: None):
        table = a_table()
        table.open(1, a_hello(), at(0))
        table.status(1, a_status(), at(0))
        dies(table)
        answer = table.open(2, a_hello(incarnation="b"), at(10))
        assert isinstance(answer, Accepted)
        assert answer.restarted
        assert answer.view.status is None
        assert table.by_link(1) is None


def test_the_same_sidecar_dialling_again_replaces_its_old_link():
    """The network may drop a connection that our side still takes for open."""
    table = a_table()
    table.open(1, a_hello(), at(0))
    table.status(1, a_status(), at(0))
    answer = table.open(2, a_hello(), at(0.1))
    assert isinstance(answer, Accepted)
    assert answer.replaced == 1
    assert not answer.restarted
    assert answer.view.status == a_status()
    assert isinstance(table.close(1, at(0.2)), Ignored)
    assert [view.link for view in table.usable(at(1))] == [2]


def test_a_node_is_lost_after_a_lease_of_absence_or_silence():
    """A node that is declared lost too early is stopped for nothing; never, and the job hangs."""
    for closes in (True, False):
        table = a_table()
        table.open(1, a_hello(), at(0))
        if closes:
            table.close(1, at(0))
        assert table.next_deadline() == at(15)
        assert table.lost(at(14.9)) == ()
        assert [view.node for view in table.lost(at(15))] == ["node-1"]
        assert table.next_deadline() is None
        assert [view.node for view in table.lost(at(16))] == ["node-1"]


def test_a_lost_node_that_speaks_again_is_watched_again():
    """A node forgotten by the clock could be lost a second time without anybody noticing."""
    table = a_table()
    table.open(1, a_hello(), at(0))
    table.lost(at(15))
    assert isinstance(table.heard(1, at(16)), NodeView)
    assert table.lost(at(16)) == ()
    assert table.next_deadline() == at(31)


def test_an_expected_node_that_never_dials_in_is_lost():
    """A restarted coordinator must notice that a rank holder died while it was away."""
    table = a_table()
    table.expect(["node-1", "node-2"], at(0))
    table.open(1, a_hello("node-2"), at(5))
    assert [view.node for view in table.lost(at(15))] == ["node-1"]
    table.forget("node-1")
    table.forget("node-2")
    assert [view.node for view in table.views()] == ["node-2"]


def test_exclusion_outlives_the_connection():
    """A broken node must not sneak back in by restarting its sidecar."""
    table = a_table()
    table.open(1, a_hello(), at(0))
    table.exclude("node-1", "XID 79")
    table.close(1, at(1))
    answer = table.open(2, a_hello(incarnation="b"), at(2))
    assert isinstance(answer, Accepted)
    assert answer.view.excluded == "XID 79"
    assert table.usable(at(3)) == ()
    table.readmit("node-1")
    assert len(table.usable(at(3))) == 1


def test_reports_for_somebody_else_are_ignored():
    """A confused sidecar must not overwrite another node's state."""
    table = a_table()
    table.open(1, a_hello(), at(0))
    assert isinstance(table.status(1, a_status("node-2"), at(1)), Ignored)
    assert isinstance(table.status(1, a_status(incarnation="b"), at(1)), Ignored)
    assert isinstance(table.status(9, a_status(), at(1)), Ignored)
    view = table.view("node-1")
    assert view is not None
    assert view.status is None


def test_one_connection_speaks_for_one_node_and_the_table_is_bounded():
    """A broken client that sends hello after hello must not fill the table."""
    table = a_table()
    table.open(1, a_hello(), at(0))
    assert isinstance(table.open(1, a_hello(), at(1)), Accepted)
    assert isinstance(table.open(1, a_hello("node-2"), at(1)), Rejected)
    table.expect([f"n{number}" for number in range(NODES_MAX)], at(0))
    answer = table.open(2, a_hello("one-too-many"), at(1))
    assert isinstance(answer, Rejected)
    assert "limit" in answer.reason


class Fleet(RuleBasedStateMachine):
    """Any order of connections, closures, reports and time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = a_table()
        self.now = at(0)
        self.links = 0

    @rule(node=st.sampled_from(["n1", "n2"]), incarnation=st.sampled_from(["a", "b"]))
    def dial(self, node, incarnation):
        self.links += 1
        self.table.open(self.links, a_hello(node, incarnation), self.now)

    @rule(back=st.integers(0, 3))
    def drop(self, back):
        self.table.close(self.links - back, self.now)

    @rule(back=st.integers(0, 3), node=st.sampled_from(["n1", "n2"]))
    def report(self, back, node):
        self.table.status(self.links - back, a_status(node), self.now)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds):
        self.now = Instant(self.now + at(seconds))
        self.table.lost(self.now)

    @invariant()
    def links_and_nodes_agree(self):
        linked = {view.link: view.node for view in self.table.views() if view.link is not None}
        assert linked == self.table._links
        for view in self.table.views():
            assert (view.link is None) == (view.lost_at is not None)

    @invariant()
    def a_node_is_lost_or_has_a_deadline(self):
        lost = {view.node for view in self.table.lost(self.now)}
        waiting = {view.node for view in self.table.views()} - lost
        deadline = self.table.next_deadline()
        assert (deadline is None) == (not waiting)
        assert deadline is None or deadline > self.now
        assert lost.isdisjoint(view.node for view in self.table.usable(self.now))


Fleet.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestFleet = Fleet.TestCase


def test_views_do_not_change_under_their_reader():
    """A view kept for a decision must still be what it was when the decision is explained."""
    table = a_table()
    answer = table.open(1, a_hello(), at(0))
    assert isinstance(answer, Accepted)
    kept = replace(answer.view)
    table.close(1, at(1))
    assert answer.view == kept
