from dataclasses import replace

from coordinator.histogram import RECOVERY_BUCKETS_S, Histogram
from coordinator.history import MEASURED_PHASES, History
from coordinator.incidents import (
    Culprit,
    Decision,
    Finding,
    Incident,
    IncidentPhase,
    NodeFault,
    Outcome,
)
from sidecar.api import FaultKind, FaultReport, Scope
from worker_shim.messages import RestartMode

SECOND_NS = 1_000_000_000


def report(kind: FaultKind) -> NodeFault:
    """Return one node's report of ``kind``."""
    return NodeFault(
        node="a",
        at_ns=0,
        report=FaultReport(
            fault_id=1, kind=kind, scope=Scope.RANK, reason="r", message="m", age_ns=0
        ),
    )


def recovered(incident_id: str = "i1") -> Incident:
    """Return a recovered incident whose phases took 1, 2, 3, ... seconds."""
    incident = Incident(
        id=incident_id,
        job="job",
        generation=1,
        topology_version=1,
        trigger="crash",
        outcome=Outcome.RECOVERED,
        faults=(report(FaultKind.PROCESS_STALL), report(FaultKind.CRASH)),
        finding=Finding(
            outcome="attributed",
            basis="direct",
            why="it exited",
            culprit=Culprit(
                kind=FaultKind.CRASH, node="a", rank=1, local_rank=0, gpu=None, reason="SIGKILL"
            ),
        ),
        decision=Decision(mode=RestartMode.PROCESS, reason="first crash"),
        steps_lost=4,
    )
    at_ns = 0
    for number, phase in enumerate(IncidentPhase):
        at_ns += number * SECOND_NS
        incident = incident.reached(phase, at_ns)
    return incident


def test_an_open_incident_counts_nothing_and_a_closed_one_counts_once() -> None:
    """A counter that runs ahead or twice turns one fault into an alert about two."""
    history = History()
    history.note(replace(recovered(), outcome=Outcome.OPEN))
    assert history == History()
    history.note(recovered())
    once = replace_counts(history)
    history.note(recovered())
    assert replace_counts(history) == once
    assert once == (
        {"crash": 1},
        {"recovered": 1},
        {("process_level_restart", "crash"): 1},
        {"attributed": 1},
        4,
    )


def replace_counts(history: History) -> tuple[object, ...]:
    """Return the totals as plain values."""
    return (
        dict(history.faults),
        dict(history.outcomes),
        dict(history.restarts),
        dict(history.verdicts),
        history.lost_steps,
    )


def test_each_phase_is_measured_from_the_milestone_before_it() -> None:
    """A slow stop shown as a slow start sends people to the wrong machine."""
    history = History()
    history.note(recovered())
    assert [history.phases[phase].sum_s for phase in MEASURED_PHASES] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert history.recoveries[RestartMode.PROCESS].sum_s == 36


def test_a_milestone_that_was_not_reached_is_skipped_not_zero() -> None:
    """A hang has no localized milestone of its own; zeros would drag every median down."""
    history = History()
    incident = recovered()
    history.note(
        replace(
            incident,
            milestones=tuple(
                stone
                for stone in incident.milestones
                if stone.phase not in (IncidentPhase.LOCALIZED, IncidentPhase.FIRST_STEP)
            ),
        )
    )
    assert sum(history.phases[IncidentPhase.LOCALIZED].counts) == 0
    assert history.phases[IncidentPhase.CAPTURED].sum_s == 5
    assert sum(it.count for it in history.recoveries.values()) == 0


def test_without_a_culprit_the_first_report_names_the_kind() -> None:
    """An inconclusive incident must not vanish from the fault counter."""
    history = History()
    history.note(
        replace(
            recovered(),
            finding=Finding(outcome="inconclusive", basis=None, why="tie", culprit=None),
        )
    )
    assert dict(history.faults) == {"process_stall": 1}
    assert dict(history.verdicts) == {"inconclusive": 1}


def test_a_job_that_gave_up_counts_no_restart() -> None:
    """Restarts are what the budget is spent on; giving up spends nothing."""
    history = History()
    history.note(
        replace(
            recovered(),
            outcome=Outcome.FAILED,
            decision=Decision(mode=None, reason="budget spent"),
        )
    )
    assert dict(history.restarts) == {}
    assert dict(history.outcomes) == {"failed": 1}
    assert sum(it.count for it in history.recoveries.values()) == 0


def test_buckets_are_cumulative_and_inclusive() -> None:
    """A quantile over buckets that are not cumulative is nonsense without an error."""
    histogram = Histogram()
    for value in (0.05, 0.06, 700.0):
        histogram.observe(value)
    buckets = dict(histogram.cumulative())
    assert buckets["0.05"] == 1
    assert buckets["0.1"] == 2
    assert buckets["600.0"] == 2
    assert buckets["+Inf"] == 3
    assert len(buckets) == len(RECOVERY_BUCKETS_S) + 1


def deciding(incident_id: str, mode: RestartMode | None) -> Incident:
    """Return a closed incident that was answered by ``mode``."""
    return replace(recovered(incident_id), decision=Decision(mode=mode, reason="r"))


def test_a_deeper_decision_than_the_one_before_is_an_escalation() -> None:
    """Escalations that are not counted look like a job that is merely unlucky."""
    history = History()
    modes = (RestartMode.PROCESS, RestartMode.IN_PROCESS, RestartMode.PROCESS, None)
    for number, mode in enumerate(modes):
        history.note(deciding(f"i{number}", mode))
    assert dict(history.escalations) == {
        ("in_process_restart", "process_level_restart"): 1,
        ("process_level_restart", "failed"): 1,
    }


def test_a_bucket_remembers_the_last_incident_that_fell_into_it() -> None:
    """Whoever sees a slow recovery in a chart would have to guess which one it was."""
    history = History()
    history.note(recovered("i1"))
    history.note(recovered("i2"))
    (example,) = history.recoveries[RestartMode.PROCESS].examples.values()
    assert (example.incident, example.value_s) == ("i2", 36.0)


def test_a_copy_is_apart_from_its_original() -> None:
    """A scrape in another thread would read a number that is just being changed."""
    history = History()
    before = history.copy()
    history.note(recovered())
    assert sum(before.outcomes.values()) == 0
    assert before.phases[MEASURED_PHASES[0]].count == 0
    assert replace_counts(history.copy()) == replace_counts(history)


def test_only_the_newest_incidents_are_kept_whole() -> None:
    """A job of a month would carry every stack that it ever saw in memory."""
    history = History()
    for number in range(9):
        history.note(recovered(f"i{number}"))
    assert [it.id for it in history.newest] == ["i4", "i5", "i6", "i7", "i8"]
