"""The two answers to an inspection, from what the shells saw.

It words messages and decides nothing: the progress goes out at once, the evidence when it is
there, and neither waits for the other.
"""

from collections.abc import Mapping, Sequence

from sidecar.api import EvidenceReport, Inspect, ProgressReport
from sidecar.events import EvidenceTaken, InspectionTaken, TakeInspection
from sidecar.ranks import Worker, with_limits


def look(command: Inspect) -> TakeInspection:
    """Return the effect that `Inspect` asks for."""
    return TakeInspection(round_id=command.round_id, evidence_budget_s=command.evidence_budget_s)


def answer(
    event: InspectionTaken | EvidenceTaken, node: str, workers: Mapping[int, Worker]
) -> ProgressReport | EvidenceReport:
    """Return what ``node`` says of what was seen; ``workers`` know their stall limits."""
    if isinstance(event, EvidenceTaken):
        return EvidenceReport(round_id=event.round_id, node=node, evidence=event.evidence)
    return ProgressReport(
        round_id=event.round_id,
        node=node,
        ranks=with_limits(event.ranks, workers),
        log_tails=event.log_tails,
        evidence_follows=event.evidence_follows,
    )


def by_rank(
    tails: Mapping[int, Sequence[str]], ranks: Mapping[int, int], around: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return last lines by global rank (as text), each with ``around``, which concerns them all.

    ``tails`` is keyed by local rank, ``ranks`` maps a local rank to its global one.
    """
    return {
        str(ranks[local_rank]): (*lines, *around)
        for local_rank, lines in tails.items()
        if local_rank in ranks
    }
