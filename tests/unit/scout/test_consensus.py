from hypothesis import given
from hypothesis import strategies as st

from scout.consensus import exact
from scout.verdict import Agree, Attributed, Basis, Inconclusive

ELECTORATES = st.integers(1, 9).map(range)
VOTES = st.dictionaries(st.integers(0, 9), st.sampled_from("abc"))


def test_equal_answers_of_everybody_agree():
    """A healthy job would be stopped."""
    assert isinstance(exact({0: "a", 1: "a"}, (0, 1), "loss"), Agree)


def test_one_dissenter_among_three_is_named():
    """A corrupt rank would go on poisoning the others."""
    verdict = exact({0: "a", 1: "b", 2: "a"}, (0, 1, 2), "signature")
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (1,)
    assert verdict.basis is Basis.MAJORITY
    assert {(it.ranks, it.detail) for it in verdict.evidence} == {((0, 2), "a"), ((1,), "b")}


def test_two_peers_convict_nobody():
    """A coin toss would evict a healthy node."""
    verdict = exact({0: "a", 1: "b"}, (0, 1), "signature")
    assert isinstance(verdict, Inconclusive)
    assert verdict.why == "two peers cannot convict each other: they disagree on signature"


def test_a_tie_convicts_nobody():
    """Half of a job would evict the other half."""
    verdict = exact({0: "a", 1: "a", 2: "b", 3: "b"}, range(4), "signature")
    assert isinstance(verdict, Inconclusive)
    assert "2 camps of 2 among 4 ranks" in verdict.why


def test_silence_keeps_its_seat():
    """Two of four would count as a majority once the other two are quiet."""
    verdict = exact({0: "a", 1: "a", 2: "b"}, range(4), "signature")
    assert isinstance(verdict, Inconclusive)
    assert "1 silent, 3 would have to agree" in verdict.why


def test_a_silent_rank_is_named_when_a_majority_answered_alike():
    """A rank that cannot answer any more would never be found."""
    verdict = exact({0: "a", 1: "a", 2: "a"}, range(4), "signature")
    assert isinstance(verdict, Attributed)
    assert verdict.ranks == (3,)


def test_a_silent_majority_convicts_nobody_who_spoke():
    """A cut network would get the only reachable rank evicted."""
    assert isinstance(exact({0: "a"}, range(4), "signature"), Inconclusive)
    assert isinstance(exact({}, range(4), "signature"), Inconclusive)


def test_votes_from_outside_the_electorate_do_not_count():
    """A rank of an older generation would tip the scale."""
    verdict = exact({0: "a", 1: "b", 7: "b", 8: "b"}, (0, 1), "signature")
    assert isinstance(verdict, Inconclusive)


@given(VOTES, ELECTORATES)
def test_whoever_is_named_faces_a_strict_majority_that_answered_alike(votes, electorate):
    """Attribution without that majority is guessing."""
    verdict = exact(votes, electorate, "x")
    if isinstance(verdict, Attributed):
        others = set(electorate) - set(verdict.ranks)
        assert 2 * len(others) > len(electorate)
        assert len({votes[rank] for rank in others}) == 1
        assert all(votes.get(rank) != votes[min(others)] for rank in verdict.ranks)
    if isinstance(verdict, Agree):
        assert {votes[rank] for rank in electorate} == {votes[0]}


@given(VOTES, ELECTORATES, st.randoms())
def test_the_order_of_votes_and_members_does_not_matter(votes, electorate, random):
    """Two observers of one job would name two culprits."""
    items, members = list(votes.items()), list(electorate)
    random.shuffle(items)
    random.shuffle(members)
    assert exact(dict(items), members, "x") == exact(votes, electorate, "x")
