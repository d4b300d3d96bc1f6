"""What one judgement over a hang looks at: who answered, who did not, who waits for whom.

Arranges snapshots and words places.  It judges nobody.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from scout.clock import SECOND
from scout.snapshot import RankSnapshot, is_stuck, limit_ns, place
from scout.verdict import Evidence
from scout.wait_for import WaitFor, wait_for

SILENCE_NS_MIN: Final = SECOND
"""A beat comes every 0.1 s; ten missed in a row are no scheduling delay."""

OUTLIVED_NS_MIN: Final = 10 * SECOND
"""Others may finish what they are at after a rank died; few steps take longer."""

Position: TypeAlias = tuple[int, int]
"""Collectives entered, then steps completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One snapshot of every rank, arranged.

    ``ranks`` are those that answered, ascending; ``absent`` those that did not, with what was
    last seen of them; ``mute`` are ranks that do not answer and that the others' progress has
    outlived, so that their silence says something of their observer only.  ``stuck`` are the
    ranks that may hold others up.
    """

    ranks: Sequence[RankSnapshot]
    by_rank: Mapping[int, RankSnapshot]
    absent: Mapping[int, RankSnapshot | None]
    mute: frozenset[int]
    members: Sequence[int]
    stall_ns: int
    stuck: frozenset[int]
    waits: WaitFor

    @classmethod
    def of(
        cls, snapshots: Sequence[RankSnapshot], electorate: Collection[int], stall_ns: int
    ) -> Self:
        """Arrange what was seen of the members of ``electorate``."""
        members = sorted(set(electorate))
        known = {it.rank: it for it in snapshots}
        ranks = [known[r] for r in members if r in known and known[r].seen_age_ns is None]
        answered = {it.rank: it for it in ranks}
        missing = {rank: known.get(rank) for rank in members if rank not in answered}
        mute = frozenset(rank for rank, seen in missing.items() if _outlived(seen, ranks, stall_ns))
        stuck = frozenset(it.rank for it in ranks if is_stuck(it, stall_ns))
        return cls(
            ranks=ranks,
            by_rank=answered,
            absent={rank: seen for rank, seen in missing.items() if rank not in mute},
            mute=mute,
            members=members,
            stall_ns=stall_ns,
            stuck=stuck,
            waits=wait_for(ranks, answered.keys() - stuck),
        )


def presence(scene: Scene) -> tuple[Evidence, ...]:
    """Return one piece of evidence for each rank that gave no answer."""
    return tuple(
        Evidence(surface="presence", ranks=(rank,), detail=f"nobody answers for it{_last(seen)}")
        for rank, seen in scene.absent.items()
    )


def vector(scene: Scene) -> tuple[Evidence, ...]:
    """Return where every rank stands."""
    return tuple(
        Evidence(surface="position", ranks=(it.rank,), detail=place(it)) for it in scene.ranks
    )


def silence_ns(it: RankSnapshot, scene: Scene) -> int:
    """Return how old the last beat of a rank may be before it counts as silent."""
    return max(SILENCE_NS_MIN, limit_ns(it, scene.stall_ns) // 2)


def positions_of(ranks: Sequence[RankSnapshot]) -> dict[int, Position]:
    """Return how far each rank got by the default group's count alone.

    The collective comes first because every rank counts it alike, while a step is counted from
    wherever the rank's script began.  What not every rank tells orders nobody.
    """
    by_collective = all(it.collective_seq is not None for it in ranks)
    by_step = all(it.step is not None for it in ranks)
    if by_collective:
        return {it.rank: (it.collective_seq or 0, (it.step or 0) * by_step) for it in ranks}
    return {it.rank: (0, it.step or 0) for it in ranks} if by_step else {}


def _outlived(seen: RankSnapshot | None, ranks: Sequence[RankSnapshot], stall_ns: int) -> bool:
    """Return whether others went on for long after a rank was last heard of.

    Training cannot go on without a member, but it can without that member's observer.
    """
    if seen is None or seen.seen_age_ns is None:
        return False
    ages = [it.progress_age_ns for it in ranks if it.progress_age_ns is not None]
    return bool(ages) and seen.seen_age_ns - min(ages) > max(OUTLIVED_NS_MIN, stall_ns // 2)


def _last(seen: RankSnapshot | None) -> str:
    if seen is None:
        return ""
    return f", last seen {(seen.seen_age_ns or 0) / SECOND:.1f} s ago at {place(seen)}"
