"""Time as every core sees it: monotonic nanoseconds, handed in by whoever drives the core.

Nothing here reads a clock.  An `Instant` of one machine says nothing about another machine's:
between machines only durations ("so long ago") travel.
"""

from typing import Final, NewType

Instant = NewType("Instant", int)
"""Nanoseconds on one machine's monotonic clock."""

Duration = NewType("Duration", int)
"""A span in nanoseconds."""

MILLISECOND: Final = Duration(1_000_000)
SECOND: Final = Duration(1_000_000_000)


def seconds(value: float) -> Duration:
    """Return ``value`` seconds as a `Duration`."""
    return Duration(round(value * SECOND))


def after(now: Instant, span: Duration) -> Instant:
    """Return the instant ``span`` after ``now``."""
    return Instant(now + span)


def since(then: Instant, now: Instant) -> Duration:
    """Return how long ago ``then`` was, never negative."""
    return Duration(max(0, now - then))
