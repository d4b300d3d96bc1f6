"""``outrider rules test``: a log replayed, and what the rules make of it.

Decides which rules a word on the command line stands for, and how what they found is told.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from coordinator.cli.console import cell, clock, console, print_json, table
from coordinator.cli.errors import UserError
from coordinator.cli.rules_file import AUTO, read_rules
from coordinator.cli.rules_log import open_log
from coordinator.wording import one_line
from sidecar.logs.backtest import Backtest, Change, Series
from sidecar.logs.library.catalogue import entries, fault_rules, topics
from sidecar.logs.library.choice import chosen, rules_of, sightings
from sidecar.logs.pieces import Piece
from sidecar.logs.rule_files import problems
from sidecar.logs.rules import LogRule, parse_rules, with_defaults
from sidecar.logs.verdicts import LogState

CHANGES_SHOWN_MAX: Final = 200
"""Rows of the table; ``--json`` has more."""
LINE_CHARS_SHOWN: Final = 80
CHANGES_KEPT_MAX: Final = 10_000
"""A rule that flaps through a long log would fill the memory; the rest is counted."""
FIRST_PIECES: Final = 64
"""What a log looks like is judged by this many pieces of 256 KiB, held until it is."""
PIECES_AFTER_FIRST: Final = 2
"""How many more are looked through once it is recognized: two frameworks may speak in turn."""
_REASONS: Final = {
    LogState.SLOW: "LogSlow",
    LogState.HANGING: "LogHang",
    LogState.FAULTED: "LogFault",
}
_STYLES: Final = {"faulted": "bold red", "hanging": "red", "slow": "yellow", "healthy": "green"}


@dataclass(slots=True)
class _Told:
    """What is kept of a replay of ``log`` by the rules of ``frameworks`` and others."""

    log: str
    frameworks: tuple[str, ...] = ()
    size: int = 0
    took_s: float = 0.0

    changes: list[Change] = field(default_factory=list)
    left_out: int = 0
    first_incident: Change | None = None

    def add(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if self.first_incident is None and change.opens_incident:
                self.first_incident = change
            if len(self.changes) < CHANGES_KEPT_MAX:
                self.changes.append(change)
            else:
                self.left_out += 1


def replay(source: str | None, log: str, *, as_json: bool) -> int:
    """Replay ``log`` by the rules in ``source``: a file, "auto", or None for the whole library."""
    own = None if source in (None, AUTO) else _own_rules(Path(str(source)))
    told = _Told(log)
    began = time.perf_counter()
    with open_log(log) as stream:
        first = list(islice(stream, FIRST_PIECES)) if source == AUTO else []
        rules, told.frameworks = _rules(source, own, first)
        test = Backtest(rules)
        for piece in chain(first, stream):
            told.add(test.show(piece))
            told.size += len(piece.raw)
        told.add(test.finish())
    told.took_s = time.perf_counter() - began
    if as_json:
        print_json(_as_json(test, told))
    else:
        _print(test, told)
    return 0


def _own_rules(path: Path) -> tuple[LogRule, ...]:
    given = read_rules(path)
    found = problems(given)
    if found:
        one = found[0]
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(
            f"{path}: rule {one.rule}: {one.field}: {one.reason}{more} "
            f"(`outrider rules check {path}` says all)"
        )
    return parse_rules(given)


def _rules(
    source: str | None, own: tuple[LogRule, ...] | None, first: Sequence[Piece]
) -> tuple[tuple[LogRule, ...], tuple[str, ...]]:
    """Return the rules to replay by, and the frameworks that were recognized."""
    if own is not None:
        return own, ()
    if source is None:
        kept = (entry.rule for topic in topics() if not topic.fallback for entry in topic.entries)
        return tuple(kept), ()
    seen: Counter[str] = Counter()
    found_in: int | None = None
    for index, piece in enumerate(first):
        seen.update(sightings(piece.block))
        found_in = index if found_in is None and chosen(seen) else found_in
        if found_in is not None and index >= found_in + PIECES_AFTER_FIRST:
            break
    frameworks = chosen(seen, fallback_hits=1)
    rules = with_defaults(fault_rules(), rules_of(frameworks))
    return rules, tuple(topic.title for topic in frameworks)


# --- telling ----------------------------------------------------------------------------------


def _incident(change: Change) -> str:
    return f"{_REASONS[change.after]}_{change.rule}"


def _at_ns(at_s: float | None) -> int | None:
    return None if at_s is None else int(at_s * 1e9)


def _as_json(test: Backtest, told: _Told) -> dict[str, Any]:
    return {
        "log": told.log,
        "lines": test.lines,
        "bytes": told.size,
        "seconds": told.took_s,
        "began_s": test.began_s,
        "ended_s": test.ended_s,
        "frameworks": list(told.frameworks),
        "first_incident": None
        if told.first_incident is None
        else _change_as_json(told.first_incident),
        "changes": [_change_as_json(change) for change in told.changes],
        "changes_left_out": told.left_out,
        "rules": [
            {"rule": name, "lines": count, "state": test.states().get(name), **_library(name)}
            for name, count in test.matches.items()
        ],
        "series": [_series_as_json(series) for series in test.series.values()],
    }


def _library(name: str) -> dict[str, Any]:
    entry = entries().get(name)
    return {} if entry is None else {"role": entry.role, "class": entry.fault_class}


def _change_as_json(change: Change) -> dict[str, Any]:
    return {
        "line_number": change.line_number,
        "at_s": change.at_s,
        "rule": change.rule,
        "before": change.before,
        "after": change.after,
        "incident": _incident(change) if change.opens_incident else None,
        "message": change.message,
        "line": change.line,
        "step": change.step,
        **_library(change.rule),
    }


def _series_as_json(series: Series) -> dict[str, Any]:
    return {
        "metric": series.metric,
        "rule": series.rule,
        "points": series.points,
        "not_finite": series.not_finite,
        "first": series.first,
        "last": series.last,
        "lowest": series.lowest if series.points else None,
        "highest": series.highest if series.points else None,
        "mean": series.total / series.points if series.points else None,
        "first_step": series.first_step,
        "last_step": series.last_step,
    }


def _print(test: Backtest, told: _Told) -> None:
    out = console()
    speed = f"{told.size / 1e6:,.1f} MB in {told.took_s:.2f} s"
    out.print(cell(f"{told.log}: {test.lines:,} lines, {speed}, judged by {len(test.rules)} rules"))
    if told.frameworks:
        out.print(cell(f"it looks like {', '.join(told.frameworks)}"))
    if test.began_s is None:
        out.print(cell("its lines carry no time, so silence cannot be judged", "yellow"))
    else:
        span = f"{clock(_at_ns(test.began_s))} to {clock(_at_ns(test.ended_s))}"
        out.print(cell(f"its own time runs from {span}"))
    _print_changes(told)
    _print_series(test)
    _print_incident(told)


def _print_changes(told: _Told) -> None:
    if not told.changes:
        console().print(cell("no line changed the state of any rule"))
        return
    shown = table("changes", ("line#", "time", "rule", "from", "to", "why"))
    for change in told.changes[:CHANGES_SHOWN_MAX]:
        shown.add_row(
            cell(f"{change.line_number:,}"),
            cell(clock(_at_ns(change.at_s))),
            cell(change.rule),
            cell(change.before),
            cell(change.after, _STYLES.get(change.after, "")),
            cell(change.message or one_line(change.line.strip(), LINE_CHARS_SHOWN)),
        )
    console().print(shown)
    rest = len(told.changes) - CHANGES_SHOWN_MAX + told.left_out
    if rest > 0:
        console().print(cell(f"and {rest:,} changes more", "dim"))


def _print_series(test: Backtest) -> None:
    if not test.series:
        return
    columns = ("metric", "rule", "points#", "not finite#", "first#", "last#", "lowest#", "highest#")
    shown = table("series", (*columns, "mean#", "steps"))
    for series in test.series.values():
        told = _series_as_json(series)
        numbers = (told[key] for key in ("first", "last", "lowest", "highest", "mean"))
        shown.add_row(
            cell(series.metric),
            cell(series.rule),
            cell(f"{series.points:,}"),
            cell(f"{series.not_finite:,}" if series.not_finite else None),
            *(cell(None if value is None else f"{value:.6g}") for value in numbers),
            cell(
                None
                if series.last_step is None
                else f"{series.first_step:,} to {series.last_step:,}"
            ),
        )
    console().print(shown)


def _print_incident(told: _Told) -> None:
    change = told.first_incident
    if change is None:
        console().print(cell("no incident would have opened", "green"))
        return
    when = "" if change.at_s is None else f", {clock(_at_ns(change.at_s))}"
    text = f"an incident would have opened at line {change.line_number:,}{when}"
    console().print(cell(f"{text}: {_incident(change)}", "bold red"))
