"""Slow among peers, slow against one's own past, and slow in which endpoint of the network."""

import pytest

from scout.localize import (
    GroupObservation,
    LocalizedEndpoint,
    LocalizedSwitch,
    NothingToLocalize,
    localize,
    read_topology,
)
from scout.straggler import Confirmations, History, StragglerThresholds, confirmed, spatial

T = StragglerThresholds(ratio=1.2, ms=2.0, rounds=2, samples_min=3)


def test_both_thresholds_must_be_exceeded():
    """Microseconds of noise on a short kernel, or 3 % of a long one, evict a node."""
    assert spatial({0: 1.0, 1: 1.0, 2: 2.5}, T) == ()
    assert spatial({0: 100.0, 1: 100.0, 2: 110.0}, T) == ()
    assert spatial({0: 100.0, 1: 101.0, 2: 130.0}, T) == (2,)


def test_a_fast_peer_and_a_slow_half_name_nobody():
    """The only healthy rank is called the outlier."""
    assert spatial({0: 100.0, 1: 100.0, 2: 10.0}, T) == ()
    assert spatial({0: 10.0, 1: 10.0, 2: 100.0, 3: 100.0}, T) == ()
    assert spatial({0: 10.0}, T) == ()


def test_once_is_not_enough():
    """One page fault at the wrong moment names a rank."""
    slow = {0: 10.0, 1: 10.0, 2: 30.0}
    assert confirmed([slow], T) == set()
    assert confirmed([slow, {0: 10.0, 1: 10.0, 2: 10.0}], T) == set()
    assert confirmed([slow, slow], T) == {2}
    streaks = Confirmations(T)
    assert streaks.note("hidden", (2,)) == ()
    assert streaks.note("hidden", ()) == ()
    assert streaks.note("hidden", (2,)) == ()
    assert streaks.note("hidden", (2, 1)) == (2,)


def test_a_rank_is_slow_against_its_own_past_only_with_enough_of_it():
    """The second step of a run is compared with the first, which compiled."""
    history = History(T)
    assert history.slow("k", {0: 99.0}) == ()
    for ms in (10.0, 10.5, 9.8):
        history.add("k", {0: ms, 1: ms})
    assert history.slow("k", {0: 20.0, 1: 10.2}) == (0,)
    assert history.slow("other", {0: 20.0}) == ()


def observed(name, members, slow):
    return GroupObservation(group=name, members=members, reports=dict.fromkeys(members, slow))


HOSTS = {rank: f"host-{rank // 2}" for rank in range(8)}


def test_slow_groups_that_meet_in_one_rank_localize_it_and_its_host():
    """A bad adapter slows a hundred ranks and nobody knows which host to drain."""
    found = localize(
        [observed("a", (0, 3), True), observed("b", (3, 5), True), observed("c", (0, 5), False)],
        HOSTS,
    )
    assert isinstance(found, LocalizedEndpoint)
    assert (found.rank, found.host, found.replacement_scope) == (3, "host-1", "node")


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([observed("a", (0, 1), False)], "none of 1"),
        ([observed("a", (0, 1), True)], "nothing tells its members apart"),
        ([observed("a", (0, 1), True), observed("b", (2, 3), True)], "no rank in common"),
        (
            [
                observed("a", (0, 1), True),
                observed("b", (1, 2), True),
                observed("c", (1, 4), False),
            ],
            "contradicts",
        ),
        ([observed("a", (0, 1, 2), True), observed("b", (0, 1, 3), True)], "several ranks"),
        (
            [
                observed("a", (0, 1), True),
                GroupObservation(group="b", members=(1, 2), reports={1: True}),
            ],
            "nothing tells its members apart",
        ),
    ],
)
def test_what_cannot_be_localized_says_why(groups, why):
    """An incomplete or contradicted observation drains a healthy host."""
    found = localize(groups, HOSTS)
    assert isinstance(found, NothingToLocalize)
    assert why in found.why


def test_a_compute_straggler_is_no_evidence_about_the_network():
    """A slow GPU makes its every group slow, and its network adapter is replaced."""
    groups = [observed("a", (0, 3), True), observed("b", (3, 5), True)]
    found = localize(groups, HOSTS, compute_stragglers=(3,))
    assert isinstance(found, NothingToLocalize)


def test_a_leaf_switch_is_what_all_slow_groups_cross():
    """Every host under one switch looks slow, and each is replaced in turn."""
    switches = read_topology(
        '{"host-0": ["leaf-0", "spine"], "host-1": ["leaf-0", "spine"],'
        ' "host-2": ["leaf-1", "spine"], "host-3": ["leaf-2", "spine"]}'
    )
    groups = [
        observed("a", (0, 2), True),
        observed("b", (1, 3), True),
        observed("c", (4, 6), False),
    ]
    found = localize(groups, HOSTS, switches=switches)
    assert isinstance(found, LocalizedSwitch)
    assert found.switch == "leaf-0"
    with pytest.raises(ValueError, match="host-0"):
        read_topology('{"host-0": "leaf-0"}')
    with pytest.raises(ValueError, match="not JSON"):
        read_topology("host-0: leaf")
