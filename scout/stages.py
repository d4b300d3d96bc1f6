"""Is it the data loader, or checkpoint I/O, in which a rank hangs: stages it passes alone.

No collective orders such a stage, so a rank in it is measured against its peers by three
thresholds: an absolute time, a multiple of what the median rank has spent in the same stage, and
a number of rounds in a row for which both held.  A strict majority of the electorate must be
clear of it; where most are in the stage together, what they share is the cause and nobody is
named.

`StageWatch` is the only state: how many rounds in a row each rank was suspected.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from scout.clock import SECOND
from scout.snapshot import Phase, RankSnapshot, doing, place
from scout.verdict import Attributed, Basis, Evidence

STAGES: Final = (Phase.DATA, Phase.CHECKPOINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageThresholds:
    """When a stage counts as stalled.

    Ten seconds for a batch and a minute for a part of a checkpoint are far beyond what a healthy
    prefetching loader or file system needs; twice the median forgives a stage that is slow for
    everybody; two rounds forgive a single look at a bad moment.
    """

    data_ns: int = 10 * SECOND
    checkpoint_ns: int = 60 * SECOND
    ratio: float = 2.0
    rounds: int = 2

    def absolute_ns(self, stage: Phase) -> int:
        """Return the absolute time of a stage."""
        return self.data_ns if stage is Phase.DATA else self.checkpoint_ns


@dataclass(slots=True, kw_only=True)
class StageWatch:
    """Counts rounds.  Feed it every round's snapshots, in order."""

    thresholds: StageThresholds = field(default_factory=StageThresholds)
    _rounds: dict[tuple[int, Phase], int] = field(default_factory=dict)

    def observe(
        self, ranks: Sequence[RankSnapshot], electorate: Collection[int]
    ) -> Attributed | None:
        """Take one round; return who has been suspected in enough rounds in a row."""
        suspects = {
            (it.rank, stage): it
            for stage in STAGES
            for it in stage_suspects(
                ranks,
                electorate,
                stage,
                self.thresholds.absolute_ns(stage),
                self.thresholds.ratio,
            )
        }
        self._rounds = {key: self._rounds.get(key, 0) + 1 for key in suspects}
        found = [it for key, it in suspects.items() if self._rounds[key] >= self.thresholds.rounds]
        return _attribute(found, len(set(electorate)))


def stalled_stage(
    ranks: Sequence[RankSnapshot], electorate: Collection[int], alone: Collection[int]
) -> Attributed | None:
    """Return who of ``alone`` hangs in a stage that most ranks are clear of.

    ``alone`` are the ranks that are overdue and wait for nobody: the limit that they exceeded is
    the absolute threshold, and being silent for so long is persistence enough.
    """
    ratio = StageThresholds().ratio
    found = [
        it
        for stage in STAGES
        for it in stage_suspects(ranks, electorate, stage, 0, ratio)
        if it.rank in alone
    ]
    return _attribute(found, len(set(electorate)))


def stage_suspects(
    ranks: Sequence[RankSnapshot],
    electorate: Collection[int],
    stage: Phase,
    absolute_ns: int,
    ratio: float,
) -> list[RankSnapshot]:
    """Return the ranks that are in ``stage`` for too long while a strict majority is clear of it.

    A declared limit of a phase takes the place of ``absolute_ns``.
    """
    spent = {it.rank: _spent_ns(it, stage) for it in ranks if it.rank in electorate}
    usual = median(spent.values()) if spent else 0
    suspects = [
        it
        for it in ranks
        if (ns := spent.get(it.rank, 0)) > 0
        and not _may_wait_inside(it)
        and ns >= (absolute_ns if it.phase_limit_ns is None else it.phase_limit_ns)
        and ns > ratio * usual
    ]
    least = min((spent[it.rank] for it in suspects), default=0)
    clear = [ns for ns in spent.values() if ratio * ns < least]
    return suspects if 2 * len(clear) > len(set(electorate)) else []


def _may_wait_inside(it: RankSnapshot) -> bool:
    """Return whether a rank may stand in a collective within its stage, as checkpoints end in one.

    A loader issues none.
    """
    told = bool(it.groups) or it.phase is Phase.DATA
    return not told or any(group.inside for group in it.groups)


def _spent_ns(it: RankSnapshot, stage: Phase) -> int:
    if it.phase is not stage:
        return 0
    age = it.progress_age_ns if it.phase_started_age_ns is None else it.phase_started_age_ns
    return age or 0


def _attribute(found: Sequence[RankSnapshot], members: int) -> Attributed | None:
    if not found:
        return None
    ordered = sorted({it.rank: it for it in found}.values(), key=lambda it: it.rank)
    first = ordered[0]
    spent = _spent_ns(first, first.phase) / SECOND
    return Attributed(
        ranks=tuple(it.rank for it in ordered),
        basis=Basis.MAJORITY,
        why=f"rank {first.rank} has been {doing(first.phase)} for {spent:.1f} s, "
        f"most of {members} ranks are not",
        evidence=tuple(
            Evidence(surface="stage", ranks=(it.rank,), detail=place(it)) for it in ordered
        ),
    )
