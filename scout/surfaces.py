"""From what peers answered on each surface to who is wrong: which disagreement is the cause.

What a rank owns comes before what it computed: a wrong shard makes every member of its shard
group compute something else, and only the comparison of shards says whose it is.  So where state
is convicted anywhere in the job, disagreements of computed surfaces convict nobody else.
Pure; knows names and numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scout import consensus
from scout.c3 import C3Result, C3Status, c3_result, union

OWNED: Final = ("parameter_state", "state.parameters", "state.moments")
"""Surfaces, or their last parts, that compare what ranks own rather than what they computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What every peer answered: surface -> global rank -> digest; silent ranks are missing."""

    peer_ranks: tuple[int, ...]
    votes: Mapping[str, Mapping[int, int]]

    def results(self) -> dict[str, C3Result]:
        """Return the comparison of every surface, each with the whole group as electorate."""
        found = {}
        for surface, votes in self.votes.items():
            verdict = consensus.exact(votes, self.peer_ranks, surface)
            found[surface] = c3_result(verdict, votes, self.peer_ranks)
        return found


def is_owned(surface: str) -> bool:
    """Whether a surface compares what ranks own."""
    return surface.endswith(OWNED)


def named(results: Mapping[str, C3Result], peer_ranks: Sequence[int], *, owned: bool) -> set[int]:
    """Return the ranks that surfaces of one kind convict."""
    bitmaps = [one.bitmap for surface, one in results.items() if is_owned(surface) is owned]
    marked = union(bitmaps, len(peer_ranks))
    return {rank for bit, rank in zip(marked, peer_ranks, strict=True) if bit}


def disagreements(results: Mapping[str, C3Result]) -> tuple[str, ...]:
    """Return the surfaces on which not all agree."""
    return tuple(name for name, one in results.items() if one.status is not C3Status.AGREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Whom a peer group names, by which surfaces, and whom the whole job names."""

    bitmap: tuple[int, ...]
    sources: tuple[str, ...]
    job_ranks: tuple[int, ...]


def blame(
    results: Mapping[str, C3Result],
    peer_ranks: Sequence[int],
    *,
    job_owned: Sequence[int],
    job_computed: Sequence[int],
) -> Blame:
    """Return who is to blame, given whom the whole job's groups convict by each kind of surface."""
    culprits = set(job_owned) or set(job_computed)
    by_owned = bool(job_owned)
    sources = tuple(
        surface
        for surface, one in results.items()
        if one.status is C3Status.ATTRIBUTED
        and any(bit and rank in culprits for bit, rank in zip(one.bitmap, peer_ranks, strict=True))
        and (is_owned(surface) or not by_owned or culprits <= set(peer_ranks))
    )
    return Blame(
        bitmap=tuple(int(rank in culprits) for rank in peer_ranks),
        sources=sources,
        job_ranks=tuple(sorted(culprits)),
    )
