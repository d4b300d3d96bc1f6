"""A finished log, judged as if it were being written: which line changed which rule.

Decides what time a line had and which line changed a rule's state; what a line means is decided
where a job's own output is judged.  It opens no file.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from scout.clock import SECOND, Instant
from sidecar.logs.block import Block
from sidecar.logs.evaluator import LogEvaluator, LogState, LogVerdict
from sidecar.logs.numbers import measured_all
from sidecar.logs.patterns import Hits
from sidecar.logs.pieces import BEFORE_BYTES, Piece
from sidecar.logs.records import SILENCE
from sidecar.logs.rules import LogRule
from sidecar.logs.timestamps import Clock
from sidecar.logs.verdicts import KINDS
from sidecar.logs.watch import line_step, metric_values

LOOK_BACK_LINES: Final = 50
"""A line without a time has that of the one before it, or of one at most so many lines up."""
_BAD: Final = frozenset(KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A rule's state changed.  ``at_s`` is seconds since 1970, as far as the log tells."""

    rule: str
    before: LogState
    after: LogState
    message: str
    line: str
    line_number: int
    at_s: float | None
    step: int | None = None

    @property
    def opens_incident(self) -> bool:
        """Whether the job would be stopped and looked at because of this."""
        return self.after in _BAD


@dataclass(slots=True)
class Series:
    """A metric over the whole log.  ``points`` counts finite values."""

    metric: str
    rule: str
    points: int = 0
    not_finite: int = 0
    first: float | None = None
    last: float | None = None
    lowest: float = 0.0
    highest: float = 0.0
    total: float = 0.0
    first_step: int | None = None
    last_step: int | None = None

    def add(self, values: list[float], first_step: int | None, last_step: int | None) -> None:
        """Take more values, in order, and the steps of their first and last line."""
        self.first_step = first_step if self.first_step is None else self.first_step
        self.last_step = last_step if last_step is not None else self.last_step
        if not math.isfinite(sum(values)):
            finite = [value for value in values if math.isfinite(value)]
            self.not_finite += len(values) - len(finite)
            values = finite
        if not values:
            return
        if self.first is None:
            self.first = self.lowest = self.highest = values[0]
        self.points += len(values)
        self.last = values[-1]
        self.lowest = min(self.lowest, *values)
        self.highest = max(self.highest, *values)
        self.total += sum(values)


@dataclass(slots=True)
class _Times:
    """When each line was written, in the order of blocks.  A log's time never runs back."""

    clock: Clock = field(default_factory=Clock)
    began_s: float | None = None
    now_s: float | None = None
    _block: Block | None = None
    _known: dict[int, float | None] = field(default_factory=dict)

    def enter(self, block: Block) -> None:
        self._block, self._known = block, {}

    def leave(self, block: Block) -> None:
        """Go on behind ``block``."""
        self.now_s = self.at(len(block.data) - 1)

    def at(self, position: int) -> float | None:
        """Return the time of the line at ``position`` of the block, in seconds."""
        block = self._block
        assert block is not None
        data = block.data
        start = data.rfind(b"\n", 0, max(position, 0)) + 1
        passed: list[int] = []
        found = self.now_s
        for _ in range(LOOK_BACK_LINES):
            if start in self._known:
                found = self._known[start]
                break
            own = self.clock.read(block.line(start))
            passed.append(start)
            if own is not None:
                found = own if self.now_s is None else max(own, self.now_s)
                break
            if start == 0:
                break
            start = data.rfind(b"\n", 0, start - 1) + 1
        self._known.update(dict.fromkeys(passed, found))
        if self.began_s is None:
            self.began_s = found
        return found

    def instant(self, at_s: float | None) -> Instant:
        """Return ``at_s`` as nanoseconds since the log's first time."""
        if at_s is None or self.began_s is None:
            return Instant(0)
        return Instant(max(0, round((at_s - self.began_s) * SECOND)))


class Backtest:
    """Rules over one log.  Show it the pieces in order, then `finish`."""

    def __init__(self, rules: Sequence[LogRule]) -> None:
        self.rules = tuple(rules)
        self._by_name = {rule.name: rule for rule in rules}
        self._found: list[tuple[LogRule, Block, Hits]] = []
        self._evaluator = LogEvaluator(rules, Instant(0), on_hits=self._note)
        self._timed = any(_needs_time(rule) for rule in rules)
        self._recovers = any(_recovers(rule) for rule in rules)
        self._joins = any(rule.join_indented for rule in rules)
        self._times = _Times()
        self._last_number = 1
        self.lines = 0
        self.series: dict[tuple[str, str], Series] = {}
        """The metrics of the rules' named groups, by rule and metric."""

    @property
    def matches(self) -> dict[str, int]:
        """Lines that matched each rule."""
        return {rule.name: self._evaluator.matches[rule.name] for rule in self.rules}

    @property
    def began_s(self) -> float | None:
        """The first time in the log."""
        return self._times.began_s

    @property
    def ended_s(self) -> float | None:
        """The last time in the log."""
        return self._times.now_s

    def states(self) -> dict[str, LogState]:
        """Return each rule's present state."""
        return self._evaluator.states()

    def show(self, piece: Piece) -> list[Change]:
        """Judge a piece; return what changed, in order."""
        block = piece.block
        if not block.data:
            return []
        self._times.enter(block)
        if self.began_s is None:
            self._find_beginning(block)
        kept = self._evaluator.fork() if self._recovers else None
        before = self.states()
        verdicts = self._judge(block)
        if kept is not None and self._needs_closer_look(before, verdicts):
            self._evaluator = kept
            changes = self._line_by_line(piece)
        else:
            changes = self._changes(piece, before, verdicts)
        self._keep_found()
        self._times.leave(block)
        self.lines += block.lines
        self._last_number = piece.first_line + piece.raw.count(b"\n")
        return changes

    def finish(self) -> list[Change]:
        """Judge the silence at the end, as far as the log's own time tells of one."""
        before = self.states()
        # A record of several lines is over when nothing was added to it for so long.
        now = Instant(self._times.instant(self.ended_s) + SILENCE)
        now_s = None if self.ended_s is None else self.ended_s + SILENCE / SECOND
        verdicts = self._evaluator.timer(now)
        self._keep_found()
        return [self._change(verdict, before, self._last_number, now_s) for verdict in verdicts]

    # --- judging ----------------------------------------------------------------------------

    def _judge(self, block: Block) -> list[LogVerdict]:
        times = self._times
        self._found = []
        now = times.instant(times.at(len(block.data) - 1))
        if not self._timed:
            return self._evaluator.judge(block, now)
        offset = 0

        def when(part: Block, place: int) -> Instant:
            # A part is cut from the block, and the text before it tells how far in.
            nonlocal offset
            offset = len(part.before) - len(block.before) if part is not block else 0
            return times.instant(times.at(offset + place))

        return self._evaluator.judge(block, now, when=when)

    def _needs_closer_look(
        self, before: dict[str, LogState], verdicts: Sequence[LogVerdict]
    ) -> bool:
        """Return whether a rule may have recovered in a line that only looking can tell."""
        if any(verdict.state is not LogState.FAULTED for verdict in verdicts):
            return True
        after = self.states()
        return any(
            state in (LogState.SLOW, LogState.HANGING) and after[name] is not state
            for name, state in before.items()
        )

    def _line_by_line(self, piece: Piece) -> list[Change]:
        changes: list[Change] = []
        everything: list[tuple[LogRule, Block, Hits]] = []
        for start in self._starts(piece.block):
            data = piece.block.data
            end = data.find(b"\n", start) + 1
            earlier = data[max(0, start - BEFORE_BYTES) : start]
            line = Block(data[start:end], earlier)
            at_s = self._times.at(start)
            now = self._times.instant(at_s)
            before = self.states()
            number = piece.number_of(start)
            for verdict in self._evaluator.timer(now):
                changes.append(self._change(verdict, before, number, at_s))
                before[verdict.rule] = verdict.state
            self._found = []
            verdicts = self._evaluator.judge(line, now)
            everything += self._found
            for verdict in verdicts:
                changes.append(self._change(verdict, before, number, at_s))
                before[verdict.rule] = verdict.state
            changes += [
                Change(
                    rule=name,
                    before=before[name],
                    after=state,
                    message="",
                    line=line.text(0),
                    line_number=number,
                    at_s=at_s,
                )
                for name, state in self.states().items()
                if state is not before[name]
            ]
        self._found = everything
        return changes

    def _starts(self, block: Block) -> Iterator[int]:
        """Yield where each line begins that any rule may have to do with."""
        data = block.data
        if self._joins:
            start = 0
            while start < len(data):
                yield start
                start = data.find(b"\n", start) + 1
            return
        found: set[int] = set()
        for rule in self.rules:
            patterns = [rule.pattern, rule.stop, None if rule.phase is None else rule.phase.end]
            for pattern in patterns:
                if pattern is not None:
                    places = (place for place, _ in pattern.hits(block))
                    found.update(data.rfind(b"\n", 0, place) + 1 for place in places)
        yield from sorted(found)

    # --- telling ----------------------------------------------------------------------------

    def _changes(
        self, piece: Piece, before: dict[str, LogState], verdicts: Sequence[LogVerdict]
    ) -> list[Change]:
        changes: list[tuple[int, Change]] = []
        for verdict in verdicts:
            number = piece.number_of(verdict.position)
            at_s = self._times.at(verdict.position)
            changes.append((verdict.position, self._change(verdict, before, number, at_s)))
        said = {verdict.rule for verdict in verdicts}
        for name, state in self.states().items():
            if state is before[name] or name in said:
                continue
            place = self._first_place(name, piece.block)
            changes.append(
                (
                    place,
                    Change(
                        rule=name,
                        before=before[name],
                        after=state,
                        message="",
                        line=piece.block.text(piece.block.data.rfind(b"\n", 0, place) + 1),
                        line_number=piece.number_of(place),
                        at_s=self._times.at(place),
                    ),
                )
            )
        changes.sort(key=lambda one: one[0])
        return [change for _, change in changes]

    def _first_place(self, name: str, block: Block) -> int:
        rule = self._by_name[name]
        patterns = [pattern for pattern in (rule.pattern, rule.stop) if pattern is not None]
        found = [pattern.hits(block) for pattern in patterns]
        places = [hits[0][0] for hits in found if len(hits)]
        return min(places, default=0)

    def _change(
        self, verdict: LogVerdict, before: dict[str, LogState], number: int, at_s: float | None
    ) -> Change:
        late_s = verdict.age_ns / SECOND
        return Change(
            rule=verdict.rule,
            before=before[verdict.rule],
            after=verdict.state,
            message=verdict.message,
            line=verdict.line,
            line_number=number,
            at_s=None if at_s is None else at_s - late_s,
            step=verdict.step,
        )

    def _note(self, rule: LogRule, block: Block, hits: Hits) -> None:
        self._found.append((rule, block, hits))

    def _keep_found(self) -> None:
        for rule, block, hits in self._found:
            steps = line_step(rule, block, hits[0]), line_step(rule, block, hits[-1])
            for metric, values in _columns(rule, block, hits):
                key = (rule.name, metric)
                if key not in self.series:
                    self.series[key] = Series(metric=metric, rule=rule.name)
                self.series[key].add(values, *steps)
        self._found = []

    def _find_beginning(self, block: Block) -> None:
        start = 0
        while start < len(block.data) and self._times.began_s is None:
            self._times.at(start)
            start = block.data.find(b"\n", start) + 1


def _needs_time(rule: LogRule) -> bool:
    return rule.recurring is not None or rule.start_cut_off is not None


def _recovers(rule: LogRule) -> bool:
    return _needs_time(rule) or rule.limit is not None or rule.metric_required


def _columns(rule: LogRule, block: Block, hits: Hits) -> Iterator[tuple[str, list[float]]]:
    """Yield each metric that the matches hold, with all its values."""
    slow: dict[str, list[float]] | None = None
    for metric, group in rule.metrics:
        edges = [(start, end) for start, end in hits.edges(group) if start >= 0]
        values = measured_all(metric, block.data, edges)
        if len(values) < len(edges):  # one of them is no plain number
            if slow is None:
                slow = {}
                for hit in hits:
                    for name, value in metric_values(rule, block, hit):
                        slow.setdefault(name, []).append(value)
            values = slow.get(metric, [])
        if values:
            yield metric, values
