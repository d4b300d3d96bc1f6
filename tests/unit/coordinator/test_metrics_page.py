import re
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.checkpoint_choice import PendingCheckpoint
from coordinator.command_times import CommandTimes
from coordinator.history import History
from coordinator.incidents import (
    Culprit,
    Decision,
    Finding,
    Incident,
    IncidentPhase,
    NodeFault,
    Outcome,
)
from coordinator.ledger import CAUSES, Account, Ledger
from coordinator.metric_parts import REASON_CHARS_MAX
from coordinator.metrics import JobNumbers, render
from coordinator.phases import JobPhase
from coordinator.view import JobView, NodeStatus
from sidecar.api import AgentState, CheckpointPointer, FaultKind, FaultReport, RankStatus, Scope
from worker_shim.messages import RestartMode, ScoutStatus

NOW_S = 5000.0
Samples = dict[str, list[tuple[dict[str, str], float]]]


def node(name: str, **changes: object) -> NodeStatus:
    """Return a running node with rank, changed as asked."""
    plain = NodeStatus(
        node=name,
        connected=True,
        spare=False,
        state=AgentState.RUNNING,
        generation=1,
        topology_version=1,
        group_rank=0,
        last_heard_age_s=0.5,
        excluded=None,
        reason="",
        host=name,
        http_port=1,
        ranks=(),
    )
    return replace(plain, **changes)


def view(**changes: object) -> JobView:
    """Return a running job of one node and a spare, changed as asked."""
    plain = JobView(
        job="job",
        phase=JobPhase.RUNNING,
        phase_age_s=1.0,
        generation=3,
        topology_version=2,
        nnodes=4,
        nproc_per_node=8,
        world=("a",),
        step=120,
        complete_checkpoints=(
            CheckpointPointer(prefix="model", step=100, path="/c/100"),
            CheckpointPointer(prefix="model", step=80, path="/c/80"),
            CheckpointPointer(prefix="optimizer", step=60, path="/o/60"),
        ),
        chosen_checkpoints=(),
        nodes=(
            node("a"),
            node("b", state=AgentState.READY, spare=True, group_rank=None),
            node("c", state=None, group_rank=None, last_heard_age_s=None, connected=False),
            node("d", state=AgentState.READY, group_rank=None, excluded="gpu lost"),
        ),
        excluded={"d": "gpu lost"},
        open_incident=None,
        restarts_total=2,
        restart_budget_remaining=8,
        outcome_reason="",
        waiting_for="",
    )
    return replace(plain, **changes)


def incident(**changes: object) -> Incident:
    """Return an open incident with one report, no finding yet, begun at second 1000."""
    plain = Incident(
        id="i1",
        job="job",
        generation=3,
        topology_version=2,
        trigger="crash on a",
        faults=(
            NodeFault(
                node="a",
                at_ns=0,
                report=FaultReport(
                    fault_id=1,
                    kind=FaultKind.CRASH,
                    scope=Scope.RANK,
                    reason="signal 9",
                    message="m",
                    age_ns=0,
                    rank=5,
                ),
            ),
        ),
    ).reached(IncidentPhase.FAULT, 1000 * 10**9)
    return replace(plain, **changes)


def scraped(picture: JobView, history: History | None = None) -> Samples:
    """Return what a scrape shows, by sample name."""
    numbers = JobNumbers(
        now_s=NOW_S,
        view=picture,
        history=history or History(),
        ledger=Ledger.begin(0),
        commands=CommandTimes(),
        refused=7,
        dropped=2,
    )
    body, content_type = render(numbers)
    assert content_type.startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def by(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Return the values of ``name`` by one label."""
    return {labels[label]: value for labels, value in samples[name]}


def test_exactly_the_present_phase_is_one() -> None:
    """Two phases at once make every panel that filters on one of them lie."""
    for phase in JobPhase:
        found = by(scraped(view(phase=phase)), "outrider_job_phase", "phase")
        assert found == {str(other): float(other is phase) for other in JobPhase}


def test_the_numbers_of_the_job_are_those_of_the_picture() -> None:
    """A dashboard that shows another generation than the API sends people in circles."""
    samples = scraped(view())
    expected = {
        "outrider_job_generation": 3,
        "outrider_job_topology_version": 2,
        "outrider_job_step": 120,
        "outrider_job_world_size": 32,
        "outrider_restart_budget_remaining": 8,
        "outrider_coordinator_messages_refused_total": 7,
        "outrider_coordinator_links_dropped_total": 2,
        "outrider_job_info": 1,
    }
    for name, value in expected.items():
        assert samples[name] == [({"training_job": "job"}, value)], name
    newest = by(samples, "outrider_checkpoint_consistent_step", "prefix")
    assert newest == {"model": 100, "optimizer": 60}


def test_an_unknown_step_is_absent_not_zero() -> None:
    """Zero steps reads as "rewound to the beginning"."""
    assert "outrider_job_step" not in scraped(view(step=None))
    assert scraped(view(step=0))["outrider_job_step"][0][1] == 0


def test_every_bounded_label_is_there_before_anything_happened() -> None:
    """An alert on the increase of a series that appears with value 1 never fires."""
    samples = scraped(view())
    for name, label, values in (
        ("outrider_faults_total", "kind", FaultKind),
        ("outrider_verdicts_total", "outcome", ("attributed", "inconclusive", "agree")),
        ("outrider_incidents_total", "outcome", ("recovered", "superseded", "failed", "stopped")),
        ("outrider_recovery_phase_duration_seconds_count", "phase", tuple(IncidentPhase)[1:]),
    ):
        assert by(samples, name, label) == {str(value): 0 for value in values}, name
    assert samples["outrider_lost_steps_total"][0][1] == 0
    assert by(samples, "outrider_recovery_duration_seconds_count", "mode") == {
        str(mode): 0 for mode in RestartMode
    }
    for name, rows in (
        ("outrider_restarts_total", len(RestartMode) * (len(FaultKind) + 1)),
        ("outrider_escalations_total", 10),
        ("outrider_job_time_seconds_total", len(Account)),
        ("outrider_lost_gpu_seconds_total", len(CAUSES)),
        ("outrider_coordinator_acks_missing_total", 2),
        ("outrider_scout_outcomes_total", 5),
        ("outrider_checkpoint_transitions_total", 4),
    ):
        assert [value for _, value in samples[name]] == [0] * rows, name


def test_closed_incidents_are_counted() -> None:
    """What the page adds up must be what the incidents say."""
    history = History()
    history.note(
        incident(
            outcome=Outcome.RECOVERED,
            finding=Finding(outcome="inconclusive", basis=None, why="tie", culprit=None),
            decision=Decision(mode=RestartMode.PROCESS, reason="r"),
            steps_lost=5,
        ).reached(IncidentPhase.FIRST_STEP, 1004 * 10**9)
    )
    samples = scraped(view(), history)
    assert by(samples, "outrider_faults_total", "kind")["crash"] == 1
    assert by(samples, "outrider_incidents_total", "outcome")["recovered"] == 1
    assert [labels for labels, value in samples["outrider_restarts_total"] if value] == [
        {"training_job": "job", "mode": "process_level_restart", "trigger": "crash"}
    ]
    assert by(samples, "outrider_verdicts_total", "outcome")["inconclusive"] == 1
    assert samples["outrider_lost_steps_total"][0][1] == 5
    buckets = {
        labels["le"]: value
        for labels, value in samples["outrider_recovery_duration_seconds_bucket"]
        if labels["mode"] == "process_level_restart"
    }
    assert (buckets["2.5"], buckets["5.0"], buckets["+Inf"]) == (0, 1, 1)


def test_a_fault_shows_only_while_its_incident_is_open() -> None:
    """An alert that outlives its fault is muted, and then the next fault is muted too."""
    name = "outrider_fault_active_since_timestamp_seconds"
    assert name not in scraped(view())
    assert scraped(view(open_incident=incident()))[name] == [
        (
            {
                "training_job": "job",
                "node": "a",
                "gpu": "",
                "rank": "5",
                "kind": "crash",
                "reason": "signal 9",
                "action": "undecided",
                "incident": "i1",
            },
            1000.0,
        )
    ]


def test_the_named_culprit_replaces_the_first_reporter() -> None:
    """The first to report is often a victim; the label must name who broke."""
    culprit = Culprit(
        kind=FaultKind.GPU_FATAL, node="b", rank=9, local_rank=1, gpu=1, reason="XID 79"
    )
    finding = Finding(outcome="attributed", basis="direct", why="w", culprit=culprit)
    samples = scraped(view(open_incident=incident(finding=finding)))
    labels, _ = samples["outrider_fault_active_since_timestamp_seconds"][0]
    assert (labels["node"], labels["gpu"], labels["rank"]) == ("b", "1", "9")
    assert (labels["kind"], labels["reason"]) == ("gpu_fatal", "XID 79")


@pytest.mark.parametrize("reason", ["x" * 5000, "a\nb\x1b[31mred", 'quo"te\\back', "\u202eevil"])
def test_a_reason_in_a_label_is_short_and_printable(reason: str) -> None:
    """A log line in a label is a new series per fault and may break the page."""
    culprit = Culprit(kind=FaultKind.CRASH, node="a", rank=0, local_rank=0, gpu=None, reason=reason)
    finding = Finding(outcome="attributed", basis="direct", why="w", culprit=culprit)
    picture = view(open_incident=incident(finding=finding), excluded={"a": reason})
    samples = scraped(picture)
    for name in ("outrider_fault_active_since_timestamp_seconds", "outrider_nodes_excluded"):
        (labels, _), *_ = samples[name]
        assert 0 < len(labels["reason"]) <= REASON_CHARS_MAX
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", labels["reason"])


def test_agents_are_counted_by_state_and_the_unheard_are_not_healthy() -> None:
    """Silence counted as "ready" hides a lost node."""
    samples = scraped(view())
    states = by(samples, "outrider_coordinator_agents", "state")
    assert {state: count for state, count in states.items() if count} == {
        "running": 1,
        "ready": 2,
        "unreachable": 1,
    }
    assert set(states) == {*map(str, AgentState), "unknown", "unreachable"}
    seen = by(samples, "outrider_coordinator_agent_last_seen_timestamp_seconds", "node")
    assert set(seen) == {"a", "b", "d"}
    assert samples["outrider_spare_nodes"][0][1] == 1
    assert by(samples, "outrider_nodes_excluded", "node") == {"d": 1}


def compared(rank: int, outcome: str, step: int, **changes: object) -> RankStatus:
    """Return a rank that told what its newest comparison found."""
    status = ScoutStatus(local_rank=rank, step=step, outcome=outcome)
    return RankStatus(rank=rank, local_rank=rank, pid=1, scout=replace(status, **changes))


def test_the_newest_comparison_counts_and_of_one_the_worst() -> None:
    """A healthy rank that has not heard yet would hide what its peers found."""
    before = compared(0, "healthy", 40, checks=4)
    found = compared(1, "corrupt", 50, corrupt_ranks=(1,), checks=5, check_ms=8.0)
    late = compared(2, "healthy", 50, checks=5)
    samples = scraped(view(nodes=(node("a", ranks=(before, found, late)),)))
    outcomes = by(samples, "outrider_scout_outcome", "outcome")
    assert {name for name, value in outcomes.items() if value} == {"corrupt"}
    labels, _ = samples["outrider_scout_rank_named"][0]
    assert (labels["node"], labels["rank"], labels["kind"]) == ("a", "1", "corruption")
    assert samples["outrider_scout_last_check_step"][0][1] == 50
    assert samples["outrider_scout_checks_total"][0][1] == 5
    assert samples["outrider_scout_check_seconds"][0][1] == 0.008


def test_a_checkpoint_is_shown_by_how_far_it_is_trusted() -> None:
    """The newest checkpoint is the wrong one when it was saved from corrupt state."""
    told = compared(0, "corrupt", 100, verified=(60, 80), rejected=(100,))
    pending = PendingCheckpoint(prefix="model", step=120, missing_ranks=(1,), why="w")
    chosen = (CheckpointPointer(prefix="model", step=40, path="/c/40"),)
    picture = view(
        nodes=(node("a", ranks=(told,)),),
        pending_checkpoints=(pending,),
        chosen_checkpoints=chosen,
    )
    steps = {
        (labels["prefix"], labels["trust"]): value
        for labels, value in scraped(picture)["outrider_checkpoint_step"]
    }
    assert steps == {
        ("model", "confirmed"): 100,
        ("model", "unconfirmed"): 120,
        ("model", "recovery_verified"): 80,
        ("model", "rejected"): 100,
        ("model", "resumed_from"): 40,
        ("optimizer", "confirmed"): 60,
        ("optimizer", "recovery_verified"): 60,
    }


def test_nobody_compares_and_nothing_is_claimed() -> None:
    """Silence of a check that does not run reads as health."""
    samples = scraped(view())
    outcomes = by(samples, "outrider_scout_outcome", "outcome")
    assert {name for name, value in outcomes.items() if value} == {"none"}
    assert "outrider_scout_last_check_step" not in samples
    assert samples["outrider_scout_checks_total"][0][1] == 0
