"""The series of the ranks' comparison with one another, from what they told last."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from coordinator.metric_parts import JOB, gauge
from coordinator.view import JobView


def scout_families(view: JobView) -> Iterator[Metric]:
    """Yield what comparisons found; nothing where ranks do not compare themselves."""
    job = view.job
    told = [
        (node.node, rank.rank, rank.scout)
        for node in view.nodes
        for rank in node.ranks
        if rank.scout is not None
    ]
    slow = {rank for _, _, scout in told for rank in scout.straggler_ranks}
    verified = [step for _, _, scout in told for step in scout.verified]
    yield gauge(
        "outrider_scout_checks",
        "Comparisons of this rank with its peers since its process began, and those that could "
        "not run.",
        (JOB, "rank", "result"),
        [
            ((job, str(rank), result), count)
            for _, rank, scout in told
            for result, count in (
                ("ran", scout.checks - scout.checks_not_run),
                ("not_run", scout.checks_not_run),
            )
        ],
    )
    yield gauge(
        "outrider_scout_check_seconds",
        "What the newest comparison took.",
        (JOB, "rank"),
        [((job, str(rank)), scout.check_ms / 1000) for _, rank, scout in told],
    )
    yield gauge(
        "outrider_scout_worst_case_steps",
        "In how many steps every layer, parameter and moment is compared once.",
        (JOB,),
        [((job,), max(scout.worst_case_steps for _, _, scout in told))] if told else [],
    )
    yield gauge(
        "outrider_scout_verified_step",
        "The newest step whose state every rank found like its peers'.",
        (JOB,),
        [((job,), max(verified))] if verified else [],
    )
    yield gauge(
        "outrider_scout_straggler",
        "1 for a rank that its peers find persistently slower at the same computation.",
        (JOB, "node", "rank"),
        [((job, node, str(rank)), int(rank in slow)) for node, rank, _ in told],
    )
