"""What a device's power says about its work: a witness, never a judge.

A device that spins in a collective is as "utilized" as one that computes, and draws a fraction of
the power.  Decides when so little is drawn that it is worth saying beside other evidence.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

READINGS_KEPT: Final = 360
"""Half an hour at the usual rhythm: a hang is looked at long before it has become the habit."""
READINGS_MIN: Final = 12
"""A minute; before that nobody knows what is usual."""
USUAL_WATTS_MIN: Final = 100.0
"""A device that never drew more has not computed."""
USUAL_QUANTILE: Final = 0.75
"""Above the pauses of a healthy job, below its peaks."""
FEW_OF_USUAL: Final = 0.6
LATEST: Final = 2
"""So many readings in a row must be low; one may have met a pause between steps."""


@dataclass(slots=True)
class PowerHistory:
    """One device's readings in watts, in order."""

    _watts: deque[float] = field(default_factory=lambda: deque(maxlen=READINGS_KEPT))

    def add(self, watts: float) -> None:
        """Take a reading."""
        self._watts.append(watts)

    def remark(self) -> str | None:
        """Return how little is drawn now, None while it is what it usually is."""
        if len(self._watts) < READINGS_MIN:
            return None
        ordered = sorted(self._watts)
        usual = ordered[int(USUAL_QUANTILE * (len(ordered) - 1))]
        now = max(list(self._watts)[-LATEST:])
        if usual < USUAL_WATTS_MIN or now >= FEW_OF_USUAL * usual:
            return None
        return f"draws {now:.0f} W, {now / usual:.0%} of its usual {usual:.0f} W"
