"""One rule on one rank: what its matches make of it.

Decides what a matching line means: progress, a fault, a point of a metric.  Whether silence is a
hang depends on the other ranks too and is decided in `sidecar.logs.evaluator`.
"""

import copy
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from scout.clock import Instant
from sidecar.logs.block import Block
from sidecar.logs.numbers import measured, measured_all, step_number
from sidecar.logs.patterns import Hit, Hits
from sidecar.logs.prefixes import origin
from sidecar.logs.rules import LogRule
from sidecar.logs.verdicts import KINDS, LogState, LogVerdict, line_at, traceback_to
from sidecar.logs.windows import Points

MESSAGE_LINE_CHARS_MAX: Final = 200
"""How much of a matching line stands in the message; the finding carries more."""
METRIC_CHARS_MAX: Final = 40
"""How much of an odd metric a message repeats."""
AGAIN_MAX: Final = 4
"""Further matches in a line that are tried when the first holds no number."""
STEPS_REMEMBERED: Final = 16
"""A step among the last ones is not progress: ranks print the same one, some a little late."""

_WITH_UNIT: Final = frozenset({"step_time", "throughput"})


@dataclass(slots=True)
class Watch:
    """A rule and what has been seen of it.  ``off`` is set by the rule's stop pattern."""

    rule: LogRule
    began: Instant | None = None
    """When it was first watched for, of a rule that came later than the workers."""
    state: LogState = LogState.WAITING
    progress_at: Instant | None = None
    line: str = ""
    step: int | None = None
    off: bool = False
    points: Points | None = None
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))

    def __post_init__(self) -> None:
        if self.rule.limit is not None:
            self.points = Points(self.rule.limit)

    def fork(self) -> "Watch":
        """Return a copy that goes on by itself."""
        other = copy.copy(self)
        other.points = None if self.points is None else self.points.fork()
        other.steps = self.steps.copy()
        return other

    @property
    def over(self) -> bool:
        """True when no line can change it any more."""
        return self.off or self.state is LogState.FAULTED

    def take(
        self, block: Block, hits: Hits, now: Instant, matches: Counter[str]
    ) -> list[LogVerdict]:
        """Take the matching lines of a block, in order; return what turned bad by them."""
        if self._take_all_well(block, hits, now):
            matches[self.rule.name] += len(hits)
            return []
        verdicts = []
        for hit in hits:
            if self.over:
                break
            matches[self.rule.name] += 1
            verdict = self.take_one(block, hit, now)
            if verdict is not None:
                verdicts.append(verdict)
        return verdicts

    def take_one(self, block: Block, hit: Hit, now: Instant) -> LogVerdict | None:
        """Take one matching line."""
        before, group = self.state, self.rule.step_group
        self._advance(None if group is None else [block.data[slice(*hit[1][group])]], now)
        self.line = line_at(block, hit[0])
        self.state, message = self._judge(block, hit)
        if self.state is before or self.state not in KINDS:
            return None
        return self.verdict(message, block, hit[0])

    def verdict(
        self, message: str, block: Block | None = None, position: int = 0, age: int = 0
    ) -> LogVerdict:
        """Return the present state as a verdict."""
        measures = self.state is not LogState.HANGING and self.rule.metric_group is not None
        where = f" at step {self.step}" if measures and self.step is not None else ""
        whole = "" if block is None else block.text(block.data.rfind(b"\n", 0, position) + 1)
        return LogVerdict(
            rule=self.rule.name,
            state=self.state,
            kind=KINDS[self.state],
            message=f"rule {self.rule.name}: {message}{where}",
            line=self.line,
            step=self.step,
            age_ns=age,
            rank=origin(whole).rank,
            block=() if block is None else traceback_to(block, position),
            position=position,
        )

    # --- lines that are well, many at a time ------------------------------------------------

    def _take_all_well(self, block: Block, hits: Hits, now: Instant) -> bool:
        """Take ``hits`` if they change nothing but when the rule was last heard of."""
        rule = self.rule
        if rule.fault_on_match:
            return False
        if rule.metric_group is not None:
            values = self._finite_values(block, hits, rule.metric_group)
            if not values or (self.points is not None and not self.points.all_well(values)):
                return False
        group = rule.step_group
        self._advance(None if group is None else hits.texts(group), now)
        self.line = line_at(block, hits.flat[-hits.width])
        self.state = LogState.HEALTHY
        return True

    def _finite_values(self, block: Block, hits: Hits, group: int) -> list[float]:
        """Return each hit's metric, or nothing if one of them needs a closer look."""
        if self.rule.metric_key in _WITH_UNIT:
            return self._measured_values(block, hits, group)
        texts = hits.texts(group)
        try:
            values = list(map(float, texts))
        except ValueError:
            return []
        # A sum is finite only if every part is.  Python takes 1_0 for a number; rules do not.
        return values if math.isfinite(sum(values)) and b"_" not in b" ".join(texts) else []

    def _measured_values(self, block: Block, hits: Hits, group: int) -> list[float]:
        values = measured_all(self.rule.metric_key or "", block.data, hits.edges(group))
        return values if math.isfinite(sum(values)) else []

    # --- one line ---------------------------------------------------------------------------

    def _advance(self, said: list[bytes] | None, now: Instant) -> None:
        """Take note of when the rule was heard of, and of the steps that its lines said."""
        if said is None:
            self.progress_at = now
            return
        if self.rule.recurring is None:
            self.step = step_number(said[-1])
            self.progress_at = now
            return
        steps = [step_number(text) for text in said[-STEPS_REMEMBERED:]]
        self.step = steps[-1]
        fresh = [step for step in dict.fromkeys(steps) if step not in self.steps]
        if fresh or len(said) > STEPS_REMEMBERED:
            self.progress_at = now
        self.steps.extend(step for step in fresh if step is not None)

    def _value(self, block: Block, hit: Hit) -> tuple[float | None, str]:
        """Return a line's metric and its text.  Of several matches the first number counts.

        Two ranks that write at once leave ``loss: step: 7 loss: 2.1`` in one line.
        """
        group, key, data = self.rule.metric_group, self.rule.metric_key or "", block.data
        assert group is not None
        shown = ""
        for _, spans in tries(self.rule, block, hit):
            start, stop = spans[group]
            if start < 0:
                break
            value = measured(key, data, start, stop)
            text = data[start:stop].decode(errors="replace")
            if value is not None:
                return value, text
            shown = shown or text
        return None, shown

    def _judge(self, block: Block, hit: Hit) -> tuple[LogState, str]:
        """Return what a matching line makes of its rule, and why."""
        rule, points = self.rule, self.points
        value, text = (None, "") if rule.metric_group is None else self._value(block, hit)
        odd = value is not None and not math.isfinite(value)
        if rule.fault_on_match:
            if odd:
                return LogState.FAULTED, f"{rule.metric_name} is {_short(text)}"
            return LogState.FAULTED, f"the output says {self.line[:MESSAGE_LINE_CHARS_MAX]}"
        if rule.metric_group is None:
            return LogState.HEALTHY, ""
        missing = value is None and hit[1][rule.metric_group][0] < 0
        if missing and not rule.metric_required:  # this line holds no metric
            return self.state if self.state is LogState.SLOW else LogState.HEALTHY, ""
        if points is None:
            if odd:
                return LogState.FAULTED, f"{rule.metric_name} is {_short(text)}"
            bad = rule.metric_required and value is None
            why = f"{rule.metric_name} is {_none(text)}"
            return (LogState.SLOW, why) if bad else (LogState.HEALTHY, "")
        if value is None or odd:
            slow = points.push_bad()
            why = _none(text) if value is None else f"{_short(text)}, which is not finite"
        else:
            slow = points.push(value)
            why = f"{_short(text)}, {points.reason()}" if slow else ""
        if not slow:
            return LogState.HEALTHY, ""
        return LogState.SLOW, f"{rule.metric_name} is {why}{points.extent()}"


def tries(rule: LogRule, block: Block, hit: Hit) -> Iterator[Hit]:
    """Yield ``hit`` and the matches behind it in its line."""
    end = block.data.find(b"\n", hit[0])
    again: Hit | None = hit
    for _ in range(AGAIN_MAX):
        if again is None:
            return
        yield again
        again = rule.pattern.in_line(block.data, again[0] + 1, end)


def metric_values(rule: LogRule, block: Block, hit: Hit) -> list[tuple[str, float]]:
    """Return the named metrics that a matching line holds."""
    found: dict[str, float] = {}
    for _, spans in tries(rule, block, hit):
        for name, group in rule.metrics:
            start, end = spans[group]
            value = measured(name, block.data, start, end) if start >= 0 else None
            if value is not None:
                found.setdefault(name, value)
        if all(name in found or spans[group][0] < 0 for name, group in rule.metrics):
            break
    return list(found.items())


def line_step(rule: LogRule, block: Block, hit: Hit) -> int | None:
    """Return the step that a matching line names."""
    if rule.step_group is None:
        return None
    start, end = hit[1][rule.step_group]
    return None if start < 0 else step_number(block.data[start:end])


def _none(text: str) -> str:
    return f"{_short(text)}, which is no number" if text.strip() else "missing from its line"


def _short(text: str) -> str:
    return " ".join(text.split())[:METRIC_CHARS_MAX] or "nothing"


class NamedSteps:
    """The lines of a block that name a step."""

    def __init__(self, block: Block, found: Sequence[tuple[Watch, Hits]]) -> None:
        self._block = block
        self._named = [
            (watch.rule, hits)
            for watch, hits in found
            if watch.rule.step_group is not None and len(hits)
        ]
        self._places: dict[str, list[int]] = {}

    def newest(self, before: int, otherwise: int | None) -> int | None:
        """Return the last step named before a place in the block."""
        latest, step = -1, otherwise
        for rule, hits in self._named:
            places = self._places.get(rule.name)
            if places is None:
                places = self._places[rule.name] = hits.places()
            index = bisect_left(places, before) - 1
            if index >= 0 and places[index] > latest:
                latest = places[index]
                named = line_step(rule, self._block, hits[index])
                step = otherwise if named is None else named
        return step
