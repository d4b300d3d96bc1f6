"""The series of the ranks that a node runs now; a rank that moves takes its series along.

Ages are measured on the node's own monotonic clock at the moment of the scrape, so that a clock
that is wrong on one machine makes no rank look silent.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from prometheus_client.metrics_core import Metric

from scout.snapshot import Phase, RankSnapshot
from sidecar.api import CheckpointConfirmation, RankStatus, StatusReport
from sidecar.lifecycle import TransitionTable

COORDINATES: Final = ("dp", "tp", "pp", "cp", "ep")
"""Labels of a rank's place in the parallel layout that are shown; a script may tell others."""

Rows: TypeAlias = dict[tuple[str, ...], float]
Gauge: TypeAlias = Callable[[str, str, tuple[str, ...], Rows], Metric]


def rank_families(
    report: StatusReport, seen: Sequence[RankSnapshot], gpus: Sequence[int], gauge: Gauge
) -> Iterator[Metric]:
    """Yield the families; ``gpus`` are the node's devices in the order of local ranks."""
    ranks = report.ranks
    yield gauge(
        "outrider_rank_info",
        "Always 1; where a rank runs and its place in the parallel layout, as far as it told.",
        ("rank", "local_rank", "gpu", *COORDINATES),
        {_info(rank, gpus): 1.0 for rank in ranks},
    )
    for name, text, rows in (
        (
            "outrider_rank_step",
            "Steps a rank has completed; absent until the first.",
            _known(ranks, lambda it: None if it.step is None else float(it.step)),
        ),
        (
            "outrider_rank_progress_age_seconds",
            "How long ago a rank last moved; absent while that is not known.",
            _known(ranks, lambda it: _seconds(it.progress_age_ns)),
        ),
        (
            "outrider_rank_stalled",
            "1 while a rank is silent for longer than its stall limit.",
            _known(ranks, lambda it: float(it.stalled)),
        ),
        (
            "outrider_stall_deadline_seconds",
            "Silence after which a rank counts as stalled in the phase that it is in.",
            _known(ranks, lambda it: _seconds(it.stall_limit_ns)),
        ),
        (
            "outrider_stall_deadline_armed",
            (
                "1 when that time was learned from the rank's history or declared by its script,"
                " 0 while it is the job's longest."
            ),
            _known(ranks, lambda it: None if it.stall_limit_ns is None else float(it.stall_armed)),
        ),
    ):
        yield gauge(name, text, ("rank",), rows)
    yield _at_barrier(ranks, gauge)
    named = ", ".join(f"{phase.value} {phase.name.lower()}" for phase in Phase)
    yield gauge(
        "outrider_rank_phase",
        f"What a rank does, by the page it writes: {named}.",
        ("rank",),
        {(str(it.rank),): float(it.phase) for it in seen},
    )
    yield gauge(
        "outrider_rank_checkpoint_step",
        "Newest step whose checkpoint a rank confirmed.",
        ("rank", "prefix"),
        _confirmed(report.checkpoints),
    )


def _at_barrier(ranks: Iterable[RankStatus], gauge: Gauge) -> Metric:
    return gauge(
        "outrider_ranks_at_barrier",
        "Ranks at the barrier of an in-process restart, waiting for a generation to run.",
        (),
        {(): float(sum(it.at_barrier for it in ranks))},
    )


def _info(rank: RankStatus, gpus: Sequence[int]) -> tuple[str, ...]:
    gpu = str(gpus[rank.local_rank]) if rank.local_rank < len(gpus) else ""
    places = (rank.labels.get(name, "") for name in COORDINATES)
    return (str(rank.rank), str(rank.local_rank), gpu, *places)


def _known(ranks: Iterable[RankStatus], value: Callable[[RankStatus], float | None]) -> Rows:
    found = ((str(rank.rank), value(rank)) for rank in ranks)
    return {(rank,): number for rank, number in found if number is not None}


def _seconds(span_ns: int | None) -> float | None:
    return None if span_ns is None else span_ns / 1e9


def _confirmed(checkpoints: Iterable[CheckpointConfirmation]) -> Rows:
    newest: Rows = {}
    for item in checkpoints:
        for rank in item.ranks:
            key = (str(rank), item.prefix)
            newest[key] = max(float(item.step), newest.get(key, 0.0))
    return newest


def edges(tables: Iterable[TransitionTable]) -> tuple[tuple[str, str], ...]:
    """Return every (from, to) of transition tables, in order, without standing still."""
    found = {
        (before.value, after.value)
        for table in tables
        for (before, _), after in table.items()
        if before != after
    }
    return tuple(sorted(found))
