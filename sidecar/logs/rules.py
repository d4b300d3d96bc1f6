"""Log rules: what a person may write, and what of it is refused before anything runs.

Decides whether a rule is one, under the HyperPod resource's field names, and compiles its
patterns with RE2, whose time is linear in the line whatever the pattern.  It refuses to know
where lines come from and what follows from a match; the latter is `sidecar.logs.evaluator`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import re2

from scout.clock import Duration, seconds
from sidecar.logs.numbers import METRICS, STEP
from sidecar.logs.patterns import Pattern
from sidecar.logs.rule_fields import (
    RULES_MAX,
    Operator,
    RankScope,
    RuleError,
    checked_fields,
    checked_name,
    shown,
)

__all__ = [
    "HISTORY_POINTS_DEFAULT",
    "RULES_MAX",
    "Basis",
    "Limit",
    "LogRule",
    "Operator",
    "Pattern",
    "Phase",
    "RankScope",
    "RuleError",
    "parse_rule",
    "parse_rules",
    "usable_rules",
    "with_defaults",
]

HISTORY_POINTS_DEFAULT: Final = 50
"""Points that a ratio or a rate of change looks back at, when a rule does not say."""

Basis = str
"""What a metric is compared with: one of the three fields in `_BASES`."""
_BASES: Final[tuple[Basis, ...]] = ("metricThreshold", "ratioToMedian", "changePerPoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """When a metric violates, and how many violations make its rule slow.

    ``threshold`` is a value, a multiple of the median of the last ``history`` points, or a change
    per point over them, as ``basis`` says.  Either ``data_points`` in a row are needed, or, with a
    ``window``, that many of its last points.
    """

    basis: Basis
    operator: Operator
    threshold: float
    data_points: int
    window: int | None = None
    history: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch in which steps may take longer.  It opens when the rule's pattern matches."""

    end: Pattern | None
    limit: Duration


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRule:
    """One rule.  Groups are group numbers of ``pattern``; ``metrics`` maps those with a name.

    ``rank_scope`` None means that a rank which printed a match must go on doing so, and that any
    rank of the node may print the first one.  A rule with a ``phase`` has no other duty.
    """

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
    metric_key: str | None = None
    metrics: tuple[tuple[str, int], ...] = ()
    metric_required: bool = False
    rank_scope: RankScope | None = None
    join_indented: bool = False
    phase: Phase | None = None

    @property
    def is_timed(self) -> bool:
        """Whether its silence can say anything."""
        return self.start_cut_off is not None or self.recurring is not None


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
    name = checked_name(fields, index)
    given = checked_fields(name, fields)
    if "phaseStart" in given:
        return _phase_rule(name, given)
    for key in ("phaseEnd", "phaseLimitInSeconds"):
        if key in given:
            raise RuleError(name, key, "it means nothing without phaseStart")
    if "logPattern" not in given:
        raise RuleError(name, "logPattern", "it is missing; a rule needs an expression")
    pattern = _compile(name, "logPattern", str(given["logPattern"]))
    limit = _limit(name, given, pattern)
    group = _metric_group(name, given, pattern, measured=limit is not None)
    names = {number: one for one, number in pattern.groups.items()}
    metric = None if group is None else names.get(group)
    stop = given.get("stopPattern")
    scope = given.get("rankScope")
    return LogRule(
        name=name,
        pattern=pattern,
        start_cut_off=_span(given.get("expectedStartCutOffInSeconds")),
        recurring=_span(given.get("expectedRecurringFrequencyInSeconds")),
        stop=None if stop is None else _compile(name, "stopPattern", str(stop)),
        limit=limit,
        fault_on_match=given.get("faultOnMatch") is True,
        metric_group=group,
        metric_name=_spoken(metric),
        step_group=pattern.groups.get(STEP),
        metric_key=metric,
        metrics=tuple((one, pattern.groups[one]) for one in METRICS if one in pattern.groups),
        metric_required="metric" in given,
        rank_scope=None if scope is None else RankScope(str(scope)),
        join_indented=given.get("joinIndentedLines") is True,
    )


def with_defaults(given: Iterable[LogRule], defaults: Iterable[LogRule]) -> tuple[LogRule, ...]:
    """Return ``given`` and every default whose name none of them has."""
    given = tuple(given)
    names = {rule.name for rule in given}
    return (*given, *(rule for rule in defaults if rule.name not in names))


# --- fields together --------------------------------------------------------------------------

_PHASE_FIELDS: Final = ("name", "phaseStart", "phaseEnd", "phaseLimitInSeconds")


def _phase_rule(name: str, given: Mapping[str, object]) -> LogRule:
    for key in given:
        if key not in _PHASE_FIELDS:
            reason = "a phase is a rule of its own; write it beside this one"
            raise RuleError(name, key, reason)
    limit = _span(given.get("phaseLimitInSeconds"))
    if limit is None:
        reason = "it is missing; a phase that never ends would hide a hang"
        raise RuleError(name, "phaseLimitInSeconds", reason)
    end = given.get("phaseEnd")
    return LogRule(
        name=name,
        pattern=_compile(name, "phaseStart", str(given["phaseStart"])),
        start_cut_off=None,
        recurring=None,
        stop=None,
        limit=None,
        fault_on_match=False,
        metric_group=None,
        metric_name="",
        step_group=None,
        phase=Phase(end=None if end is None else _compile(name, "phaseEnd", str(end)), limit=limit),
    )


def _check_place(rule: LogRule, index: int, others: Mapping[str, LogRule]) -> None:
    if index >= RULES_MAX:
        raise RuleError(rule.name, "name", f"a job has at most {RULES_MAX} rules")
    if rule.name in others:
        raise RuleError(rule.name, "name", "another rule has it; give each its own")


def _span(value: object) -> Duration | None:
    return seconds(float(value)) if isinstance(value, int | float) else None


def _limit(name: str, given: Mapping[str, object], pattern: Pattern) -> Limit | None:
    bases = [key for key in _BASES if key in given]
    if len(bases) > 1:
        reason = f"{bases[0]} is given too; a rule compares its metric with one of them"
        raise RuleError(name, bases[1], reason)
    if bases and "operator" not in given:
        raise RuleError(name, bases[0], "it means nothing without operator; give both or none")
    if "operator" in given and not bases:
        wanted = "metricThreshold (or ratioToMedian or changePerPoint)"
        raise RuleError(name, "operator", f"it means nothing without {wanted}; give both or none")
    window = _window(name, given, measured=bool(bases))
    if not bases:
        return None
    if pattern.compiled.groups == 0:
        reason = r"a threshold needs a group that holds the metric, like (\S+)"
        raise RuleError(name, "logPattern", reason)
    basis = bases[0]
    needed = "violationsInWindow" if window else "metricEvaluationDataPoints"
    chosen = Operator(str(given["operator"]))
    looks_back = basis != "metricThreshold"
    if looks_back and chosen is Operator.EQ:
        raise RuleError(name, "operator", f"eq is not offered with {basis}; no value is exactly it")
    if "historyDataPoints" in given and not looks_back:
        reason = "it means nothing without ratioToMedian or changePerPoint"
        raise RuleError(name, "historyDataPoints", reason)
    return Limit(
        basis=basis,
        operator=chosen,
        threshold=_float(given[basis]),
        data_points=_int(given, needed, 1),
        window=window,
        history=_int(given, "historyDataPoints", HISTORY_POINTS_DEFAULT) if looks_back else 0,
    )


def _window(name: str, given: Mapping[str, object], *, measured: bool) -> int | None:
    """Return the points of an N of M judgement, or None when points must be in a row."""
    if not measured:
        for key in ("metricEvaluationDataPoints", "windowDataPoints", "violationsInWindow"):
            if key in given:
                raise RuleError(name, key, "it means nothing without metricThreshold and operator")
        if "historyDataPoints" in given:
            reason = "it means nothing without ratioToMedian or changePerPoint"
            raise RuleError(name, "historyDataPoints", reason)
        return None
    pair = ("windowDataPoints", "violationsInWindow")
    for key, other in (pair, pair[::-1]):
        if key in given and other not in given:
            raise RuleError(name, key, f"it means nothing without {other}; give both or none")
    if "windowDataPoints" not in given:
        return None
    if "metricEvaluationDataPoints" in given:
        reason = "it asks for violations in a row, violationsInWindow for some of many; give one"
        raise RuleError(name, "metricEvaluationDataPoints", reason)
    window, needed = _int(given, "windowDataPoints", 1), _int(given, "violationsInWindow", 1)
    if needed > window:
        reason = f"{needed} violations do not fit into a window of {window} points"
        raise RuleError(name, "violationsInWindow", reason)
    return window


def _int(given: Mapping[str, object], key: str, default: int) -> int:
    value = given.get(key, default)
    assert isinstance(value, int)
    return value


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _metric_group(
    name: str, given: Mapping[str, object], pattern: Pattern, *, measured: bool
) -> int | None:
    """Return the group that holds the metric: ``metric``'s, ``loss``, or the first not ``step``.

    Without a threshold only a group called ``loss`` is known to be a number.
    """
    names = pattern.groups
    if "metric" in given:
        wanted = str(given["metric"])
        if wanted not in names:
            known = f"its groups are {', '.join(names)}" if names else "it names no group"
            raise RuleError(name, "metric", f"logPattern has no group (?P<{wanted}>...); {known}")
        return names[wanted]
    if "loss" in names:
        return names["loss"]
    if not measured:
        return None
    numbers = [n for n in range(1, pattern.compiled.groups + 1) if n != names.get(STEP)]
    return numbers[0] if numbers else names[STEP]


def _spoken(metric: str | None) -> str:
    return "the metric" if metric in (None, STEP) else f"the {str(metric).replace('_', ' ')}"


def _compile(rule: str, field: str, text: str) -> Pattern:
    try:
        return Pattern(text)
    except (re2.error, UnicodeEncodeError) as error:
        raise RuleError(rule, field, _refused(error, text)) from error


_LOOKAROUND: Final = ("(?=", "(?!", "(?<=", "(?<!")


def _refused(error: Exception, text: str) -> str:
    cause = error.args[0] if error.args else str(error)
    reason = cause.decode(errors="replace") if isinstance(cause, bytes) else str(cause)
    hint = ""
    if any(mark in text for mark in _LOOKAROUND):
        hint = "; looking ahead or behind is not offered, because its time has no limit"
    return f"RE2 does not take it: {' '.join(reason.split())}{hint} (in {shown(text)})"
