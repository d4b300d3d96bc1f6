"""The coordinator's numbers, made from one picture of the job at each scrape.

Nothing is counted here: gauges come from the `JobView`, counters from the `History` of closed
incidents.  Every bounded set of labels is complete from the first scrape on, because an alert on
a series that does not exist yet never fires.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from coordinator.health_events import HealthSeverity
from coordinator.history import History
from coordinator.incidents import Incident, IncidentPhase, Outcome
from coordinator.phases import JobPhase
from coordinator.version import version
from coordinator.view import JobView, NodeStatus
from coordinator.wording import one_line
from sidecar.api import AgentState, FaultKind
from worker_shim.messages import RestartMode

REASON_CHARS_MAX: Final = 80
"""Longest reason in a label: enough for a person, too short to carry a log line."""
AGENT_STATES: Final = (*AgentState, "unknown", "unreachable")
"""``unknown``: connected, nothing said yet.  ``unreachable``: no connection."""
CLOSED: Final = tuple(outcome for outcome in Outcome if outcome is not Outcome.OPEN)
VERDICTS: Final = ("attributed", "inconclusive", "agree")
JOB: Final = "training_job"


class JobCollector(Collector):
    """Every metric of one job's coordinator."""

    def __init__(
        self,
        *,
        view: Callable[[], JobView],
        history: History,
        refused: Callable[[], int],
        dropped: Callable[[], int],
    ) -> None:
        self._view = view
        self._history = history
        self._refused = refused
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        """Yield the families, all from one picture."""
        view = self._view()
        yield from _about()
        yield from _job(view)
        yield from _fault(view)
        yield from _nodes(view)
        yield from _health(view)
        yield from _totals(view.job, self._history)
        yield from _durations(view.job, self._history)
        yield _total(
            "outrider_coordinator_messages_refused",
            "Messages of sidecars that could not be read.",
            (JOB,),
            [((view.job,), self._refused())],
        )
        yield _total(
            "outrider_coordinator_links_dropped",
            "Connections ended because the sidecar took nothing.",
            (JOB,),
            [((view.job,), self._dropped())],
        )


class Exposition:
    """The scrape page."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the body and its content type in the format that ``accept`` asks for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _about() -> Iterator[Metric]:
    yield _gauge(
        "outrider_build_info",
        "Version of this component.",
        ("version", "component"),
        [((version(), "coordinator"), 1)],
    )


def _job(view: JobView) -> Iterator[Metric]:
    job = view.job
    yield InfoMetricFamily("outrider_job", "The job this coordinator serves.", value={JOB: job})
    yield _gauge(
        "outrider_job_phase",
        "1 for the phase the job is in.",
        (JOB, "phase"),
        [((job, phase), phase is view.phase) for phase in JobPhase],
    )
    numbers: tuple[tuple[str, str, float | None], ...] = (
        ("job_generation", "Run number, raised by every restart.", view.generation),
        ("job_topology_version", "Raised by every change of ranks.", view.topology_version),
        ("job_step", "Furthest step any rank of this generation completed.", view.step),
        ("job_world_size", "Global ranks.", view.nnodes * view.nproc_per_node),
        ("restart_budget_remaining", "Restarts left in the window.",
         view.restart_budget_remaining),
    )  # fmt: skip
    for name, text, value in numbers:
        samples = [] if value is None else [((job,), value)]
        yield _gauge(f"outrider_{name}", text, (JOB,), samples)
    newest: dict[str, int] = {}
    for pointer in view.complete_checkpoints:
        newest[pointer.prefix] = max(pointer.step, newest.get(pointer.prefix, 0))
    yield _gauge(
        "outrider_checkpoint_consistent_step",
        "Newest step that every rank confirmed.",
        (JOB, "prefix"),
        [((job, prefix), step) for prefix, step in newest.items()],
    )


def _fault(view: JobView) -> Iterator[Metric]:
    incident = view.open_incident
    yield _gauge(
        "outrider_fault_active_since_timestamp_seconds",
        "When the open fault began; exists only while an incident is open.",
        (JOB, "node", "gpu", "rank", "kind", "reason"),
        [] if incident is None else [(_who(view.job, incident), _since_s(incident))],
    )


def _who(job: str, incident: Incident) -> tuple[str, ...]:
    culprit = None if incident.finding is None else incident.finding.culprit
    if culprit is not None:
        gpu, rank = _text(culprit.gpu), _text(culprit.rank)
        return (job, culprit.node, gpu, rank, culprit.kind, _short(culprit.reason))
    if incident.faults:
        first = incident.faults[0]
        gpu, rank = _text(first.report.gpu), _text(first.report.rank)
        return (job, first.node, gpu, rank, first.report.kind, _short(first.report.reason))
    return (job, "", "", "", "", _short(incident.trigger))


def _since_s(incident: Incident) -> float:
    began = incident.at(IncidentPhase.FAULT) or incident.at(IncidentPhase.DETECTED)
    return (time.time_ns() if began is None else began) / 1e9


def _nodes(view: JobView) -> Iterator[Metric]:
    job, now_s = view.job, time.time()
    states = Counter(_state(node) for node in view.nodes)
    yield _gauge(
        "outrider_coordinator_agents",
        "Sidecars by state.",
        (JOB, "state"),
        [((job, state), states[state]) for state in AGENT_STATES],
    )
    yield _gauge(
        "outrider_coordinator_agent_last_seen_timestamp_seconds",
        "When a sidecar was last heard.",
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
    yield _gauge(
        "outrider_spare_nodes",
        "Connected nodes that hold no rank and could take one.",
        (JOB,),
        [((job,), len(idle))],
    )
    yield _gauge(
        "outrider_nodes_excluded",
        "1 for every node that gets no rank any more.",
        (JOB, "node", "reason"),
        [((job, node, _short(reason)), 1) for node, reason in view.excluded.items()],
    )


def _health(view: JobView) -> Iterator[Metric]:
    job = view.job
    yield _total(
        "outrider_node_health_events",
        "Words of others about nodes' health.",
        (JOB, "severity"),
        [((job, severity), view.health_counts.get(severity, 0)) for severity in HealthSeverity],
    )
    standing = {
        (job, notice.node, _short(notice.source), notice.severity): 1 for notice in view.health
    }
    yield _gauge(
        "outrider_node_health_standing",
        "1 for what a source says of a node's health now.",
        (JOB, "node", "source", "severity"),
        list(standing.items()),
    )


def _state(node: NodeStatus) -> str:
    if not node.connected:
        return "unreachable"
    return "unknown" if node.state is None else node.state


def _totals(job: str, history: History) -> Iterator[Metric]:
    tables: tuple[tuple[str, str, str, Iterable[str], Counter[str]], ...] = (
        ("faults", "Faults that stopped the job.", "kind", FaultKind, history.faults),
        ("incidents", "Closed incidents.", "outcome", CLOSED, history.outcomes),
        ("restarts", "Restarts that were decided.", "mode", RestartMode, history.restarts),
        ("verdicts", "Judgements over closed incidents.", "outcome", VERDICTS, history.verdicts),
    )
    for name, text, label, values, counts in tables:
        samples = [((job, value), counts[value]) for value in values]
        yield _total(f"outrider_{name}", text, (JOB, label), samples)
    yield _total(
        "outrider_lost_steps",
        "Training steps done again after restarts.",
        (JOB,),
        [((job,), history.lost_steps)],
    )


def _durations(job: str, history: History) -> Iterator[Metric]:
    phases = HistogramMetricFamily(
        "outrider_recovery_phase_duration_seconds",
        "Time from the milestone before to this one.",
        labels=(JOB, "phase"),
    )
    for phase, histogram in history.phases.items():
        phases.add_metric((job, phase), histogram.cumulative(), histogram.sum_s)
    yield phases
    whole = HistogramMetricFamily(
        "outrider_recovery_duration_seconds",
        "Time from the fault to the first step after it.",
        labels=(JOB,),
    )
    whole.add_metric((job,), history.recoveries.cumulative(), history.recoveries.sum_s)
    yield whole


def _gauge(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], float]]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


def _total(
    name: str, text: str, labels: tuple[str, ...], samples: Sequence[tuple[tuple[str, ...], int]]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


def _short(text: str) -> str:
    return one_line(text, REASON_CHARS_MAX)


def _text(number: int | None) -> str:
    return "" if number is None else str(number)
