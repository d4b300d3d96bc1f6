"""Torch's own record of the last collectives: evidence of a stall, and a second source of counts.

Torch keeps it when ``TORCH_FR_BUFFER_SIZE`` is set before it loads (in older versions:
``TORCH_NCCL_TRACE_BUFFER_SIZE``), and gives it out in milliseconds.  It is asked for only when
training has stood still for a while, and left in a file beside the progress page, where the node
finds it when it gathers evidence: by then this process may be unable to answer.
Its names are private and changed between versions: what is missing is an empty answer.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scout.clock import SECOND
from worker_shim.patching import imported

ENTRIES_MAX: Final = 64
"""Newest entries that are kept: the last few steps of a rank."""
SILENCE_NS_MIN: Final = SECOND
"""Silence after which the record is left in its file, and again whenever the silence doubled."""
COUNTS_AGE_NS_MAX: Final = SECOND
"""How old counts out of the record may be: asking ten times a second would be felt."""
_DUMPS: Final = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_KEPT: Final = (
    "process_group",
    "pg_id",
    "collective_seq_id",
    "p2p_seq_id",
    "is_p2p",
    "profiling_name",
    "state",
    "input_sizes",
    "input_dtypes",
)
"""What is kept of an entry; stacks are read from outside."""


def recorded(limit: int = ENTRIES_MAX) -> Sequence[Mapping[str, Any]]:
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
        if isinstance(entries, list) and entries:
            return [it for it in entries if isinstance(it, Mapping)][-limit:]
    return ()


def group_of(entry: Mapping[str, Any]) -> str:
    """Return the name of the group that an entry is of."""
    group = entry.get("process_group")
    return str(group[0] if isinstance(group, list) and group else entry.get("pg_id", ""))


class FlightRecorder:
    """What is known of torch's record.  For the background thread."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._due_ns: int = SILENCE_NS_MIN
        self._is_written = False
        self._counts: Mapping[str, int] = {}
        self._counted_at: int | None = None

    def look(self, silent_ns: int) -> None:
        """Leave the record where the node finds it, while training has stood still.

        What was left of a silence that ended is taken away: it explains nothing any more.
        """
        if self._file is None:
            return
        if silent_ns < SILENCE_NS_MIN:
            self._due_ns = SILENCE_NS_MIN
            if self._is_written:
                self._is_written = False
                with contextlib.suppress(OSError):
                    self._file.unlink()
        elif silent_ns >= self._due_ns:
            self._due_ns = 2 * silent_ns
            entries = recorded()
            if entries:
                self._write(self._file, entries)

    def counts(self, now_ns: int) -> Mapping[str, int]:
        """Return group -> collectives entered, as far as the record goes back.

        For a torch whose groups do not tell their own count.
        """
        if self._counted_at is None or now_ns - self._counted_at > COUNTS_AGE_NS_MAX:
            self._counted_at = now_ns
            found: dict[str, int] = {}
            for entry in recorded():
                number = entry.get("collective_seq_id")
                if isinstance(number, int) and not entry.get("is_p2p"):
                    name = group_of(entry)
                    found[name] = max(number, found.get(name, 0))
            self._counts = found
        return self._counts

    def _write(self, file: Path, entries: Sequence[Mapping[str, Any]]) -> None:
        kept = [{name: it[name] for name in _KEPT if name in it} for it in entries]
        partial = file.with_name(f"{file.name}.partial")
        with contextlib.suppress(OSError):  # evidence less, and training goes on
            handle = os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump({"entries": kept}, out, default=str)
            partial.replace(file)
            self._is_written = True
