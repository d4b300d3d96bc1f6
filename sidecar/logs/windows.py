"""A metric's points over time: which of them violate, and when that is enough.

Decides by the limit of one rule: a value, a multiple of the median of its own history, or a
change per point; some points in a row, or some of the last many.  It knows no line and no clock.
"""

import bisect
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from sidecar.logs.rule_fields import HISTORY_POINTS_MIN
from sidecar.logs.rules import Limit, Operator

_WORDS: Final[Mapping[Operator, str]] = MappingProxyType(
    {
        Operator.GT: "above",
        Operator.LT: "below",
        Operator.EQ: "equal to",
        Operator.GTEQ: "not below",
        Operator.LTEQ: "not above",
    }
)
MEDIAN_POINTS_MIN: Final = 10
"""A ratio is judged from this many points on, or a full history if that is shorter."""


def violates(operator: Operator, value: float, threshold: float) -> bool:
    """Return whether ``value`` is on the wrong side of ``threshold``."""
    match operator:
        case Operator.GT:
            return value > threshold
        case Operator.LT:
            return value < threshold
        case Operator.GTEQ:
            return value >= threshold
        case Operator.LTEQ:
            return value <= threshold
        case Operator.EQ:
            return value == threshold


@dataclass(slots=True)
class Points:
    """The points of one rule on one rank.

    ``reason`` says what the last violation was; it is written when asked for, because most
    points are well.
    """

    limit: Limit
    in_row: int = 0
    _recent: deque[bool] = field(default_factory=deque)
    _violations: int = 0
    _history: deque[float] = field(default_factory=deque)
    _sorted: list[float] = field(default_factory=list)
    _value: float = 0.0
    _against: float = 0.0

    def fork(self) -> "Points":
        """Return a copy that goes on by itself."""
        return replace(
            self,
            _recent=self._recent.copy(),
            _history=self._history.copy(),
            _sorted=self._sorted.copy(),
        )

    def push(self, value: float) -> bool:
        """Take a finite value; return whether the rule is violated enough to be slow."""
        limit = self.limit
        if limit.basis == "metricThreshold":
            self._value, self._against = value, limit.threshold
            bad = violates(limit.operator, value, limit.threshold)
        else:
            bad = self._looks_back(value)
            self._remember(value)
        return self._count(bad=bad)

    def push_bad(self) -> bool:
        """Take a point that is missing, no number or not finite: it always violates."""
        return self._count(bad=True)

    def all_well(self, values: list[float]) -> bool:
        """Take many finite values, if each is well and nothing was amiss before."""
        limit = self.limit
        if limit.basis != "metricThreshold" or self.in_row or limit.window is not None:
            return False
        threshold = limit.threshold
        match limit.operator:
            case Operator.GT:
                return max(values) <= threshold
            case Operator.GTEQ:
                return max(values) < threshold
            case Operator.LT:
                return min(values) >= threshold
            case Operator.LTEQ:
                return min(values) > threshold
            case Operator.EQ:
                return threshold not in values

    def reason(self) -> str:
        """Say how the last finite value violates."""
        limit, words = self.limit, _WORDS[self.limit.operator]
        if limit.basis == "ratioToMedian":
            return (
                f"{words} {limit.threshold:g} times the median of the points "
                f"before it ({self._against:g})"
            )
        if limit.basis == "changePerPoint":
            return (
                f"and changes by {self._value:g} per point over {len(self._history)} points, "
                f"{words} {limit.threshold:g}"
            )
        return f"{words} {limit.threshold:g}"

    def extent(self) -> str:
        """Say how many points violated, when more than one had to."""
        limit = self.limit
        if limit.window is not None:
            return f", and {self._violations} of the last {len(self._recent)} points violated it"
        if limit.data_points > 1:
            return f", and violated it {self.in_row} times in a row"
        return ""

    def _count(self, *, bad: bool) -> bool:
        limit = self.limit
        self.in_row = self.in_row + 1 if bad else 0
        if limit.window is None:
            return self.in_row >= limit.data_points
        self._recent.append(bad)
        self._violations += bad
        if len(self._recent) > limit.window:
            self._violations -= self._recent.popleft()
        return self._violations >= limit.data_points

    def _looks_back(self, value: float) -> bool:
        limit, history = self.limit, self._history
        if limit.basis == "changePerPoint":
            if len(history) + 1 < limit.history:
                return False
            self._value = change_per_point((*history, value)[-limit.history :])
            return violates(limit.operator, self._value, limit.threshold)
        if len(history) < min(limit.history, MEDIAN_POINTS_MIN):
            return False
        self._value, self._against = value, _median(self._sorted)
        # Below zero a multiple points the wrong way, and of zero everything is a multiple.
        return self._against > 0 and violates(
            limit.operator, value, limit.threshold * self._against
        )

    def _remember(self, value: float) -> None:
        self._history.append(value)
        bisect.insort(self._sorted, value)
        if len(self._history) > self.limit.history:
            oldest = self._history.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]


def change_per_point(values: tuple[float, ...]) -> float:
    """Return how fast a series moves: from the median of its first half to that of its second.

    One odd point, however large, moves neither.
    """
    assert len(values) >= HISTORY_POINTS_MIN
    half = len(values) // 2
    first, last = statistics.median(values[:half]), statistics.median(values[-half:])
    change = (last - first) / (len(values) - half)
    return change if math.isfinite(change) else math.copysign(math.inf, change or 1.0)


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return ordered[middle - 1] / 2 + ordered[middle] / 2
