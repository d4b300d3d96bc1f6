"""What people see: tables in a terminal, plain lines elsewhere, and nothing that acts on either.

Names, reasons and log lines come from training scripts and other machines, so every one of them
passes `cell` or `line`: a terminal sequence in a log must not move somebody's cursor.
"""

import json
import sys
import time
from collections.abc import Iterable
from typing import Any, Final, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.wording import one_line

CELL_CHARS_MAX: Final = 200
"""Longest text in a table cell; `explain` and ``--json`` show the whole."""
PLAIN_WIDTH: Final = 200
"""Columns where there is no terminal: wide enough that greps find whole rows."""


def console() -> Console:
    """Return a console on standard output."""
    plain = not sys.stdout.isatty()
    return _Printer(
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=plain,
        width=PLAIN_WIDTH if plain else None,
    )


class _Printer(Console):
    """rich's console, without its own way of ending the process."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave to the command what an output that nobody reads means."""
        raise BrokenPipeError


def cell(value: object, style: str = "") -> Text:
    """Return foreign ``value`` as harmless text; None shows as a dash."""
    return Text("-" if value is None else one_line(str(value), CELL_CHARS_MAX), style)


def table(title: str, columns: Iterable[str]) -> Table:
    """Return an empty table; columns that end in ``#`` hold numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        made.add_column(
            name.rstrip("#"),
            justify="right" if name.endswith("#") else "left",
            no_wrap=name.endswith("#"),
        )
    return made


def print_json(value: Any) -> None:
    """Print ``value`` for programs; ASCII only, so that nothing in it acts on a terminal."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def clock(at_ns: int | None) -> str:
    """Return a wall-clock instant as local date and time with its offset from UTC."""
    if at_ns is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S%z", time.localtime(at_ns / 1e9))


def span(value_s: float | None) -> str:
    """Return a duration in the unit that people would use."""
    if value_s is None:
        return "-"
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 120:  # noqa: PLR2004 - two minutes are still counted in seconds
        return f"{value_s:.1f} s"
    minutes, rest = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def many(number: int, noun: str) -> str:
    """Return ``1 node`` or ``3 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
