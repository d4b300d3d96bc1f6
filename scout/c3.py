"""What one comparison of peers looks like to whoever asked for it: status, bitmap, evidence.

A bitmap speaks of positions in a peer group; ``peer_ranks`` turns positions into global ranks.
Evidence is what each peer answered, in the order of the peers, None for one that did not answer.
Source: the SCOUT guide, "Peer Groups and Consensus".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from scout.verdict import Agree, Attributed, Verdict

Answer: TypeAlias = int | float | None


class C3Status(StrEnum):
    """The three outcomes of a comparison."""

    AGREE = "agree"
    ATTRIBUTED = "attributed"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class C3Result:
    """One surface: ``bitmap[i]`` is 1 where peer ``i`` is named, and only when attributed.

    ``why`` is the sentence of the verdict, empty when all agree.
    """

    status: C3Status
    bitmap: tuple[int, ...]
    evidence: tuple[Answer, ...]
    why: str = ""


def c3_result(
    verdict: Verdict, votes: Mapping[int, int | float], peer_ranks: Sequence[int]
) -> C3Result:
    """Return ``verdict`` over ``votes`` (by global rank) in the order of ``peer_ranks``."""
    named = set(verdict.ranks) if isinstance(verdict, Attributed) else set()
    status = C3Status.INCONCLUSIVE
    if isinstance(verdict, Agree):
        status = C3Status.AGREE
    elif named:
        status = C3Status.ATTRIBUTED
    return C3Result(
        status=status,
        bitmap=tuple(int(rank in named) for rank in peer_ranks),
        evidence=tuple(votes.get(rank) for rank in peer_ranks),
        why=verdict.why,
    )


def ranks_of(bitmap: Sequence[int], peer_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the global ranks that a bitmap marks.  Raises `ValueError` on another length."""
    return tuple(rank for bit, rank in zip(bitmap, peer_ranks, strict=True) if bit)


def union(bitmaps: Sequence[Sequence[int]], size: int) -> tuple[int, ...]:
    """Return the bitmap of ``size`` peers that marks whoever one of ``bitmaps`` marks."""
    return tuple(int(any(bitmap[at] for bitmap in bitmaps)) for at in range(size))
