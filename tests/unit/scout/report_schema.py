"""Version 1 of the observers' report, field by field, as a reader that knows nothing else has it.

Whoever changes a name, a type or a meaning changes the version with it.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Rank = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]


class Named(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Rank -> host -> GPU; host, local rank and GPU are null where nobody told them."""

    rank: Rank
    host: Text | None
    local_rank: Rank | None
    gpu: Rank | None


class Item(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One observation."""

    surface: Text
    ranks: tuple[Rank, ...]
    detail: Text


class Report(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Every field is required, and there is no other."""

    schema_version: Literal[1]
    id: Text
    time_ns: Annotated[int, Meta(gt=0)]
    run: Text
    generation: Annotated[int, Meta(ge=0)]
    reporter: Rank
    kind: Literal["hang"]
    outcome: Literal["attributed", "inconclusive"]
    ranks: tuple[Named, ...]
    basis: Literal["direct", "causal", "majority"] | None
    confidence: Literal["high", "medium", "none"]
    why: Text
    evidence: tuple[Item, ...]


def read_report(text: str | bytes) -> Report:
    """Return a report.  Raises `msgspec.ValidationError` on the first thing that is not right."""
    report = msgspec.json.decode(text, type=Report, strict=True)
    named = report.outcome == "attributed"
    assert named == bool(report.ranks) == (report.basis is not None)
    assert named == (report.confidence != "none")
    assert len({it.rank for it in report.ranks}) == len(report.ranks)
    return report
