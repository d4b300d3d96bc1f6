"""Torch's own record of the last collectives, as evidence and as a second source of positions.

Torch keeps it when ``TORCH_FR_BUFFER_SIZE`` is set before it loads (in older versions:
``TORCH_NCCL_TRACE_BUFFER_SIZE``), and gives it out in milliseconds; it is read when somebody asks.
Its names are private and changed between versions: what is missing is an empty answer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from worker_shim.patching import imported

ENTRIES_MAX: Final = 64
"""Newest entries that are kept: the last few steps of a rank."""
SHAPES_MAX: Final = 8
_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One collective as torch recorded it."""

    group: str
    seq: int
    operation: str
    state: str
    shapes: tuple[tuple[int, ...], ...]


def recorded_collectives(limit: int = ENTRIES_MAX) -> tuple[Recorded, ...]:
    """Return the newest recorded collectives, oldest first; empty when torch keeps no record."""
    native = imported("torch._C._distributed_c10d")
    for name in _DUMPS:
        dump = getattr(native, name, None)
        if dump is None:
            continue
        try:
            told = json.loads(dump())
        except (RuntimeError, TypeError, ValueError):
            continue
        entries = told.get("entries") if isinstance(told, Mapping) else None
        if entries:
            return tuple(_recorded(it) for it in entries[-limit:] if isinstance(it, Mapping))
    return ()


def furthest(records: tuple[Recorded, ...]) -> Mapping[str, int]:
    """Return group -> highest sequence number in the records."""
    last: dict[str, int] = {}
    for it in records:
        last[it.group] = max(it.seq, last.get(it.group, 0))
    return last


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    group = entry.get("process_group")
    name = group[0] if isinstance(group, list) and group else entry.get("pg_id", "")
    sizes = entry.get("input_sizes")
    shapes = sizes[:SHAPES_MAX] if isinstance(sizes, list) else []
    return Recorded(
        group=str(name),
        seq=int(entry.get("collective_seq_id") or 0),
        operation=str(entry.get("profiling_name", "")),
        state=str(entry.get("state", "")),
        shapes=tuple(tuple(int(n) for n in it) for it in shapes if isinstance(it, list)),
    )
