"""Rules in a file: where they stand in it, and everything that is wrong with them.

Decides which list of a document is a list of rules.  It reads no file and parses no YAML: a
document comes in as plain values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sidecar.logs.rule_fields import FIELDS, RuleError, checked_fields, checked_name
from sidecar.logs.rules import LogRule, parse_rule, usable_rules

KEY: Final = "logMonitoringConfiguration"
PLACES: Final = (
    (KEY,),
    ("runPolicy", KEY),
    ("spec", "runPolicy", KEY),
)
"""Where a document may hold its rules, unless it is a list of them itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that keeps a rule from being used."""

    rule: str
    field: str
    reason: str


def rules_in(document: Any) -> list[Any] | None:
    """Return the list of rules in a document, or None when it holds none anywhere."""
    if isinstance(document, list):
        return document
    for place in PLACES:
        value = document
        for key in place:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, list):
            return value
    return None


def problems(rules: list[Any]) -> list[Problem]:
    """Return everything that is wrong with ``rules``, in their order."""
    found: list[Problem] = []
    for index, fields in enumerate(rules):
        found += _of_one(fields, index)
    _, refused = usable_rules(rules)
    known = {(problem.rule, problem.field) for problem in found}
    # What only the whole list shows: names given twice, and too many rules.
    together = (error for error in refused if (error.rule, error.field) not in known)
    bad = {problem.rule for problem in found}
    return found + [_problem(error) for error in together if error.rule not in bad]


def usable(rules: list[Any]) -> tuple[LogRule, ...]:
    """Return the rules that can be used."""
    return usable_rules(rules)[0]


def _of_one(fields: Any, index: int) -> list[Problem]:
    """Return the problems of one rule: of each field alone, or else of its fields together."""
    try:
        name = checked_name(fields, index)
    except RuleError as error:
        return [_problem(error)]
    alone: list[Problem] = []
    for key, value in fields.items():
        try:
            checked_fields(name, {key: value})
        except RuleError as error:
            if error.field == key:
                alone.append(_problem(error))
    if alone:
        return alone
    try:
        parse_rule(fields, index)
    except RuleError as error:
        return [_problem(error)]
    return []


def _problem(error: RuleError) -> Problem:
    return Problem(rule=error.rule, field=error.field, reason=error.reason)


assert KEY not in FIELDS, "a rule could be taken for a document"
