"""What a rank's output says about it: every rule's state, line by line and by the clock.

Decides when a rule turns bad and says so once, until it is well again.  A rule's trouble is its
own: no value, however odd, keeps another rule from seeing the same line.  It knows neither files
nor clocks: lines and instants come in.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from scout.clock import SECOND, Duration, Instant, after, seconds, since
from sidecar.api import FaultKind
from sidecar.logs.rules import COMPARE, LogRule, Operator, Pattern

LINE_CHARS_MAX: Final = 1000
"""How much of a line a finding carries; longer than any training framework's step line."""
SILENT_START_MAX: Final = seconds(1800.0)
"""With a recurrence and no start cut-off, a first match may take this long.

Start-up (imports, a large checkpoint, compilation) is far slower than a step, so the recurrence
itself would restart healthy jobs for ever; but a job that never begins must be found too.
"""
MESSAGE_LINE_CHARS_MAX: Final = 200
"""How much of a matching line stands in the message; the finding carries more."""
METRIC_CHARS_MAX: Final = 40
"""How much of an odd metric a message repeats."""
STEP_DIGITS_MAX: Final = 18
"""A step beyond that is no step, and would not fit in 64 bits."""

JUST_NOW: Final = Duration(0)


class LogState(StrEnum):
    """One rule's view of a rank."""

    WAITING = "waiting"
    HEALTHY = "healthy"
    SLOW = "slow"
    HANGING = "hanging"
    FAULTED = "faulted"


_SEVERITY: Final[Mapping[LogState, int]] = MappingProxyType(
    {
        LogState.WAITING: 0,
        LogState.HEALTHY: 1,
        LogState.SLOW: 2,
        LogState.HANGING: 3,
        LogState.FAULTED: 4,
    }
)
_KINDS: Final[Mapping[LogState, FaultKind]] = MappingProxyType(
    {
        LogState.SLOW: FaultKind.LOG_SLOW,
        LogState.HANGING: FaultKind.LOG_HANG,
        LogState.FAULTED: FaultKind.LOG_RULE,
    }
)
_WORDS: Final[Mapping[Operator, str]] = MappingProxyType(
    {
        Operator.GT: "above",
        Operator.LT: "below",
        Operator.EQ: "equal to",
        Operator.GTEQ: "not below",
        Operator.LTEQ: "not above",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogVerdict:
    """A rule turned bad.  ``age_ns`` is how long ago, when that was before it was looked at."""

    rule: str
    state: LogState
    kind: FaultKind
    message: str
    line: str
    step: int | None = None
    age_ns: int = 0


@dataclass(slots=True)
class _Watch:
    """A rule and what has been seen of it.  ``off`` is set by the rule's stop pattern."""

    rule: LogRule
    state: LogState = LogState.WAITING
    matched_at: Instant | None = None
    line: str = ""
    step: int | None = None
    violations: int = 0
    off: bool = False


class LogEvaluator:
    """All rules over the output of one rank, which began at ``now``."""

    def __init__(
        self, rules: Sequence[LogRule], now: Instant, matches: Counter[str] | None = None
    ) -> None:
        self._began = now
        self._watches = [_Watch(rule=rule) for rule in rules]
        self.matches: Counter[str] = Counter() if matches is None else matches
        """Lines that matched each rule; ``matches`` may be shared by several evaluators."""

    def line(self, text: str, now: Instant) -> list[LogVerdict]:
        """Show one line to every rule; returns what turned bad by it."""
        return self.lines((text,), now)

    def lines(self, texts: Sequence[str], now: Instant) -> list[LogVerdict]:
        """Show lines in order; the same as `line` for each, and faster for many."""
        cleaned = [clean(text) for text in texts]
        encoded = [text.encode(errors="replace") for text in cleaned]
        joined = b"\n".join(encoded)
        verdicts: list[tuple[int, LogVerdict]] = []
        for watch in self._watches:
            if not _may_match(watch.rule, joined):
                continue
            for index, data in enumerate(encoded):
                if watch.off or watch.state is LogState.FAULTED:
                    break
                verdict = self._show(watch, data, cleaned[index], now)
                if verdict is not None:
                    verdicts.append((index, verdict))
        verdicts.sort(key=lambda pair: pair[0])  # stable: rules keep their order within a line
        return [verdict for _, verdict in verdicts]

    def timer(self, now: Instant) -> list[LogVerdict]:
        """Return what turned bad because nothing came."""
        verdicts = []
        for watch in self._watches:
            deadline = self._deadline(watch)
            if deadline is not None and now >= deadline:
                watch.state = LogState.HANGING
                verdicts.append(self._hang(watch, deadline, now))
        return verdicts

    def next_deadline(self) -> Instant | None:
        """Return when `timer` may find something, or None while only lines can."""
        deadlines = (self._deadline(watch) for watch in self._watches)
        return min((at for at in deadlines if at is not None), default=None)

    def states(self) -> dict[str, LogState]:
        """Return each rule's state."""
        return {watch.rule.name: watch.state for watch in self._watches}

    @property
    def state(self) -> LogState:
        """The worst state of all rules; WAITING when there are none."""
        return max(
            (watch.state for watch in self._watches),
            key=_SEVERITY.__getitem__,
            default=LogState.WAITING,
        )

    def _show(self, watch: _Watch, data: bytes, text: str, now: Instant) -> LogVerdict | None:
        rule = watch.rule
        before = watch.state
        message = ""
        match = rule.pattern.compiled.search(data)
        if match is not None:
            self.matches[rule.name] += 1
            watch.matched_at = now
            watch.line = text[:LINE_CHARS_MAX]
            watch.step = _step(match, rule)
            watch.state, message = _judge(watch, match)
        stopped = rule.stop is not None and rule.stop.compiled.search(data) is not None
        if stopped and watch.state is not LogState.FAULTED:
            watch.off, watch.state = True, LogState.HEALTHY
        if watch.state is before or watch.state not in _KINDS:
            return None
        return _verdict(watch, message)

    def _deadline(self, watch: _Watch) -> Instant | None:
        if watch.off or watch.state in (LogState.FAULTED, LogState.HANGING):
            return None
        rule, recurring = watch.rule, watch.rule.recurring
        if watch.matched_at is not None:
            return None if recurring is None else after(watch.matched_at, recurring)
        if rule.start_cut_off is not None:
            return after(self._began, rule.start_cut_off)
        if recurring is not None:
            return after(self._began, Duration(max(recurring, SILENT_START_MAX)))
        return None

    def _hang(self, watch: _Watch, deadline: Instant, now: Instant) -> LogVerdict:
        late = since(deadline, now)
        if watch.matched_at is None:
            waited = since(self._began, deadline)
            message = f"no line matched within {_seconds(waited)} of the start"
        else:
            silent, allowed = since(watch.matched_at, now), since(watch.matched_at, deadline)
            message = (
                f"no line has matched for {_seconds(silent)}; one is expected every "
                f"{_seconds(allowed)}"
            )
        return _verdict(watch, message, late)


def clean(text: str) -> str:
    """Return a line without colours and without the prefixes of launchers (``[rank0]:``)."""
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if text.startswith("["):
        text = _PREFIX.sub("", text)
    return text


_ESCAPE: Final = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours and cursor movement
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles and links
    r"|[@-Z\\^_])"
)
_PREFIX: Final = re.compile(r"(?:\[[A-Za-z_]+[0-9]+\]: ?)+")


def _may_match(rule: LogRule, joined: bytes) -> bool:
    patterns: tuple[Pattern | None, ...] = (rule.pattern, rule.stop)
    return any(
        not pattern.anywhere or pattern.compiled.search(joined) is not None
        for pattern in patterns
        if pattern is not None
    )


def _judge(watch: _Watch, match: Any) -> tuple[LogState, str]:
    """Return what a matching line makes of its rule, and why."""
    rule = watch.rule
    text = None if rule.metric_group is None else _text(match, rule.metric_group)
    value = None if text is None else number(text)
    if value is not None and not math.isfinite(value):
        return LogState.FAULTED, f"{rule.metric_name} is {_short(text)}"
    if rule.fault_on_match:
        return LogState.FAULTED, f"the output says {watch.line[:MESSAGE_LINE_CHARS_MAX]}"
    limit = rule.limit
    if limit is None:
        return LogState.HEALTHY, ""
    if text is None:  # the group took no part: this line holds no metric
        return watch.state if watch.state is LogState.SLOW else LogState.HEALTHY, ""
    if value is not None and not COMPARE[limit.operator](value, limit.threshold):
        watch.violations = 0
        return LogState.HEALTHY, ""
    watch.violations += 1
    if watch.violations < limit.data_points:
        return LogState.HEALTHY, ""
    why = (
        f"{_short(text)}, which is no number"
        if value is None
        else f"{_short(text)}, {_WORDS[limit.operator]} {limit.threshold:g}"
    )
    row = f", and violated it {watch.violations} times in a row" if limit.data_points > 1 else ""
    return LogState.SLOW, f"{rule.metric_name} is {why}{row}"


def number(text: str) -> float | None:
    """Return the number a group captured, or None.  What sticks to it in prose is dropped."""
    bare = text.strip(" \t,;:|()[]{}<>\"'%")
    for candidate in (bare, bare.replace(",", "")):
        if "_" in candidate or not candidate.isascii():
            continue
        try:
            return float(candidate)
        except ValueError:
            continue
    return None


def _verdict(watch: _Watch, message: str, age: Duration = JUST_NOW) -> LogVerdict:
    measured = watch.state is not LogState.HANGING and watch.rule.metric_group is not None
    where = f" at step {watch.step}" if measured and watch.step is not None else ""
    return LogVerdict(
        rule=watch.rule.name,
        state=watch.state,
        kind=_KINDS[watch.state],
        message=f"rule {watch.rule.name}: {message}{where}",
        line=watch.line,
        step=watch.step,
        age_ns=age,
    )


def _step(match: Any, rule: LogRule) -> int | None:
    text = None if rule.step_group is None else _text(match, rule.step_group)
    digits = "" if text is None else text.replace(",", "").strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= STEP_DIGITS_MAX):
        return None
    return int(digits)


def _text(match: Any, group: int) -> str | None:
    found = match.group(group)
    return None if found is None else bytes(found).decode(errors="replace")


def _short(text: str | None) -> str:
    return " ".join((text or "").split())[:METRIC_CHARS_MAX] or "nothing"


def _seconds(span: int) -> str:
    return f"{span / SECOND:.3g} s"
