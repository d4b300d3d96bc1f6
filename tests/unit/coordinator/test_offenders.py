"""What is remembered of nodes, what it steers, and the breaker."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.incidents import Culprit, Finding, Incident, IncidentPhase, Outcome
from coordinator.offenders import (
    OffenderPolicy,
    Strike,
    breaker,
    penalty,
    standings,
    strikes_of,
    to_avoid,
)
from coordinator.rank_assignment import assign
from sidecar.api import FaultKind

SECOND = 10**9
DAY = 86_400 * SECOND
NOW = 400 * DAY


def a_strike(node="n1", days_ago=0.0, weight=1.0, number=1) -> Strike:
    at_ns = NOW - round(days_ago * DAY)
    return Strike(
        node=node, cause="crash: x", at_ns=at_ns, weight=weight, job="j", incident=f"j-{number}"
    )


def an_incident(kind=FaultKind.NODE_LOST, reason="r", confidence="high"):
    culprit = Culprit(kind=kind, node="n1", rank=0, local_rank=0, gpu=None, reason=reason)
    finding = Finding(
        outcome="attributed", basis="direct", why="w", culprit=culprit, confidence=confidence
    )
    plain = Incident(
        id="j-1", job="j", generation=1, topology_version=1, trigger="", finding=finding
    )
    return plain.reached(IncidentPhase.FAULT, 7)


def recovered(**more):
    outcome = more.pop("outcome", Outcome.RECOVERED)
    return replace(an_incident(**more), outcome=outcome)


def test_only_what_was_got_over_strikes_and_a_scripts_exception_hardly_does():
    """A bug of one job would drive the nodes it ran on out of all others."""
    (strike,) = strikes_of(recovered())
    assert (strike.node, strike.weight, strike.at_ns) == ("n1", 1.0, 7)
    assert strikes_of(recovered(outcome=Outcome.FAILED)) == ()
    assert strikes_of(recovered(outcome=Outcome.OPEN)) == ()
    assert strikes_of(recovered(kind=FaultKind.OPERATOR)) == ()
    (own,) = strikes_of(recovered(kind=FaultKind.CRASH, reason="exit code 1, ValueError"))
    (killed,) = strikes_of(recovered(kind=FaultKind.CRASH, reason="SIGBUS (signal 7)"))
    (weak,) = strikes_of(recovered(confidence="low"))
    assert own.weight < killed.weight < weak.weight + 0.01 < 1.0


def test_strikes_fade():
    """A node that was mended a year ago is as good as any."""
    policy = OffenderPolicy()
    fresh = standings([a_strike(), a_strike(number=2)], policy, NOW)["n1"]
    assert (fresh.score, fresh.strikes) == (2.0, 2)
    old = standings([a_strike(days_ago=14)], policy, NOW)["n1"]
    assert abs(old.score - 0.5) < 1e-9
    assert penalty(standings([a_strike(days_ago=140)], policy, NOW), "n1") == 0
    assert standings([a_strike(days_ago=-1)], policy, NOW)["n1"].score == 1.0


def test_repeat_offenders_are_left_out_only_where_others_can_take_their_place():
    """Avoiding a node must never be the reason that a job does not start."""
    strikes = [a_strike(node, number=n) for node in ("a", "b") for n in (1, 2)]
    strikes.append(a_strike("b", number=3))
    records = standings([*strikes, a_strike("c")], OffenderPolicy(), NOW)
    policy = OffenderPolicy(avoid_max=5)
    avoided = to_avoid(records, ["a", "b", "c", "d"], 3, policy)
    assert list(avoided) == ["b"]  # the worst first; one strike makes nobody a repeat offender
    assert "repeat offender: 3 strikes" in avoided["b"]
    assert list(to_avoid(records, ["a", "b", "c", "d"], 2, policy)) == ["b", "a"]
    assert to_avoid(records, ["a", "b", "c"], 3, policy) == {}
    assert to_avoid(records, ["a", "b", "c", "d"], 2, OffenderPolicy()) == {}


def test_of_two_spares_the_one_with_a_clean_record_is_taken():
    """The node that broke last night is the likeliest to break tonight."""
    given_ = assign(
        ["n1", "n2"], ["n1"], ["s1", "s2"], 2, unusable={"n2": "gone"}, penalties={"s1": 0.5}
    )
    assert given_.world == ("n1", "s2")
    fresh = assign([], ["n1", "n2", "n3"], [], 2, penalties={"n1": 1.0})
    assert fresh.world == ("n2", "n3")


def test_the_breaker_keeps_a_detector_from_emptying_the_fleet():
    """A driver update that prints a new line in every kernel log is no hundred broken nodes."""
    policy = OffenderPolicy()
    assert breaker(["a", "b"], (), 4, policy).allowed == ("a", "b")
    tripped = breaker(["c"], ("a", "b"), 4, policy)
    assert (tripped.allowed, tripped.refused) == ((), ("c",))
    assert "2 of 4 nodes are already: no more than 2 without a person's word" in tripped.reason
    assert breaker(["c"], ("a", "b"), 10, policy).allowed == ("c",)


@given(
    st.lists(st.sampled_from("abcdefgh"), max_size=8, unique=True),
    st.sets(st.sampled_from("abcdefgh")),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_no_more_is_ever_left_out_than_the_breaker_allows(wanted, excluded, fleet, share):
    """A breaker that leaks by one a night is none."""
    policy = OffenderPolicy(excluded_share_max=share)
    judged = breaker(wanted, excluded, fleet, policy)
    limit = max(2, int(share * fleet))
    assert len(excluded | set(judged.allowed)) <= max(limit, len(excluded))
    assert set(judged.allowed) | set(judged.refused) == set(wanted)
    assert bool(judged.refused) == bool(judged.reason)
