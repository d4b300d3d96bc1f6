"""How long silence may last in each phase, learned from the rank's own history.

The job's one limit has to allow the longest thing that any rank ever does.  Most phases are far
quicker, and a rank's own quantiles say so: a phase's limit is a multiple of the 99th percentile
of its silences, within bounds.  A phase that has not been seen often enough has the job's limit,
and so has whatever comes between steps, where a script may do anything without telling.

This module knows ages and phases.  It judges nobody.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from scout.clock import SECOND, Instant
from scout.snapshot import Phase, RankSnapshot

SILENCES_KEPT: Final = 256
"""Silences of one phase that are remembered: the 99th percentile needs a hundred, and a job that
changes its pace is believed a few minutes later."""
SILENCES_MIN: Final = 32
"""Silences of a phase before its limit is believed: more than any warm-up has."""
QUANTILE: Final = 0.99
OVER_LONGEST: Final = 2
"""A limit is at least so many times the longest silence remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePolicy:
    """The bounds of learned limits.  ``most_ns`` is the job's limit; 0 switches stalls off."""

    most_ns: int
    least_ns: int = 60 * SECOND
    factor: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The silence allowed to a rank now; ``armed`` when it was learned or declared."""

    ns: int
    armed: bool


@dataclass(slots=True)
class LearnedPhases:
    """One rank's history.  Show it every look at the rank, in order."""

    _silences: dict[Phase, deque[int]] = field(default_factory=dict)
    _phase: Phase | None = None
    _progress_at: Instant | None = None

    def learn(self, seen: RankSnapshot, now: Instant) -> None:
        """Take one look.

        Between two looks a rank may have moved many times.  The time from its last movement at
        the one to its last movement at the other is no shorter than any silence between.
        """
        if seen.progress_age_ns is None:
            return
        progress_at = Instant(now - seen.progress_age_ns)
        before, phase = self._progress_at, self._phase
        if before is not None and phase is not None and progress_at > before:
            kept = self._silences.setdefault(phase, deque(maxlen=SILENCES_KEPT))
            kept.append(progress_at - before)
        self._progress_at, self._phase = progress_at, seen.phase

    def usual_ns(self, seen: RankSnapshot) -> int | None:
        """Return the longest silence remembered of the phase that ``seen`` is in.

        None while the phase has not been seen often enough, or is none.
        """
        kept = self._silences.get(seen.phase, deque())
        known = seen.phase is not Phase.UNKNOWN and len(kept) >= SILENCES_MIN
        return max(kept) if known else None

    def limit(self, seen: RankSnapshot, policy: DeadlinePolicy) -> Limit:
        """Return the limit for the phase that ``seen`` is in."""
        if seen.phase_limit_ns is not None:
            return Limit(ns=seen.phase_limit_ns, armed=True)
        kept = self._silences.get(seen.phase, deque())
        learns = policy.least_ns < policy.most_ns and seen.phase is not Phase.UNKNOWN
        if not learns or len(kept) < SILENCES_MIN:
            return Limit(ns=policy.most_ns, armed=False)
        ordered = sorted(kept)
        usual = ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))]
        wanted = max(round(policy.factor * usual), OVER_LONGEST * ordered[-1])
        return Limit(ns=min(policy.most_ns, max(policy.least_ns, wanted)), armed=True)
