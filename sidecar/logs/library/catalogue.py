"""The shipped rules, loaded: what each matches, what a match means, and its test lines.

Decides nothing about a job.  A file holds either faults, which every job is watched for, or the
step lines of one framework, which are watched for where its output looks like that framework.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import resources
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from sidecar.logs.rules import LogRule, parse_rule


class Role(StrEnum):
    """What a match of a rule is for the rank that printed it."""

    FAULT = "fault"  # the run is over here; an incident opens
    COLLATERAL = "collateral"  # another rank's fault has reached this one
    SUSPECT = "suspect"  # a device to keep an eye on
    RESTART = "restart"  # a new attempt begins
    NOTICE = "notice"  # worth knowing, no more
    PROGRESS = "progress"  # training goes on


class _Example(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    line: str
    fields: dict[str, Any] = {}


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rule: dict[str, Any]
    role: Role
    fault_class: str = msgspec.field(name="class")
    means: str
    lines: Annotated[list[_Example], msgspec.Meta(min_length=1)]
    others: list[str] = []


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    kind: Literal["faults", "steps"]
    fallback: bool = False
    rules: Annotated[list[_Entry], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A line that the rule matches, and what is read from it."""

    line: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One shipped rule.  ``written`` is what a person would write to have it in a job spec."""

    rule: LogRule
    written: Mapping[str, object]
    role: Role
    fault_class: str
    means: str
    examples: tuple[Example, ...]
    others: tuple[str, ...]

    @property
    def name(self) -> str:
        """The rule's name, unique in the library."""
        return self.rule.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One file: the faults of one subject, or the step lines of one framework.

    A ``fallback`` is for output that looks like no framework.
    """

    key: str
    title: str
    steps: bool
    fallback: bool
    entries: tuple[Entry, ...]


@functools.cache
def topics() -> tuple[Topic, ...]:
    """Return the whole library, faults first, each part in the order of its files."""
    folder = resources.files(__package__)
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    loaded = [_topic(name, (folder / name).read_text(encoding="utf-8")) for name in names]
    return tuple(sorted(loaded, key=lambda topic: topic.steps))


@functools.cache
def entries() -> Mapping[str, Entry]:
    """Return every shipped rule by its name."""
    found: dict[str, Entry] = {}
    for topic in topics():
        for entry in topic.entries:
            assert entry.name not in found, f"two shipped rules are called {entry.name}"
            found[entry.name] = entry
    return MappingProxyType(found)


@functools.cache
def fault_rules() -> tuple[LogRule, ...]:
    """Return the rules that every job is watched by."""
    return tuple(entry.rule for topic in topics() if not topic.steps for entry in topic.entries)


def frameworks() -> tuple[Topic, ...]:
    """Return the parts that hold step lines, one for each framework."""
    return tuple(topic for topic in topics() if topic.steps)


# libyaml's loader is ten times as fast, and not everywhere.
_LOADER: Final[type[Any]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _topic(name: str, text: str) -> Topic:
    file = msgspec.convert(yaml.load(text, Loader=_LOADER), _File)  # noqa: S506 - a safe loader
    return Topic(
        key=name.removesuffix(".yaml"),
        title=file.title,
        steps=file.kind == "steps",
        fallback=file.fallback,
        entries=tuple(_entry(given) for given in file.rules),
    )


def _entry(given: _Entry) -> Entry:
    rule = parse_rule(given.rule)
    if given.role is not Role.FAULT:
        # It only feeds metrics: a loss that is no number is one fault, not two.
        rule = replace(rule, metric_group=None, metric_key=None)
    return Entry(
        rule=rule,
        written=MappingProxyType(given.rule),
        role=given.role,
        fault_class=given.fault_class,
        means=given.means,
        examples=tuple(
            Example(line=one.line, fields=MappingProxyType(one.fields)) for one in given.lines
        ),
        others=tuple(given.others),
    )
