"""The series that say what the job is now: its phase, its nodes, its fault, its recovery."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import InfoMetricFamily, Metric

from coordinator.checkpoint_choice import PendingCheckpoint
from coordinator.health_events import HealthSeverity
from coordinator.incidents import Incident, IncidentPhase
from coordinator.metric_parts import JOB, gauge, number, short, state_set, total
from coordinator.metrics_scout import newest
from coordinator.phases import JobPhase
from coordinator.told_times import CONFIRMED, REJECTED, UNCONFIRMED, VERIFIED
from coordinator.version import version
from coordinator.view import JobView, NodeStatus
from sidecar.api import AgentState
from worker_shim.messages import RestartMode

AGENT_STATES: Final = (*AgentState, "unknown", "unreachable")
"""``unknown``: connected, nothing said yet.  ``unreachable``: no connection."""
LEVELS: Final = ("none", "undecided", *(mode.value for mode in RestartMode), "failed")
RECOVERY_PHASES: Final = (
    "none",
    "localizing",
    "capturing",
    "stopping",
    "waiting_for_nodes",
    "starting",
    "loading",
)
VERDICTS: Final = ("none", "pending", "attributed", "inconclusive", "agree", "preempted")
RESUMED_FROM: Final = "resumed_from"
"""What this run began with."""


def job_families(view: JobView, now_s: float) -> Iterator[Metric]:
    """Yield everything about one moment; ``now_s`` is its wall clock."""
    yield gauge(
        "outrider_build_info",
        "Always 1; which version runs. The sidecar shows it too.",
        ("version", "component"),
        [((version(), "coordinator"), 1)],
    )
    yield from _job(view)
    yield from _checkpoints(view)
    yield from _fault(view, now_s)
    yield from _recovery(view, now_s)
    yield from _nodes(view, now_s)
    yield from _health(view)
    yield from _memory(view)


def recovery_level(view: JobView) -> str:
    """Return how deep the present recovery goes, one of `LEVELS`."""
    if view.phase is JobPhase.FAILED:
        return "failed"
    if view.open_incident is None:
        return "none"
    decision = view.open_incident.decision
    return "undecided" if decision is None or decision.mode is None else decision.mode.value


def recovery_phase(view: JobView) -> str:
    """Return where the present recovery stands, one of `RECOVERY_PHASES`."""
    if view.open_incident is None or view.phase.terminal:
        return "none"
    judged = view.open_incident.at(IncidentPhase.LOCALIZED) is not None
    return {
        JobPhase.LOCALIZING: "capturing" if judged else "localizing",
        JobPhase.STOPPING: "stopping",
        JobPhase.WAITING: "waiting_for_nodes",
        JobPhase.STARTING: "starting",
    }.get(view.phase, "loading")


def _job(view: JobView) -> Iterator[Metric]:
    job = view.job
    text = "Always 1 while the coordinator serves this job."
    yield InfoMetricFamily("outrider_job", text, value={JOB: job})
    yield state_set(
        "outrider_job_phase",
        f"State set: {' '.join(JobPhase)}.",
        "phase",
        job=job,
        states=JobPhase,
        state=view.phase,
    )
    numbers: tuple[tuple[str, str, float | None], ...] = (
        ("job_generation", "The job's run number; every restart raises it.", view.generation),
        (
            "job_topology_version",
            "Raised whenever a rank changes hands.",
            view.topology_version,
        ),
        (
            "job_step",
            "Furthest training step any rank of this generation has completed; absent until then.",
            view.step,
        ),
        ("job_nodes_expected", "Nodes that hold ranks when the job is whole.", view.nnodes),
        (
            "job_world_size",
            "Ranks of the job.",
            view.nnodes * view.nproc_per_node,
        ),
        (
            "restart_budget_remaining",
            "Restarts left in the sliding window before the job is given up.",
            view.restart_budget_remaining,
        ),
    )
    for name, meaning, value in numbers:
        samples = [] if value is None else [((job,), value)]
        yield gauge(f"outrider_{name}", meaning, (JOB,), samples)


def _checkpoints(view: JobView) -> Iterator[Metric]:
    job, newest = view.job, dict[str, int]()
    for pointer in view.complete_checkpoints:
        newest[pointer.prefix] = max(pointer.step, newest.get(pointer.prefix, 0))
    yield gauge(
        "outrider_checkpoint_consistent_step",
        "Newest step whose checkpoint every rank confirmed, for each kind of checkpoint;"
        " absent until there is one.",
        (JOB, "prefix"),
        [((job, prefix), step) for prefix, step in newest.items()],
    )
    pending = {it.prefix: it.step for it in sorted(view.pending_checkpoints, key=_step)}
    rows = [((job, prefix, CONFIRMED), step) for prefix, step in newest.items()]
    rows += [((job, prefix, UNCONFIRMED), step) for prefix, step in pending.items()]
    rows += [((job, it.prefix, RESUMED_FROM), it.step) for it in view.chosen_checkpoints]
    rows += _certified(view)
    yield gauge(
        "outrider_checkpoint_step",
        "Newest step of a kind of checkpoint, by how far it is trusted: `unconfirmed` while a rank"
        " owes its word, `confirmed` by every rank, `recovery_verified` and `rejected` by a"
        " comparison of peers at that step, `resumed_from` when this run began with it.",
        (JOB, "prefix", "trust"),
        rows,
    )


def _certified(view: JobView) -> list[tuple[tuple[str, str, str], int]]:
    """Return the newest confirmed steps that a comparison of peers found good, and found bad."""
    status = newest(view)
    found: dict[tuple[str, str, str], int] = {}
    if status is None:
        return []
    for pointer in view.complete_checkpoints:
        for trust, steps in ((VERIFIED, status.verified), (REJECTED, status.rejected)):
            if pointer.step in steps:
                key = (view.job, pointer.prefix, trust)
                found[key] = max(pointer.step, found.get(key, 0))
    return list(found.items())


def _step(pending: PendingCheckpoint) -> int:
    return pending.step


def _fault(view: JobView, now_s: float) -> Iterator[Metric]:
    incident = view.open_incident
    yield gauge(
        "outrider_fault_active_since_timestamp_seconds",
        "When the fault began. The series exists only while its incident is open.",
        (JOB, "node", "gpu", "rank", "kind", "reason", "action", "incident"),
        [] if incident is None else [(_who(view, incident), _since_s(incident, now_s))],
    )
    verdict = "none"
    if incident is not None:
        verdict = "pending" if incident.finding is None else incident.finding.outcome
    yield state_set(
        "outrider_verdict",
        f"State set, the judgement of the open incident: {' '.join(VERDICTS)}.",
        "verdict",
        job=view.job,
        states=VERDICTS,
        state=verdict,
    )


def _who(view: JobView, incident: Incident) -> tuple[str, ...]:
    culprit = None if incident.finding is None else incident.finding.culprit
    tail = (recovery_level(view), incident.id)
    if culprit is not None:
        gpu, rank = number(culprit.gpu), number(culprit.rank)
        return (view.job, culprit.node, gpu, rank, culprit.kind, short(culprit.reason), *tail)
    if incident.faults:
        first = incident.faults[0]
        gpu, rank = number(first.report.gpu), number(first.report.rank)
        reason = short(first.report.reason)
        return (view.job, first.node, gpu, rank, first.report.kind, reason, *tail)
    return (view.job, "", "", "", "", short(incident.trigger), *tail)


def _since_s(incident: Incident, now_s: float) -> float:
    began = incident.at(IncidentPhase.FAULT) or incident.at(IncidentPhase.DETECTED)
    return now_s if began is None else began / 1e9


def _recovery(view: JobView, now_s: float) -> Iterator[Metric]:
    job, incident = view.job, view.open_incident
    yield state_set(
        "outrider_recovery_level",
        f"State set, how deep the present recovery goes: {' '.join(LEVELS)}.",
        "level",
        job=job,
        states=LEVELS,
        state=recovery_level(view),
    )
    yield state_set(
        "outrider_recovery_phase",
        f"State set, where the present recovery stands: {' '.join(RECOVERY_PHASES)}.",
        "phase",
        job=job,
        states=RECOVERY_PHASES,
        state=recovery_phase(view),
    )
    yield gauge(
        "outrider_recovery_in_progress",
        "1 from the detection of a fault to the first step after it.",
        (JOB,),
        [((job,), incident is not None and not view.phase.terminal)],
    )
    yield gauge(
        "outrider_recovery_started_timestamp_seconds",
        "When the present recovery began; absent while there is none.",
        (JOB,),
        [] if incident is None else [((job,), _since_s(incident, now_s))],
    )


def _nodes(view: JobView, now_s: float) -> Iterator[Metric]:
    job = view.job
    states = Counter(_state(node) for node in view.nodes)
    yield gauge(
        "outrider_coordinator_agents",
        "Sidecars by the state they reported last; `unknown` has said nothing yet,"
        " `unreachable` has no connection.",
        (JOB, "state"),
        [((job, state), states[state]) for state in AGENT_STATES],
    )
    yield gauge(
        "outrider_coordinator_agent_last_seen_timestamp_seconds",
        "When the coordinator last heard from a node.",
        (JOB, "node"),
        [
            ((job, node.node), now_s - node.last_heard_age_s)
            for node in view.nodes
            if node.last_heard_age_s is not None
        ],
    )
    idle = [
        node
        for node in view.nodes
        if node.connected and node.group_rank is None and node.excluded is None
    ]
    yield gauge(
        "outrider_spare_nodes",
        "Connected nodes that stand by without a rank and could take one.",
        (JOB,),
        [((job,), len(idle))],
    )
    yield gauge(
        "outrider_nodes_excluded",
        "1 for a node that gets no ranks any more.",
        (JOB, "node", "reason"),
        [((job, node, short(reason)), 1) for node, reason in view.excluded.items()],
    )


def _memory(view: JobView) -> Iterator[Metric]:
    job = view.job
    yield gauge(
        "outrider_node_offender_score",
        "Strikes of a node over all jobs, each weighted by its cause and halved with time.",
        (JOB, "node"),
        [((job, record.node), record.score) for record in view.offenders],
    )
    yield gauge(
        "outrider_observed_detections",
        "What detectors on probation would have stopped the job for, by what became of it.",
        (JOB, "kind", "verdict"),
        [
            ((job, score.kind, verdict), count)
            for score in view.observed_scores
            for verdict, count in (
                ("confirmed", score.confirmed),
                ("false_alarm", score.false_alarms),
                ("pending", score.pending),
            )
        ],
    )


def _health(view: JobView) -> Iterator[Metric]:
    job = view.job
    yield total(
        "outrider_node_health_events",
        "Words of others about nodes' health (`POST /v1/health-events`); `healthy` takes one back.",
        (JOB, "severity"),
        [((job, severity), view.health_counts.get(severity, 0)) for severity in HealthSeverity],
    )
    standing = {
        (job, notice.node, short(notice.source), notice.severity): 1 for notice in view.health
    }
    yield gauge(
        "outrider_node_health_standing",
        "1 for what a source says of a node's health, as long as it stands.",
        (JOB, "node", "source", "severity"),
        list(standing.items()),
    )


def _state(node: NodeStatus) -> str:
    if not node.connected:
        return "unreachable"
    return "unknown" if node.state is None else node.state
