"""Log rules: what a person may write, and what of it is refused before anything runs.

Decides whether a rule is one, under the HyperPod resource's field names, and compiles its
patterns with RE2, whose time is linear in the line whatever the pattern.  It refuses to know
where lines come from and what follows from a match; the latter is `sidecar.logs.evaluator`.
"""

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import re2

from scout.clock import Duration, seconds

RULES_MAX: Final = 256
"""Rules of one job.  Each is searched for in all output; nobody reads more findings than that."""
PATTERN_CHARS_MAX: Final = 4096
NAME_CHARS_MAX: Final = 128
SECONDS_MAX: Final = 31_536_000
"""A year: what is longer is a unit gone wrong."""
DATA_POINTS_MAX: Final = 1_000_000
SHOWN_CHARS_MAX: Final = 80
"""How much of a wrong value an error repeats."""


class RuleError(Exception):
    """A rule cannot be used: its name (or place in the list), the field, and why."""

    def __init__(self, rule: str, field: str, reason: str) -> None:
        self.rule, self.field, self.reason = rule, field, reason
        super().__init__(f"log rule {_shown(rule)}: {field}: {reason}")


class Operator(StrEnum):
    """How a metric is compared with its threshold; true means the rule is violated."""

    GT = "gt"
    LT = "lt"
    EQ = "eq"
    GTEQ = "gteq"
    LTEQ = "lteq"


COMPARE: Final[Mapping[Operator, Callable[[float, float], bool]]] = MappingProxyType(
    {
        Operator.GT: operator.gt,
        Operator.LT: operator.lt,
        Operator.EQ: operator.eq,
        Operator.GTEQ: operator.ge,
        Operator.LTEQ: operator.le,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A compiled expression.  It searches bytes, so that a line is encoded once for all rules.

    ``anywhere`` says the expression means the same on many lines joined as on each alone.
    """

    text: str
    compiled: Any
    anywhere: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A metric's threshold, and how many lines in a row must violate it."""

    operator: Operator
    threshold: float
    data_points: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRule:
    """One rule.  ``metric_group`` and ``step_group`` are group numbers of ``pattern``."""

    name: str
    pattern: Pattern
    start_cut_off: Duration | None
    recurring: Duration | None
    stop: Pattern | None
    limit: Limit | None
    fault_on_match: bool
    metric_group: int | None
    metric_name: str
    step_group: int | None


def parse_rules(rules: Iterable[Mapping[str, object]]) -> tuple[LogRule, ...]:
    """Return the rules of a job.  Raises `RuleError` for the first that cannot be used."""
    parsed: dict[str, LogRule] = {}
    for index, fields in enumerate(rules):
        rule = parse_rule(fields, index)
        _check_place(rule, index, parsed)
        parsed[rule.name] = rule
    return tuple(parsed.values())


def usable_rules(
    rules: Iterable[Mapping[str, object]],
) -> tuple[tuple[LogRule, ...], tuple[RuleError, ...]]:
    """Return the rules that can be used, and why each of the others cannot."""
    usable: dict[str, LogRule] = {}
    refused: list[RuleError] = []
    for index, fields in enumerate(rules):
        try:
            rule = parse_rule(fields, index)
            _check_place(rule, index, usable)
        except RuleError as error:
            refused.append(error)
        else:
            usable[rule.name] = rule
    return tuple(usable.values()), tuple(refused)


def parse_rule(fields: Mapping[str, object], index: int = 0) -> LogRule:
    """Return one rule; ``index`` is its place, for a rule without a name.  Raises `RuleError`."""
    name = _name(fields, index)
    for key in fields:
        if key not in _FIELDS:
            raise RuleError(name, str(key), _unknown(str(key)))
    for key, (check, wanted) in _FIELDS.items():
        value = fields.get(key)
        if key not in fields or (value is None and key not in _REQUIRED):
            continue
        if not check(value):
            raise RuleError(name, key, f"it must be {wanted}, but is {_shown(value)}")
    given = {key: value for key, value in fields.items() if value is not None}
    if "logPattern" not in given:
        raise RuleError(name, "logPattern", "it is missing; a rule needs an expression")
    pattern = _compile(name, "logPattern", str(given["logPattern"]))
    groups: Mapping[str, int] = pattern.compiled.groupindex
    limit = _limit(name, given, pattern)
    stop = given.get("stopPattern")
    return LogRule(
        name=name,
        pattern=pattern,
        start_cut_off=_span(given.get("expectedStartCutOffInSeconds")),
        recurring=_span(given.get("expectedRecurringFrequencyInSeconds")),
        stop=None if stop is None else _compile(name, "stopPattern", str(stop)),
        limit=limit,
        fault_on_match=given.get("faultOnMatch") is True,
        metric_group=_metric_group(pattern, measured=limit is not None),
        metric_name="the loss" if "loss" in groups else "the metric",
        step_group=groups.get("step"),
    )


def with_defaults(given: Iterable[LogRule], defaults: Iterable[LogRule]) -> tuple[LogRule, ...]:
    """Return ``given`` and every default whose name none of them has."""
    given = tuple(given)
    names = {rule.name for rule in given}
    return (*given, *(rule for rule in defaults if rule.name not in names))


# --- the fields -----------------------------------------------------------------------------


def _is_text(limit: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and 0 < len(value) <= limit


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    try:
        return _is_number(value) and math.isfinite(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond what a float can hold
        return False


def _is_span(value: object) -> bool:
    return _is_finite(value) and 0 < value <= SECONDS_MAX  # type: ignore[operator]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value) and 1 <= value <= DATA_POINTS_MAX


_Check = tuple[Callable[[object], bool], str]

_PATTERN: Final[_Check] = (
    _is_text(PATTERN_CHARS_MAX),
    f"an expression of 1 to {PATTERN_CHARS_MAX} characters",
)
_SPAN: Final[_Check] = (_is_span, f"a number of seconds above 0 and at most {SECONDS_MAX}")
_FIELDS: Final[Mapping[str, _Check]] = MappingProxyType(
    {
        "name": (_is_text(NAME_CHARS_MAX), f"a text of 1 to {NAME_CHARS_MAX} characters"),
        "logPattern": _PATTERN,
        "expectedStartCutOffInSeconds": _SPAN,
        "expectedRecurringFrequencyInSeconds": _SPAN,
        "stopPattern": _PATTERN,
        "metricThreshold": (_is_finite, "a finite number"),
        "operator": (
            lambda value: isinstance(value, str) and value in set(Operator),
            f"one of {', '.join(Operator)}",
        ),
        "metricEvaluationDataPoints": (
            _is_count,
            f"a whole number from 1 to {DATA_POINTS_MAX}",
        ),
        "faultOnMatch": (lambda value: isinstance(value, bool), "true or false"),
    }
)
_REQUIRED: Final = frozenset({"name", "logPattern"})


def _name(fields: Mapping[str, object], index: int) -> str:
    place = f"#{index + 1}"
    if not isinstance(fields, Mapping):
        raise RuleError(place, "name", f"a rule is a mapping of fields, not {_shown(fields)}")
    if "name" not in fields:
        raise RuleError(place, "name", "it is missing; findings are told under it")
    name = fields["name"]
    check, wanted = _FIELDS["name"]
    if not check(name):
        raise RuleError(place, "name", f"it must be {wanted}, but is {_shown(name)}")
    return str(name)


def _check_place(rule: LogRule, index: int, others: Mapping[str, LogRule]) -> None:
    if index >= RULES_MAX:
        raise RuleError(rule.name, "name", f"a job has at most {RULES_MAX} rules")
    if rule.name in others:
        raise RuleError(rule.name, "name", "another rule has it; give each its own")


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, _FIELDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(_FIELDS)}"
    return f"no such field; {hint}"


def _span(value: object) -> Duration | None:
    return seconds(float(value)) if isinstance(value, int | float) else None


def _limit(name: str, given: Mapping[str, object], pattern: Pattern) -> Limit | None:
    has = {key: key in given for key in ("operator", "metricThreshold")}
    for key, other in (("metricThreshold", "operator"), ("operator", "metricThreshold")):
        if has[other] and not has[key]:
            raise RuleError(name, other, f"it means nothing without {key}; give both or none")
    if not has["operator"]:
        if "metricEvaluationDataPoints" in given:
            reason = "it means nothing without metricThreshold and operator"
            raise RuleError(name, "metricEvaluationDataPoints", reason)
        return None
    if pattern.compiled.groups == 0:
        reason = r"a threshold needs a group that holds the metric, like (\S+)"
        raise RuleError(name, "logPattern", reason)
    points = given.get("metricEvaluationDataPoints", 1)
    threshold = given["metricThreshold"]
    assert isinstance(points, int)
    assert isinstance(threshold, int | float)
    return Limit(
        operator=Operator(str(given["operator"])),
        threshold=float(threshold),
        data_points=points,
    )


def _metric_group(pattern: Pattern, *, measured: bool) -> int | None:
    """Return the group that holds the metric: ``loss``, else the first that is not ``step``.

    Without a threshold only a group called ``loss`` is known to be a number.
    """
    names: Mapping[str, int] = pattern.compiled.groupindex
    if "loss" in names:
        return names["loss"]
    if not measured:
        return None
    numbers = [n for n in range(1, pattern.compiled.groups + 1) if n != names.get("step")]
    return numbers[0] if numbers else names["step"]


# What the next line finds makes joined lines differ from lines alone: ends of the whole text,
# and flags switched off.  It may find too much; such a rule is only searched more slowly.
_NOT_ANYWHERE: Final = re2.compile(r"\\[AzZC]|\(\?[a-zA-Z]*-")


def _compile(rule: str, field: str, text: str) -> Pattern:
    options = re2.Options()
    options.log_errors = False  # it would write to the daemon's standard error
    options.never_nl = True  # \s must not run on into the next line
    try:
        # ^ and $ are the ends of a line, also where lines are searched together.
        compiled = re2.compile(f"(?m){text}", options=options)
    except (re2.error, UnicodeEncodeError) as error:
        raise RuleError(rule, field, _refused(error, text)) from error
    return Pattern(text=text, compiled=compiled, anywhere=_NOT_ANYWHERE.search(text) is None)


_LOOKAROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")


def _refused(error: Exception, text: str) -> str:
    cause = error.args[0] if error.args else str(error)
    reason = cause.decode(errors="replace") if isinstance(cause, bytes) else str(cause)
    hint = ""
    if any(mark in text for mark in _LOOKAROUND):
        hint = "; looking ahead or behind is not offered, because its time has no limit"
    return f"RE2 does not take it: {' '.join(reason.split())}{hint} (in {_shown(text)})"


def _shown(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= SHOWN_CHARS_MAX else f"{text[: SHOWN_CHARS_MAX - 1]}…"
    return f"the text {text}" if isinstance(value, str) and _is_numeric(value) else text


def _is_numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in {"true", "false"}
    return True
