"""One observer's picture of all ranks, and when it is sure enough to report.

Ages grow on the observer's own clock from the moment a word came in; nobody else's clock is
trusted.  A rank whose observer falls silent stays in the picture as a memory.  A verdict is
reported when two looks in a row agree on it, and withdrawn when everybody moves again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from scout.clock import Instant, seconds, since
from scout.hang import judge
from scout.held import is_held, judge_held
from scout.observer.config import ObserverConfig
from scout.observer.words import Word
from scout.report import Place
from scout.snapshot import RankSnapshot, is_overdue
from scout.stages import StageThresholds, StageWatch
from scout.verdict import Agree, Attributed, Inconclusive, Verdict

FRESH_NS: Final = seconds(0.8)
"""Words older than three ticks may be of before the stall: no verdict is built on them."""
LOOKS_MIN: Final = 2
"""Looks in a row that have to agree: words of one moment may be of two different ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A rank's latest word and when it came in."""

    word: Word
    at: Instant


@dataclass(slots=True)
class Rounds:
    """The picture.  Feed it words, ask it at every tick."""

    config: ObserverConfig
    began: Instant
    verdict: Verdict | None = None
    """What is reported now; None while there is nothing to report."""
    _heard: dict[int, Heard] = field(default_factory=dict)
    _pending: tuple[tuple[int, ...], int] = ((), 0)
    _stages: StageWatch = field(init=False)

    def __post_init__(self) -> None:
        self._stages = StageWatch(
            thresholds=StageThresholds(
                data_ns=seconds(self.config.data_timeout_s),
                checkpoint_ns=seconds(self.config.checkpoint_timeout_s),
                ratio=self.config.stage_ratio,
                rounds=self.config.stage_rounds,
            )
        )

    @property
    def stall_ns(self) -> int:
        """Silence that counts as a stall."""
        return seconds(self.config.stall_timeout_s)

    def take(self, word: Word, now: Instant) -> None:
        """Take a rank's word; one that was heard already changes nothing."""
        known = self._heard.get(word.seen.rank)
        if 0 <= word.seen.rank < self.config.world_size and (
            known is None or word.count != known.word.count
        ):
            self._heard[word.seen.rank] = Heard(word=word, at=now)

    def words(self) -> Mapping[int, Word]:
        """Return every rank's latest word."""
        return {rank: heard.word for rank, heard in self._heard.items()}

    def places(self) -> tuple[Place, ...]:
        """Return where the ranks are that were heard of."""
        return tuple(heard.word.place for _, heard in sorted(self._heard.items()))

    def missing(self, now: Instant) -> tuple[int, ...]:
        """Return the ranks that do not answer."""
        limit = seconds(self.config.silent_after_s)
        return tuple(
            rank
            for rank in range(self.config.world_size)
            if (heard := self._heard.get(rank)) is None or since(heard.at, now) > limit
        )

    def is_silent(self, now: Instant) -> bool:
        """Return whether some rank has been silent for long enough to look at everybody often."""
        return any(
            3 * (it.progress_age_ns or 0) > self.stall_ns or is_held(it)
            for it in self._snapshots(now)
            if it.seen_age_ns is None
        )

    def look(self, now: Instant) -> bool:
        """Judge what is known.  Returns True when what is reported has changed."""
        found = self._judge(now)
        named = found.ranks if isinstance(found, Attributed) else ()
        key = named if found is not None else (-1,)
        before, times = self._pending
        self._pending = (key, times + 1 if key == before else 1)
        if self._pending[1] < LOOKS_MIN or _same(found, self.verdict):
            return False
        self.verdict = found
        return True

    def _judge(self, now: Instant) -> Verdict | None:
        """Return the verdict worth a report, None while everybody may go on."""
        everybody = range(self.config.world_size)
        seen = self._snapshots(now)
        answering = [it for it in seen if it.seen_age_ns is None]
        is_joining = since(self.began, now) < seconds(self.config.join_within_s)
        if is_joining and len(self._heard) < self.config.world_size:
            return None
        stalled = any(
            it.progress_age_ns is not None and is_overdue(it, self.stall_ns) for it in answering
        )
        staged = self._stages.observe(answering, everybody)
        if not stalled:
            return judge_held(answering, everybody) or staged
        if not all(self._is_fresh(it.rank, now) for it in answering):
            return self.verdict
        verdict = judge(seen, everybody, self.stall_ns)
        if isinstance(verdict, Agree):
            return staged
        return staged if staged is not None and isinstance(verdict, Inconclusive) else verdict

    def _is_fresh(self, rank: int, now: Instant) -> bool:
        return since(self._heard[rank].at, now) <= FRESH_NS

    def _snapshots(self, now: Instant) -> list[RankSnapshot]:
        silent = seconds(self.config.silent_after_s)
        return [_aged(heard, now, silent) for _, heard in sorted(self._heard.items())]


def _aged(heard: Heard, now: Instant, silent_ns: int) -> RankSnapshot:
    """Return what a word says, as old as it is now.

    A beat is not aged: that an observer is late says nothing of the process that it watches.
    """
    age, seen = since(heard.at, now), heard.word.seen
    return replace(
        seen,
        progress_age_ns=_plus(seen.progress_age_ns, age),
        phase_started_age_ns=_plus(seen.phase_started_age_ns, age),
        seen_age_ns=age if age > silent_ns else None,
    )


def _plus(age_ns: int | None, more_ns: int) -> int | None:
    return None if age_ns is None else age_ns + more_ns


def _same(one: Verdict | None, other: Verdict | None) -> bool:
    """Return whether two verdicts say the same, however old the evidence has become."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Attributed) and isinstance(other, Attributed):
        return one.ranks == other.ranks
    return True
