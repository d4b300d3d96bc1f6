"""The fields a log rule may have, and what may stand in each.

Decides whether a single value is one of its field; what fields mean together is
`sidecar.logs.rules`.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

RULES_MAX: Final = 256
"""Rules of one job.  Each is searched for in all output; nobody reads more findings than that."""
PATTERN_CHARS_MAX: Final = 4096
NAME_CHARS_MAX: Final = 128
SECONDS_MAX: Final = 31_536_000
"""A year: what is longer is a unit gone wrong."""
DATA_POINTS_MAX: Final = 1_000_000
WINDOW_POINTS_MAX: Final = 10_000
"""Points that are kept: each rank has its own window for each rule."""
HISTORY_POINTS_MIN: Final = 5
"""A median of fewer says nothing."""
SHOWN_CHARS_MAX: Final = 80
"""How much of a wrong value an error repeats."""


class RuleError(Exception):
    """A rule cannot be used: its name (or place in the list), the field, and why."""

    def __init__(self, rule: str, field: str, reason: str) -> None:
        self.rule, self.field, self.reason = rule, field, reason
        super().__init__(f"log rule {shown(rule)}: {field}: {reason}")


class Operator(StrEnum):
    """How a metric is compared with its threshold; true means the rule is violated."""

    GT = "gt"
    LT = "lt"
    EQ = "eq"
    GTEQ = "gteq"
    LTEQ = "lteq"


class RankScope(StrEnum):
    """Which ranks must print what a rule waits for."""

    EVERY = "every"
    ANY = "any"
    FIRST = "first"
    LAST = "last"


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


def _is_ratio(value: object) -> bool:
    return _is_finite(value) and value > 0  # type: ignore[operator]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(least: int, most: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and _is_number(value) and least <= value <= most


def _is_one_of(names: Iterable[str]) -> Callable[[object], bool]:
    known = frozenset(names)
    return lambda value: isinstance(value, str) and value in known


_Check = tuple[Callable[[object], bool], str]

_PATTERN: Final[_Check] = (
    _is_text(PATTERN_CHARS_MAX),
    f"an expression of 1 to {PATTERN_CHARS_MAX} characters",
)
_SPAN: Final[_Check] = (_is_span, f"a number of seconds above 0 and at most {SECONDS_MAX}")
_WINDOW: Final[_Check] = (
    _is_count(1, WINDOW_POINTS_MAX),
    f"a whole number from 1 to {WINDOW_POINTS_MAX}",
)
_FLAG: Final[_Check] = (_is_flag, "true or false")

FIELDS: Final[Mapping[str, _Check]] = MappingProxyType(
    {
        "name": (_is_text(NAME_CHARS_MAX), f"a text of 1 to {NAME_CHARS_MAX} characters"),
        "logPattern": _PATTERN,
        "expectedStartCutOffInSeconds": _SPAN,
        "expectedRecurringFrequencyInSeconds": _SPAN,
        "stopPattern": _PATTERN,
        "metricThreshold": (_is_finite, "a finite number"),
        "operator": (_is_one_of(Operator), f"one of {', '.join(Operator)}"),
        "metricEvaluationDataPoints": (
            _is_count(1, DATA_POINTS_MAX),
            f"a whole number from 1 to {DATA_POINTS_MAX}",
        ),
        "faultOnMatch": _FLAG,
        # Beyond the HyperPod resource.
        "metric": (_is_text(NAME_CHARS_MAX), "the name of a group in logPattern"),
        "ratioToMedian": (_is_ratio, "a finite number above 0"),
        "changePerPoint": (_is_finite, "a finite number"),
        "historyDataPoints": (
            _is_count(HISTORY_POINTS_MIN, WINDOW_POINTS_MAX),
            f"a whole number from {HISTORY_POINTS_MIN} to {WINDOW_POINTS_MAX}",
        ),
        "windowDataPoints": _WINDOW,
        "violationsInWindow": _WINDOW,
        "rankScope": (_is_one_of(RankScope), f"one of {', '.join(RankScope)}"),
        "joinIndentedLines": _FLAG,
        "phaseStart": _PATTERN,
        "phaseEnd": _PATTERN,
        "phaseLimitInSeconds": _SPAN,
    }
)
_REQUIRED: Final = frozenset({"name", "logPattern"})


def checked_name(fields: Mapping[str, object], index: int) -> str:
    """Return a rule's name; ``index`` is its place in the list.  Raises `RuleError`."""
    place = f"#{index + 1}"
    if not isinstance(fields, Mapping):
        raise RuleError(place, "name", f"a rule is a mapping of fields, not {shown(fields)}")
    if "name" not in fields:
        raise RuleError(place, "name", "it is missing; findings are told under it")
    name = fields["name"]
    check, wanted = FIELDS["name"]
    if not check(name):
        raise RuleError(place, "name", f"it must be {wanted}, but is {shown(name)}")
    return str(name)


def checked_fields(name: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that were given a value.  Raises `RuleError` for the first wrong one."""
    for key in fields:
        if key not in FIELDS:
            raise RuleError(name, str(key), _unknown(str(key)))
    for key, (check, wanted) in FIELDS.items():
        value = fields.get(key)
        if key not in fields or (value is None and key not in _REQUIRED):
            continue
        if not check(value):
            raise RuleError(name, key, f"it must be {wanted}, but is {shown(value)}")
    return {key: value for key, value in fields.items() if value is not None}


def shown(value: object) -> str:
    """Return a value as an error repeats it."""
    text = repr(value)
    text = text if len(text) <= SHOWN_CHARS_MAX else f"{text[: SHOWN_CHARS_MAX - 1]}…"
    return f"the text {text}" if isinstance(value, str) and _is_numeric(value) else text


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, FIELDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(FIELDS)}"
    return f"no such field; {hint}"


def _is_numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in {"true", "false"}
    return True
