"""``outrider rules suggest``: what a log looks like, and which rules fit it.

Decides what to propose: the step lines that are there, and a limit for silence drawn from the
longest one that the log itself survived.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.cli.console import cell, console, print_json, span, table
from coordinator.cli.rules_log import open_log
from coordinator.wording import one_line
from sidecar.logs.block import Block
from sidecar.logs.library.catalogue import Entry, Role, topics
from sidecar.logs.library.choice import STEP_CLASS, chosen
from sidecar.logs.library.reading import readings
from sidecar.logs.pieces import Piece
from sidecar.logs.timestamps import Clock

LOOKED_AT_BYTES_MAX: Final = 256 << 20
"""How much of a log is looked at; its kind shows long before."""
SILENCE_FACTOR: Final = 5.0
"""A rule for silence allows this many times the longest one seen."""
SILENCE_S_MIN: Final = 60.0
START_S_MIN: Final = 600.0


@dataclass(slots=True)
class _Seen:
    """What was seen of one shipped rule."""

    entry: Entry
    lines: int = 0
    first: str = ""
    last: str = ""
    first_number: int = 0


@dataclass(slots=True)
class _Survey:
    """A log, looked through once."""

    seen: dict[str, _Seen] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    bytes_read: int = 0
    cut: bool = False
    began_s: float | None = None
    step_began_s: float | None = None
    silence_s: float = 0.0
    _step_s: float | None = None
    _clock: Clock = field(default_factory=Clock)

    def look(self, piece: Piece) -> None:
        """Count what every shipped rule finds."""
        block = piece.block
        if self.began_s is None:
            self.began_s = _first_time(block, self._clock)
        self.lines += block.lines
        self.bytes_read += len(piece.raw)
        step_lines: set[int] = set()
        for topic in topics():
            for entry in topic.entries:
                found = [_line_start(block, hit[0]) for hit in entry.rule.pattern.hits(block)]
                if not found:
                    continue
                self._note(entry, piece, found)
                if entry.fault_class == STEP_CLASS:
                    self.hits[topic.key] = self.hits.get(topic.key, 0) + len(found)
                    step_lines.update(found)
        for start in sorted(step_lines):
            self._step(block.line(start))

    def _note(self, entry: Entry, piece: Piece, found: list[int]) -> None:
        seen = self.seen.setdefault(entry.name, _Seen(entry))
        if not seen.lines:
            seen.first = piece.block.text(found[0])
            seen.first_number = piece.number_of(found[0])
        seen.lines += len(found)
        seen.last = piece.block.text(found[-1])

    def _step(self, line: bytes) -> None:
        at = self._clock.read(line)
        if at is None:
            return
        if self._step_s is None:
            self.step_began_s = at
        else:
            self.silence_s = max(self.silence_s, at - self._step_s)
        self._step_s = at


def suggest(log: str, *, as_json: bool) -> int:
    """Print what fits the log at ``log``."""
    survey = _Survey()
    with open_log(log) as stream:
        for piece in stream:
            survey.look(piece)
            if survey.bytes_read >= LOOKED_AT_BYTES_MAX:
                survey.cut = True
                break
    answer = _answer(survey)
    if as_json:
        print_json(answer)
    else:
        _print(log, survey, answer)
    return 0


def _answer(survey: _Survey) -> dict[str, Any]:
    frameworks = chosen(Counter(survey.hits), fallback_hits=1)
    keys = {entry.name for topic in frameworks for entry in topic.entries}
    fitting = [seen for seen in survey.seen.values() if seen.entry.name in keys]
    faults = [
        seen
        for topic in topics()
        if not topic.steps
        for seen in (survey.seen.get(entry.name) for entry in topic.entries)
        if seen is not None
    ]
    return {
        "lines": survey.lines,
        "cut_short": survey.cut,
        "frameworks": [
            {"name": topic.title, "step_lines": survey.hits[topic.key]} for topic in frameworks
        ],
        "rules": [_told(seen) for seen in fitting],
        "faults": [_told(seen) for seen in faults],
        "silence_s": survey.silence_s or None,
        "proposal": _proposal(survey, fitting),
    }


def _told(seen: _Seen) -> dict[str, Any]:
    return {
        "rule": seen.entry.name,
        "role": seen.entry.role,
        "class": seen.entry.fault_class,
        "lines": seen.lines,
        "first_line": seen.first_number,
        "first": seen.first,
        "values": _values(seen.first, seen.entry),
        "last_values": _values(seen.last, seen.entry),
    }


def _values(line: str, entry: Entry) -> dict[str, Any]:
    return next((dict(one.fields) for one in readings(line, [entry])), {})


def _proposal(survey: _Survey, fitting: Iterable[_Seen]) -> list[dict[str, Any]]:
    """Return rules that a job spec may hold: when silence is a hang."""
    steps = [seen for seen in fitting if seen.entry.fault_class == STEP_CLASS]
    if not steps or not survey.silence_s:
        return []
    often = max(steps, key=lambda seen: seen.lines)
    start = 0.0
    if survey.began_s is not None and survey.step_began_s is not None:
        start = survey.step_began_s - survey.began_s
    return [
        {
            "name": "StepsStopped",
            "logPattern": often.entry.rule.pattern.text,
            "expectedStartCutOffInSeconds": _round(max(START_S_MIN, SILENCE_FACTOR * start)),
            "expectedRecurringFrequencyInSeconds": _round(
                max(SILENCE_S_MIN, SILENCE_FACTOR * survey.silence_s)
            ),
        }
    ]


def _round(value_s: float) -> int:
    return math.ceil(value_s / 10) * 10


def _print(log: str, survey: _Survey, answer: dict[str, Any]) -> None:
    out = console()
    short = " (its beginning only)" if survey.cut else ""
    out.print(cell(f"{log}: {survey.lines:,} lines looked at{short}"))
    if not answer["frameworks"]:
        out.print(cell("it looks like no framework known here: no line holds a step and a loss"))
        out.print(cell("`outrider rules list` shows what is known; docs/log-rules.md tells how to"))
        out.print(cell("write a rule of your own, `outrider rules test RULES LOG` tries it"))
    for one in answer["frameworks"]:
        out.print(cell(f"it looks like {one['name']}: {one['step_lines']:,} step lines", "bold"))
    _print_rules("rules that fit", answer["rules"])
    _print_rules("faults in it", answer["faults"])
    if answer["proposal"]:
        out.print("")
        quiet = span(answer["silence_s"])
        out.print(
            cell(f"the longest silence between two step lines was {quiet}; a job spec may say")
        )
        _print_yaml(answer["proposal"])


def _print_rules(title: str, rules: list[dict[str, Any]]) -> None:
    if not rules:
        return
    shown = table(title, ("rule", "role", "lines#", "first at#", "values"))
    for rule in rules:
        values = ", ".join(f"{name} {value}" for name, value in rule["values"].items())
        style = "red" if rule["role"] == Role.FAULT else ""
        shown.add_row(
            cell(rule["rule"]),
            cell(rule["role"], style),
            cell(f"{rule['lines']:,}"),
            cell(f"{rule['first_line']:,}"),
            cell(values or one_line(rule["first"].strip(), 120)),
        )
    console().print(shown)


def _print_yaml(rules: list[dict[str, Any]]) -> None:
    import yaml  # noqa: PLC0415 - only where a proposal is printed

    text = yaml.safe_dump(
        {"runPolicy": {"logMonitoringConfiguration": rules}},
        sort_keys=False,
        width=10_000,
        allow_unicode=False,
    )
    console().print(text, end="")


def _first_time(block: Block, clock: Clock) -> float | None:
    for line in block.data.split(b"\n"):
        at = clock.read(line)
        if at is not None:
            return at
    return None


def _line_start(block: Block, position: int) -> int:
    return block.data.rfind(b"\n", 0, position) + 1
