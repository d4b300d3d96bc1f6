"""Shows what workers print on the sidecar's own terminal, each line with its rank.

What acts on a terminal stays in the files: what a script prints moves nobody's cursor, sets no
title, and cannot write over the rank before it.

The workers write to their files and to nothing else, so a terminal that stands still holds none of
them up: one thread reads the files behind them.
"""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from sidecar.logs.block import without_escapes
from sidecar.names import shown
from sidecar.whole_numbers import whole_number
from sidecar.workers.files import LogFiles

LOOK_PERIOD_S: Final = 0.1
"""Between two looks at the files: quick to the eye, nothing to a core."""
READ_BYTES_MAX: Final = 1 << 16
"""Read of one file at a time, so that no rank hides the others."""
LINE_BYTES_MAX: Final = 1 << 16
"""A longer line is shown in pieces of this size."""
LEAVE_S_MAX: Final = 3.0
"""How long a terminal that takes nothing is waited for at the end."""
STDOUT, STDERR = 1, 2
"""Bits of torchrun's ``--tee``."""
_ACTING: Final = re.compile(rb"[^\t\x20-\x7e]")
"""Bytes of plain text are shown as they are, without another look."""
_CONTROL: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""All but the tab; and what changes the direction in which a line is read."""


def read_tee(text: str) -> Mapping[int | None, int]:
    """Return local rank -> bits of ``1``, ``3`` or ``0:3,1:1``; None stands for every rank.

    Raises `ValueError` with the reason.
    """
    parts = [part.rpartition(":") for part in text.split(",")]
    given: dict[int | None, int] = {}
    for rank, colon, bits in parts:
        number = whole_number(rank if colon else "0")
        if bits not in ("0", "1", "2", "3") or number is None:
            raise ValueError(
                f"{shown(text)} is neither 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), nor"
                " such numbers by local rank, as in 0:3,1:2"
            )
        given[number if colon else None] = int(bits)
    if None in given and len(given) > 1:
        raise ValueError(f"{shown(text)} says one thing of all ranks and another of some")
    return given


def harmless(line: bytes) -> bytes:
    r"""Return a line without what acts on a terminal; of a progress bar, what it shows last.

    Sequences are dropped, other control characters written as ``\x..``.
    """
    if _ACTING.search(line) is None:
        return line
    shown_last = next((part for part in reversed(line.split(b"\r")) if part), b"")
    text = without_escapes(shown_last).decode(errors="backslashreplace")
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text).encode()


@dataclass(slots=True, eq=False)
class _Followed:
    local_rank: int
    path: Path
    prefix: bytes
    target: BinaryIO
    offset: int = 0
    rest: bytes = b""
    over: bool = False
    """Nothing more will be written into it."""

    def show_more(self) -> bool:
        """Show the whole lines that have come; return whether anything had."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return False
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        self._show(lines)
        if len(self.rest) > LINE_BYTES_MAX:
            self.show_rest()
        return bool(data)

    def show_all(self) -> None:
        """Show everything there is."""
        while self.show_more():
            pass
        self.show_rest()

    def show_rest(self) -> None:
        """Show what stands after the last line feed."""
        if self.rest:
            self._show([self.rest])
            self.rest = b""

    def _show(self, lines: Iterable[bytes]) -> None:
        text = b"".join(self.prefix + harmless(line) + b"\n" for line in lines)
        if text:
            self.target.write(text)
            self.target.flush()


class Tee:
    """Follows the files of one generation at a time.  ``wanted`` comes from `read_tee`."""

    def __init__(
        self,
        wanted: Mapping[int | None, int],
        *,
        targets: Callable[[], tuple[BinaryIO, BinaryIO]] = lambda: (
            sys.stdout.buffer,
            sys.stderr.buffer,
        ),
    ) -> None:
        self._wanted = wanted
        self._targets = targets
        self._lock = threading.Lock()
        self._followed: list[_Followed] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, files: Mapping[int, tuple[int, LogFiles]]) -> None:
        """Show the files of these workers too: local rank -> rank and files."""
        stdout, stderr = self._targets()
        fresh = []
        for local_rank, (rank, one) in files.items():
            bits = self._wanted.get(local_rank, self._wanted.get(None, 0))
            prefix = f"[rank {rank}] ".encode()
            fresh += [_Followed(local_rank, one.stdout, prefix, stdout)] * bool(bits & STDOUT)
            fresh += [_Followed(local_rank, one.stderr, prefix, stderr)] * bool(bits & STDERR)
        with self._lock:
            self._followed += fresh
        if self._thread is None and fresh:
            self._thread = threading.Thread(target=self._run, name="tee", daemon=True)
            self._thread.start()

    def forget(self, *, keep: frozenset[int]) -> None:
        """Show the rest of every file but those of the local ranks ``keep``, and read no more."""
        with self._lock:
            for one in self._followed:
                one.over |= one.local_rank not in keep

    def close(self) -> None:
        """Show the rest, as far as the terminal takes it in `LEAVE_S_MAX`."""
        with self._lock:
            for one in self._followed:
                one.over = True
        self._ending.set()
        if self._thread is not None:
            self._thread.join(LEAVE_S_MAX)

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads the terminal any more
            busy = ending = False
            while not ending:
                ending = self._ending.wait(0 if busy else LOOK_PERIOD_S)
                with self._lock:
                    present, over = list(self._followed), [it for it in self._followed if it.over]
                busy = any([one.show_more() for one in present])  # noqa: C419 - each has its turn
                for one in over:
                    one.show_all()
                with self._lock:
                    self._followed = [one for one in self._followed if one not in over]
