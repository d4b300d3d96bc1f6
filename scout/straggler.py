"""Who is persistently slow: among peers that did the same work, and against their own past.

Spatial: a time above ``max(ratio * median, median + ms)`` of the peers makes a candidate; who is
a candidate in every confirmation round is named.  Temporal: a peer, or the whole group, against
the window of its own clean rounds.  Fast outliers are nobody's fault and never named.
Source: the SCOUT guide, "Stragglers and Communication Localization".
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from scout.consensus import MAD_TO_SIGMA

KEYS_MAX: Final = 256
"""Different computations whose history is kept; the least recently used goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerThresholds:
    """Spatial: ``ratio``, ``ms`` over the median, ``rounds`` in a row.  Temporal: the rest.

    ``window`` clean samples are kept, ``samples_min`` of them are needed; ``temporal_ratio`` and
    ``temporal_sigma`` (from the MAD) are to be exceeded both.
    """

    ratio: float = 1.2
    ms: float = 2.0
    rounds: int = 2
    window: int = 32
    samples_min: int = 5
    temporal_ratio: float = 1.25
    temporal_sigma: float = 4.0


def spatial(times: Mapping[int, float], thresholds: StragglerThresholds) -> tuple[int, ...]:
    """Return the ranks whose time (ms) is slow beside the peers' median.

    A strict majority must be ordinary, or nobody is named: two peers cannot convict each other.
    """
    finite = [value for value in times.values() if math.isfinite(value)]
    if len(finite) < 2:  # noqa: PLR2004 - nobody to compare with
        return ()
    middle = statistics.median_low(finite)
    bound = max(thresholds.ratio * middle, middle + thresholds.ms)
    slow = tuple(sorted(rank for rank, value in times.items() if value > bound))
    return slow if 2 * len(slow) < len(times) else ()


def confirmed(rounds: Sequence[Mapping[int, float]], thresholds: StragglerThresholds) -> set[int]:
    """Return the ranks that are candidates in each of ``rounds``, if those are enough."""
    if len(rounds) < thresholds.rounds:
        return set()
    return set.intersection(*(set(spatial(times, thresholds)) for times in rounds))


@dataclass(slots=True)
class Confirmations:
    """Candidates over successive checks of the same kind: how often in a row."""

    thresholds: StragglerThresholds
    _streaks: dict[str, dict[int, int]] = field(default_factory=dict)

    def note(self, recipe: str, candidates: Sequence[int]) -> tuple[int, ...]:
        """Take in one check's candidates; return who was one in enough checks in a row."""
        before = self._streaks.get(recipe, {})
        now = {rank: before.get(rank, 0) + 1 for rank in candidates}
        self._streaks[recipe] = now
        return tuple(sorted(r for r, times in now.items() if times >= self.thresholds.rounds))


@dataclass(slots=True)
class History:
    """Windows of clean times by computation and peer."""

    thresholds: StragglerThresholds
    _windows: dict[tuple[str, int], deque[float]] = field(default_factory=dict)

    def slow(self, key: str, times: Mapping[int, float]) -> tuple[int, ...]:
        """Return the ranks that are slow against their own past at ``key``."""
        return tuple(sorted(rank for rank, ms in times.items() if self._is_slow(key, rank, ms)))

    def add(self, key: str, times: Mapping[int, float]) -> None:
        """Take in a clean round: one without candidates and without slow ranks."""
        for rank, ms in times.items():
            name = (key, rank)
            window = self._windows.pop(name, None)
            if window is None:
                window = deque(maxlen=self.thresholds.window)
            window.append(ms)
            self._windows[name] = window
        while len(self._windows) > KEYS_MAX * max(1, len(times)):
            del self._windows[next(iter(self._windows))]

    def _is_slow(self, key: str, rank: int, ms: float) -> bool:
        window = self._windows.get((key, rank), ())
        if len(window) < self.thresholds.samples_min:
            return False
        middle = statistics.median(window)
        spread = MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in window)
        above = middle + self.thresholds.temporal_sigma * spread
        return ms > max(self.thresholds.temporal_ratio * middle, above, middle + self.thresholds.ms)
