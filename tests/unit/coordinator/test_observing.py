"""Detectors on probation: noted, judged by what follows, and summed up."""

from coordinator.incidents import Culprit, Finding, NodeFault
from coordinator.observing import Verdict, noted, scores, stopped, went_on
from sidecar.api import FaultKind, FaultReport, Scope

SECOND = 10**9


def a_fault(node="n1", kind=FaultKind.LOG_SLOW, at_s=0, fault_id=1, message="slow") -> NodeFault:
    report = FaultReport(
        fault_id=fault_id,
        kind=kind,
        scope=Scope.RANK,
        reason="LogSlow_X",
        message=message,
        age_ns=0,
        rank=3,
    )
    return NodeFault(node=node, at_ns=at_s * SECOND, report=report)


def a_finding(node="n1") -> Finding:
    culprit = Culprit(
        kind=FaultKind.CRASH, node=node, rank=3, local_rank=0, gpu=None, reason="SIGBUS"
    )
    return Finding(outcome="attributed", basis="direct", why="w", culprit=culprit)


def test_training_that_goes_on_refutes_a_detector():
    """A detector that would have stopped a healthy job ten times is not fit to stop it."""
    known = noted((), a_fault(), 100)
    assert went_on(known, 119, 100 * SECOND)[0].verdict is Verdict.PENDING
    assert went_on(known, 200, 59 * SECOND)[0].verdict is Verdict.PENDING
    assert went_on(known, 120, 60 * SECOND)[0].verdict is Verdict.FALSE_ALARM
    assert went_on(noted((), a_fault(), None), None, 601 * SECOND)[0].verdict is (
        Verdict.FALSE_ALARM
    )


def test_an_incident_of_the_same_node_soon_after_confirms_it():
    """Being right ten minutes before everything else is what a detector is for."""
    known = noted((), a_fault(), 100)
    assert stopped(known, a_finding(), 600 * SECOND)[0].verdict is Verdict.CONFIRMED
    assert stopped(known, a_finding("n2"), 9 * SECOND)[0].verdict is Verdict.PENDING
    assert stopped(known, a_finding(), 601 * SECOND)[0].verdict is Verdict.PENDING
    hang = noted((), a_fault(node="", kind=FaultKind.PROCESS_STALL), 100)
    assert stopped(hang, a_finding("n2"), 9 * SECOND)[0].verdict is Verdict.CONFIRMED
    refuted = went_on(known, 500, 100 * SECOND)
    assert stopped(refuted, a_finding(), 101 * SECOND) == refuted


def test_what_is_said_again_is_one_observation():
    """A rule that fires at each line would score hundreds for one stop."""
    known = noted(noted((), a_fault(), 100), a_fault(fault_id=2), 101)
    assert [item.times for item in known] == [2]
    own = noted((), a_fault(fault_id=0), 100)
    assert noted(own, a_fault(fault_id=0), 100) == own
    after = noted(went_on(known, 500, 100 * SECOND), a_fault(fault_id=3), 500)
    assert len(after) == 2
    (score,) = scores(after)
    assert (score.stops, score.confirmed, score.false_alarms, score.pending) == (2, 0, 1, 1)
