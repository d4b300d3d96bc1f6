"""A round whose finding is weak looks at everybody once more, and only once."""

from coordinator.incidents import Finding
from coordinator.localization import Round
from scout.clock import Duration, Instant
from sidecar.api import EvidenceReport, ProgressReport


def a_round() -> Round:
    return Round(
        id=4,
        settle_until=Instant(300),
        spoken_until=Instant(50),
        deadline=Instant(1000),
        evidence_wait=Duration(500),
    )


def a_finding(confidence) -> Finding:
    return Finding(outcome="attributed", basis=None, why="why", culprit=None, confidence=confidence)


def answer(node, **more) -> ProgressReport:
    return ProgressReport(round_id=4, node=node, ranks=(), **more)


def test_a_weak_finding_is_looked_at_again_and_a_strong_one_is_not():
    """The rank that would tell the truth arrives a tenth of a second after the crash."""
    assert not a_round().look_again(a_finding("high"))
    assert not a_round().look_again(a_finding("medium"))
    asked = a_round()
    asked.asked.update("ab")
    asked.take(answer("a"))
    asked.take(answer("b"))
    assert asked.collected("ab", Instant(1))
    assert asked.look_again(a_finding("low"))
    assert not asked.asked
    assert not asked.collected("ab", Instant(2))
    asked.take(answer("a"))
    asked.take(answer("b"))
    assert asked.collected("ab", Instant(3))
    assert not asked.look_again(a_finding("none"))


def test_a_second_look_loses_neither_answers_nor_evidence_of_the_first():
    """A node that dies in between would leave nothing behind."""
    asked = a_round()
    asked.take(answer("a", evidence_follows=True))
    asked.look_again(a_finding("none"))
    assert asked.replies.keys() == {"a"}
    asked.take(answer("a"))
    assert asked.owing() == {"a"}
    asked.take(EvidenceReport(round_id=4, node="a", evidence={}))
    assert asked.owing() == frozenset()
