"""How long a job may run, and how long it may stay broken.  Wall-clock nanoseconds come in.

The time limit of a start stands with the running phase; these two hold whatever the phase is.
"""

from coordinator.incidents import IncidentPhase
from coordinator.journal_format import DurableState
from coordinator.settings import JobSettings
from scout.clock import SECOND


def overdue(settings: JobSettings, state: DurableState, now_ns: int) -> str | None:
    """Say which limit of the job is over, or None."""
    active_s, fault_s = settings.active_deadline_s, settings.fault_deadline_s
    if active_s is not None and state.began_ns and now_ns - state.began_ns >= active_s * SECOND:
        return f"the job has run for {active_s:g} s, its limit (activeDeadlineSeconds)"
    incident = state.open_incident
    detected = None if incident is None else incident.at(IncidentPhase.DETECTED)
    if incident is None or detected is None or fault_s is None:
        return None
    if now_ns - detected < fault_s * SECOND:
        return None
    return (
        f"the job has not recovered within {fault_s:g} s of a fault (faultDeadlineSeconds): "
        f"{incident.trigger}"
    )
