"""A verdict as whoever acts on it reads it: one JSON object with a version.

Vocabulary only.  ``time`` is wall clock, because a report outlives the process that made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from scout.verdict import Agree, Attributed, Basis, Inconclusive, Verdict

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs.  ``gpu`` is the physical device index where known."""

    rank: int
    host: str
    local_rank: int
    gpu: int | None = None


def _placed(rank: int, places: Mapping[int, Place]) -> Mapping[str, Any]:
    """Return where a rank runs; of one that never told, the same fields with nothing in them."""
    unknown = {"rank": rank, "host": None, "local_rank": None, "gpu": None}
    return asdict(places[rank]) if rank in places else unknown


def outcome(verdict: Verdict) -> str:
    """Return the verdict's case as one word."""
    match verdict:
        case Agree():
            return "agree"
        case Attributed():
            return "attributed"
        case Inconclusive():
            return "inconclusive"


def confidence(basis: Basis | str | None, named: int) -> str:
    """Return how far a finding may be acted upon without a look at the evidence.

    ``high``: the machine says it of one rank, or one rank is waited for and waits for nobody.
    ``medium``: values were compared and a strict majority agrees, or several ranks are named.
    ``none``: nobody is named.
    """
    if basis is None or not named:
        return "none"
    return "high" if named == 1 and basis in (Basis.DIRECT, Basis.CAUSAL) else "medium"


def report(
    verdict: Verdict,
    *,
    run: str,
    generation: int,
    at_ns: int,
    reporter: int,
    places: Sequence[Place],
) -> Mapping[str, Any]:
    """Return the report of ``verdict`` as plain JSON values.

    ``at_ns`` is nanoseconds since the epoch.  The same verdict of the same run has the same id,
    whoever of the observers reports it.
    """
    ranks = verdict.ranks if isinstance(verdict, Attributed) else ()
    basis = verdict.basis if isinstance(verdict, Attributed) else None
    where = {place.rank: place for place in places}
    named = "-".join(str(rank) for rank in ranks) or outcome(verdict)
    return {
        "schema_version": SCHEMA_VERSION,
        "id": f"{run}-{generation}-hang-{named}",
        "time_ns": at_ns,
        "run": run,
        "generation": generation,
        "reporter": reporter,
        "kind": "hang",
        "outcome": outcome(verdict),
        "ranks": [_placed(rank, where) for rank in ranks],
        "basis": basis,
        "confidence": confidence(basis, len(ranks)),
        "why": verdict.why,
        "evidence": [asdict(item) for item in verdict.evidence],
    }
