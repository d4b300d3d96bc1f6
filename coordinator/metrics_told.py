"""The series of what nodes told in passing: trust in checkpoints, and comparisons by outcome."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from coordinator.metric_parts import JOB, gauge, histogram, total
from coordinator.told_times import CHECKED, TRANSITIONS, ToldTimes


def told_families(job: str, told: ToldTimes) -> Iterator[Metric]:
    """Yield the families; every count begins with the coordinator."""
    yield total(
        "outrider_scout_outcomes",
        f"Comparisons of peers by what they found: {' '.join(CHECKED)}. Unlike"
        " `outrider_scout_outcome` it keeps what stopped the job at once.",
        (JOB, "outcome"),
        [((job, outcome), told.checks[outcome]) for outcome in CHECKED],
    )
    yield gauge(
        "outrider_scout_last_check_timestamp_seconds",
        "When a comparison of peers that could be made was told last; absent until then.",
        (JOB,),
        [] if told.checked_ns is None else [((job,), told.checked_ns / 1e9)],
    )
    yield total(
        "outrider_checkpoint_transitions",
        "Checkpoints whose trust changed, from what to what.",
        (JOB, "from", "to"),
        [((job, *turn), told.transitions[turn]) for turn in TRANSITIONS],
    )
    yield gauge(
        "outrider_checkpoint_timestamp_seconds",
        "When the newest checkpoint of a kind became trusted so far; absent for what was so before"
        " this coordinator started.",
        (JOB, "prefix", "trust"),
        [((job, *key), at_ns / 1e9) for key, at_ns in told.reached_ns.items()],
    )
    yield histogram(
        "outrider_checkpoint_confirm_duration_seconds",
        "From the first rank that confirmed a step's checkpoint to the last, as the coordinator"
        " heard them.",
        (JOB,),
        {(job,): told.confirming},
    )
