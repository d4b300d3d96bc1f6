"""Durations counted per bucket, each bucket with the last incident that fell into it.

A pure value: it knows neither what is measured nor how it is shown.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

RECOVERY_BUCKETS_S: Final = (
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
"""From "faster than a person sees" to "somebody was called and had to drive there"."""
COMMAND_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""From one node on the same machine to a node that is about to be given up."""


@dataclass(frozen=True, slots=True)
class Example:
    """The newest observation of a bucket: which incident it was, and how long that took."""

    incident: str
    value_s: float
    at_ns: int


@dataclass(slots=True)
class Histogram:
    """Durations in seconds; the last bucket has no upper bound."""

    bounds_s: tuple[float, ...] = RECOVERY_BUCKETS_S
    counts: list[int] = field(default_factory=list)
    sum_s: float = 0.0
    examples: dict[int, Example] = field(default_factory=dict)
    """Place of a bucket -> its newest example."""

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds_s) + 1)

    def observe(self, value_s: float, *, incident: str = "", at_ns: int = 0) -> None:
        """Count one duration; with ``incident`` it becomes its bucket's example."""
        place = bisect_left(self.bounds_s, value_s)
        self.counts[place] += 1
        self.sum_s += value_s
        if incident:
            self.examples[place] = Example(incident, value_s, at_ns)

    @property
    def count(self) -> int:
        """Number of durations counted."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return ``(upper bound, count up to it)`` as the exposition format wants them."""
        bounds = [*(str(bound) for bound in self.bounds_s), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))

    def copy(self) -> "Histogram":
        """Return the same numbers, apart from this one."""
        return Histogram(self.bounds_s, list(self.counts), self.sum_s, dict(self.examples))
