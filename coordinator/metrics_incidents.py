"""The newest incidents as series, for tables that show text: labels carry it, values say 1.

An incident's id is a label here and nowhere else.  That is bounded by how many incidents are
shown and how much of each: whoever wants all of it opens the incident's page.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.metrics_core import Metric

from coordinator.history import kind_of, milestones
from coordinator.incidents import Incident
from coordinator.metric_parts import JOB, gauge, number, short
from coordinator.positions import marks
from coordinator.view import JobView
from coordinator.wording import rank_list
from scout.snapshot import RankSnapshot

POSITIONS_MAX: Final = 64
"""Ranks whose position is shown; the marked ones are always among them."""
STACKS_MAX: Final = 16
EVIDENCE_MAX: Final = 20


def incident_families(view: JobView, closed: Sequence[Incident]) -> Iterator[Metric]:
    """Yield the series of the closed incidents and of the open one."""
    shown = [*closed, *([] if view.open_incident is None else [view.open_incident])]
    job = view.job
    yield gauge(
        "outrider_incident_info",
        "Always 1; the newest incidents in words.",
        (JOB, "incident", "outcome", "verdict", "kind", "node", "rank", "gpu", "reason", "mode"),
        [(_words(job, it), 1) for it in shown],
    )
    yield gauge(
        "outrider_incident_milestone_timestamp_seconds",
        "When an incident reached a milestone: fault detected localized captured stopped decided"
        " assigned started first_step.",
        (JOB, "incident", "milestone"),
        [((job, it.id, phase), at_ns / 1e9) for it in shown for phase, at_ns in milestones(it)],
    )
    yield gauge(
        "outrider_incident_decision_info",
        "Always 1; why an incident was mended as it was.",
        (JOB, "incident", "mode", "reason"),
        [
            ((job, it.id, it.depth or "", short(it.decision.reason)), 1)
            for it in shown
            if it.decision is not None
        ],
    )
    yield gauge(
        "outrider_incident_evidence_info",
        "Always 1; what speaks for the verdict (`for`) and for somebody else (`against`).",
        (JOB, "incident", "side", "number", "surface", "ranks", "detail"),
        [row for it in shown for row in _evidence(job, it)],
    )
    yield gauge(
        "outrider_incident_rank_position",
        "Training step at which a rank stood when the job stopped, -1 when none was known; the"
        " odd ones are marked.",
        (JOB, "incident", "rank", "node", "collective", "phase", "mark"),
        [row for it in shown for row in _positions(job, it)],
    )
    yield gauge(
        "outrider_incident_stack_ranks",
        "Ranks whose main threads stood at the same frame before the stop.",
        (JOB, "incident", "ranks", "frame", "odd"),
        [row for it in shown for row in _stacks(job, it)],
    )


_Row = tuple[tuple[str, ...], float]


def _words(job: str, it: Incident) -> tuple[str, ...]:
    culprit = None if it.finding is None else it.finding.culprit
    reason = culprit.reason if culprit else "" if it.finding is None else it.finding.why
    return (
        job,
        it.id,
        it.outcome,
        "pending" if it.finding is None else it.finding.outcome,
        kind_of(it) or "",
        "" if culprit is None else culprit.node,
        "" if culprit is None else number(culprit.rank),
        "" if culprit is None else number(culprit.gpu),
        short(reason or it.trigger),
        it.depth or "",
    )


def _evidence(job: str, it: Incident) -> Iterator[_Row]:
    if it.finding is None:
        return
    sides = [("for", item) for item in it.finding.evidence]
    sides += [("against", item) for item in it.finding.dissent]
    for place, (side, item) in enumerate(sides[:EVIDENCE_MAX], 1):
        ranks = rank_list(item.ranks) if item.ranks else ""
        yield (
            (job, it.id, side, str(place), short(item.surface), ranks, short(item.detail)),
            1,
        )


def _positions(job: str, it: Incident) -> Iterator[_Row]:
    marked = marks(it)
    ordered = sorted(it.snapshots, key=lambda one: (one.rank not in marked, one.rank))
    for one in ordered[:POSITIONS_MAX]:
        yield _position(job, it.id, one, marked.get(one.rank, ""))


def _position(job: str, incident: str, one: RankSnapshot, mark: str) -> _Row:
    labels = (job, incident, str(one.rank), one.node, number(one.collective_seq))
    step = -1 if one.step is None else one.step
    return ((*labels, one.phase.name.lower(), mark), step)


def _stacks(job: str, it: Incident) -> Iterator[_Row]:
    found: dict[tuple[str, ...], float] = {}
    for group in it.stack_groups[:STACKS_MAX]:
        frame = short(group.frames[0]) if group.frames else ""
        ranks = short(rank_list(group.ranks))
        found[job, it.id, ranks, frame, "odd" if group.odd else ""] = len(group.ranks)
    yield from found.items()
