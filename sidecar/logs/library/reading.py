"""What a line says by a shipped rule: its groups as numbers, and who speaks.

Decides how a captured text becomes a value.  It knows no rule by name and no state.
"""

import math
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from sidecar.logs.block import without_escapes
from sidecar.logs.library.catalogue import Entry, entries
from sidecar.logs.numbers import measured, number
from sidecar.logs.prefixes import origin, without_prefix

Value: TypeAlias = int | float | str | list[int]

INTEGER_DIGITS_MAX: Final = 18
"""A longer row of digits is a name, and would not fit in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One rule's match.  ``fields`` are its groups that took part, and who printed the line."""

    entry: Entry
    fields: dict[str, Value]


def readings(line: str, among: Iterable[Entry] | None = None) -> Iterator[Reading]:
    """Yield what each shipped rule (or those in ``among``) reads in ``line``."""
    plain = without_escapes(line.encode(errors="replace")).decode()
    data = without_prefix(plain).encode()
    for entry in entries().values() if among is None else among:
        match = entry.rule.pattern.compiled.search(data)
        if match is not None:
            yield Reading(entry=entry, fields={**speaker(plain), **groups(match, data)})


def groups(match: Any, data: bytes) -> dict[str, Value]:
    """Return the named groups that took part in ``match``, a match in ``data``, as values."""
    found: dict[str, Value] = {}
    for name, index in match.re.groupindex.items():
        start, end = match.span(index)
        if start >= 0:
            found[name] = _metric(name, data, start, end) or value(name, data[start:end])
    named = _signal(found)
    return found if named is None else {**found, "signal": named}


def _metric(name: str, data: bytes, start: int, end: int) -> float | None:
    """Return a metric whose unit stands beside it, in its own unit."""
    if name not in {"step_time", "throughput"}:
        return None
    found = measured(name, data, start, end)
    return found if found is not None and math.isfinite(found) else None


def value(name: str, data: bytes) -> Value:
    """Return a captured text as a number where it is a finite one.

    What is not finite stays text, because JSON has no such number.  A name in the plural stands
    for a list.
    """
    text = data.decode(errors="replace")
    if name in {"ranks", "pids"}:
        return [int(part) for part in re.findall(r"\d+", text)]
    bare = text.strip(" \t'\"")
    if re.fullmatch(r"[-+]?[0-9]+", bare) and len(bare) <= INTEGER_DIGITS_MAX:
        return int(bare)
    parsed = number(bare)
    if parsed is None:
        return bare
    if not math.isfinite(parsed):
        return repr(parsed)
    return int(parsed) if parsed.is_integer() and "," in bare else parsed


_RANK: Final = re.compile(r"\bRank (\d{1,9})\]")
_NCCL: Final = re.compile(
    r"^(?:\[[^\]]*\] )?(?P<host>[A-Za-z0-9][\w.-]*):(?P<pid>\d+):(?P<tid>\d+) "
    r"\[(?P<cuda_dev>\d+)\] "
)


def speaker(line: str) -> dict[str, Value]:
    """Return who printed ``line``, as far as it says: its rank, or NCCL's host and device."""
    found: dict[str, Value] = {}
    said = origin(line)
    inside = _RANK.search(said.text)
    if said.rank is not None:
        found["rank"] = said.rank
    elif inside is not None:
        found["rank"] = int(inside[1])
    if said.local_rank is not None:
        found["local_rank"] = said.local_rank
    nccl = _NCCL.match(line)
    if nccl is not None:
        found["host"] = nccl["host"]
        found.update({name: int(nccl[name]) for name in ("pid", "tid", "cuda_dev")})
    return found


_SIGNAL_TEXTS: Final = MappingProxyType(
    {
        "Hangup": "SIGHUP",
        "Interrupt": "SIGINT",
        "Illegal instruction": "SIGILL",
        "Aborted": "SIGABRT",
        "Bus error": "SIGBUS",
        "Floating point exception": "SIGFPE",
        "Killed": "SIGKILL",
        "Segmentation fault": "SIGSEGV",
        "Terminated": "SIGTERM",
    }
)


def _signal(found: dict[str, Value]) -> str | None:
    """Return the name of the signal that the groups tell by its number or its words."""
    code, given = found.get("exitcode"), found.get("signal_number")
    by_number = -code if isinstance(code, int) and code < 0 else given
    if isinstance(by_number, int):
        try:
            return signal.Signals(by_number).name
        except ValueError:
            return None
    texts = (found.get(name) for name in ("signal_text", "mpi_signal_text", "error"))
    return next((_SIGNAL_TEXTS[str(text)] for text in texts if str(text) in _SIGNAL_TEXTS), None)
