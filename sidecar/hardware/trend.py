"""How fast a counter grows, whatever the rhythm in which it is read.

Decides growth since a baseline and growth per minute; a fall means that the counter was reset and
what it shows now is new.  Knows no thresholds and not what is counted.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from scout.clock import Instant, seconds

WINDOW: Final = seconds(60)
SAMPLES_MAX: Final = 64
"""Samples kept per counter; readings more often than a window's 64th part are merged."""


@dataclass(slots=True)
class Growth:
    """One counter.  The first reading is the baseline: what happened before is history."""

    last: float | None = None
    since_baseline: float = 0
    _samples: deque[tuple[Instant, float]] = field(default_factory=deque)

    def add(self, value: float, at: Instant) -> bool:
        """Take a reading.  Returns whether the counter fell, which is a reset of the device."""
        fell = self.last is not None and value < self.last
        if fell:
            self.rebase(at)
            self.since_baseline = value
        elif self.last is not None:
            self.since_baseline += value - self.last
        self.last = value
        self._keep(at)
        return fell

    def rebase(self, at: Instant) -> None:
        """Forget the growth so far, because the device was reset."""
        self.since_baseline = 0
        self._samples.clear()
        self._samples.append((at, 0))

    def per_minute(self, now: Instant) -> float:
        """Return the growth over the last minute.

        Between two readings growth is taken as even, so a gap longer than a minute is averaged.
        Less than a minute of readings is not extrapolated: two errors in a second are two.
        """
        start = now - WINDOW
        earlier: tuple[Instant, float] | None = None
        for at, grown in self._samples:
            if at < start:
                earlier = at, grown
                continue
            if earlier is None:
                return self.since_baseline - grown
            share = (start - earlier[0]) / (at - earlier[0])
            return self.since_baseline - (earlier[1] + (grown - earlier[1]) * share)
        return 0

    def _keep(self, at: Instant) -> None:
        samples = self._samples
        grown = self.since_baseline
        unchanged = len(samples) > 1 and samples[-1][1] == samples[-2][1] == grown
        crowded = len(samples) > 1 and at - samples[-2][0] < WINDOW // SAMPLES_MAX
        if unchanged or crowded:
            samples[-1] = (at, grown)
        else:
            samples.append((at, grown))
        while len(samples) > 2 and at - samples[1][0] >= WINDOW:  # noqa: PLR2004
            samples.popleft()
