"""What the demo prints: a line a moment while it runs, and one table at the end."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.cli.console import cell, console, span, table
from coordinator.wording import one_line

_MARKS: Final = {"inject": "red", "ok": "green", "bad": "bold red", "": "", "head": "bold"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one scenario."""

    scenario: str
    injected: str
    detect_s: float | None
    named: str
    kind: str
    why: str
    decision: str
    checkpoint: str
    recover_s: float | None
    steps_lost: int | None
    wrong: str
    """Why it does not count as right, or empty."""


@dataclass(slots=True)
class Screen:
    """Prints to standard output with the time since the demo began."""

    began: float = field(default_factory=time.monotonic)
    _console: Console = field(default_factory=console)

    def say(self, text: str, mark: str = "") -> None:
        """Print one line."""
        elapsed = f"{time.monotonic() - self.began:6.1f} s  "
        line = Text(elapsed, style="dim")
        line.append(one_line(text, 400), style=_MARKS[mark])
        self._console.print(line)
        sys.stdout.flush()

    def results(self, results: Sequence[Result]) -> None:
        """Print the table of all scenarios."""
        self._console.print()
        self._console.print(_timings(results))
        self._console.print()
        for result in results:
            self._console.print(_story(result))


def _timings(results: Sequence[Result]) -> Table:
    made = table(
        "Faults injected, culprits named, recoveries",
        ["scenario", "culprit named", "kind", "detect#", "recover#", "steps lost#", "verdict"],
    )
    for result in results:
        made.add_row(
            cell(result.scenario),
            cell(result.named),
            cell(result.kind),
            cell(span(result.detect_s)),
            cell(span(result.recover_s)),
            cell(result.steps_lost),
            cell("right" if not result.wrong else f"wrong: {result.wrong}", _verdict(result)),
        )
    return made


def _story(result: Result) -> Text:
    text = Text()
    text.append(f"{result.scenario}\n", style="bold")
    for label, value in (
        ("injected", result.injected),
        ("because", result.why),
        ("decided", result.decision),
        ("checkpoint", result.checkpoint),
    ):
        text.append(f"  {label:<11}", style="dim")
        text.append(f"{one_line(value, 400)}\n")
    return text


def _verdict(result: Result) -> str:
    return "bold red" if result.wrong else "green"


def named(culprit: dict[str, Any] | None) -> str:
    """Return who was named, as one phrase."""
    if culprit is None:
        return "nobody"
    parts = [] if culprit["rank"] is None else [f"rank {culprit['rank']}"]
    parts.append(str(culprit["node"]))
    if culprit["gpu"] is not None:
        parts.append(f"GPU {culprit['gpu']}")
    return ", ".join(parts)
