"""The two time limits that hold whatever the job's phase is."""

from coordinator.deadlines import overdue
from coordinator.incidents import Incident, IncidentPhase
from coordinator.journal_format import DurableState
from coordinator.settings import JobSettings

SECOND = 10**9


def an_incident(at_s: int) -> Incident:
    plain = Incident(id="j-1", job="j", generation=1, topology_version=1, trigger="rank 3 died")
    return plain.reached(IncidentPhase.DETECTED, at_s * SECOND)


def test_a_job_runs_no_longer_than_it_may():
    """A queue of jobs waits for one that somebody forgot."""
    settings = JobSettings(job="j", nnodes=1, nproc_per_node=1, active_deadline_s=60)
    state = DurableState(job="j", began_ns=100 * SECOND)
    assert overdue(settings, state, 159 * SECOND) is None
    assert "activeDeadlineSeconds" in (overdue(settings, state, 160 * SECOND) or "")
    assert overdue(settings, DurableState(job="j"), 10**6 * SECOND) is None


def test_a_job_stays_broken_no_longer_than_it_may():
    """A recovery that hangs holds the nodes without training on them."""
    settings = JobSettings(job="j", nnodes=1, nproc_per_node=1, fault_deadline_s=30)
    state = DurableState(job="j", began_ns=1, open_incident=an_incident(100))
    assert overdue(settings, state, 129 * SECOND) is None
    reason = overdue(settings, state, 130 * SECOND) or ""
    assert "faultDeadlineSeconds): rank 3 died" in reason
    assert overdue(settings, DurableState(job="j", began_ns=1), 10**6 * SECOND) is None
