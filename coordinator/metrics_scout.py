"""The series that say what comparing peers found: outcome, who is named, how often, how dear.

Every rank of a job says the same of one check; where ranks differ, because some have not said it
yet, the newest check counts, and of one check the worst outcome.
"""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.metrics_core import Metric

from coordinator.metric_parts import JOB, Samples, gauge, state_set, total
from coordinator.told_times import CHECKED
from coordinator.view import JobView
from worker_shim.messages import ScoutStatus

NONE: Final = "none"
OUTCOMES: Final = (NONE, *CHECKED)
"""From nothing known to the worst; ``none`` while nobody compares."""
_NUMBERS: Final[tuple[tuple[str, str, Callable[[ScoutStatus], float]], ...]] = (
    ("last_check_step", "Step of the newest comparison of peers.", lambda it: it.step),
    (
        "check_seconds",
        "How long the newest comparison held its rank up.",
        lambda it: it.check_ms / 1e3,
    ),
    (
        "check_interval_steps",
        "Steps between two comparisons, 0 while that is not known.",
        lambda it: it.interval,
    ),
    (
        "worst_case_steps",
        "In how many steps every layer, parameter and moment is compared once, 0 while not known.",
        lambda it: it.worst_case_steps,
    ),
)


def scout_families(view: JobView) -> Iterator[Metric]:
    """Yield what the newest check found; numbers are absent while nobody compares."""
    job, status = view.job, newest(view)
    yield state_set(
        "outrider_scout_outcome",
        f"State set, what the newest comparison of peers found: {' '.join(OUTCOMES)}.",
        "outcome",
        job=job,
        states=OUTCOMES,
        state=NONE if status is None else status.outcome,
    )
    yield gauge(
        "outrider_scout_rank_named",
        "1 for a rank that the newest comparison names, by what for: corruption straggler.",
        (JOB, "node", "rank", "kind"),
        [] if status is None else _named(view, status),
    )
    for name, text, value in _NUMBERS:
        samples: Samples = [] if status is None else [((job,), value(status))]
        yield gauge(f"outrider_scout_{name}", text, (JOB,), samples)
    verified = [] if status is None else list(status.verified)
    yield gauge(
        "outrider_scout_verified_step",
        "Newest step whose state every rank found like its peers'.",
        (JOB,),
        [((job,), max(verified))] if verified else [],
    )
    for name, text, count in (
        ("checks", "Comparisons of peers that were made by the present processes.", "checks"),
        (
            "checks_not_run",
            "Comparisons that could not be made, because not every peer was ready alike.",
            "checks_not_run",
        ),
    ):
        counted = 0 if status is None else getattr(status, count)
        yield total(f"outrider_scout_{name}", text, (JOB,), [((job,), counted)])


def newest(view: JobView) -> ScoutStatus | None:
    """Return what the newest check of any rank found, the worst where ranks differ."""
    told = [rank.scout for node in view.nodes for rank in node.ranks if rank.scout is not None]
    return max(told, key=lambda it: (it.step, _place(it.outcome)), default=None)


def _place(outcome: str) -> int:
    return OUTCOMES.index(outcome) if outcome in OUTCOMES else len(OUTCOMES)


def _named(view: JobView, status: ScoutStatus) -> Samples:
    nodes = {rank.rank: node.node for node in view.nodes for rank in node.ranks}
    kinds = (("corruption", status.corrupt_ranks), ("straggler", status.straggler_ranks))
    return [
        ((view.job, nodes.get(rank, ""), str(rank), kind), 1)
        for kind, ranks in kinds
        for rank in ranks
    ]
