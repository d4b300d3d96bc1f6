"""One growing file, read in pieces as whole lines, over truncation and rotation.

Decides when a file has begun anew.  It polls, because nothing else works on network and overlay
file systems.  Not offered: lines between the last read and a truncation are gone, and of several
rotations between two reads only the last file is found.
"""

import contextlib
import logging
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sidecar.logs.block import Block
from sidecar.logs.lines import LineSplitter
from sidecar.logs.positions import Position

CHUNK_BYTES_MAX: Final = 256 << 10
"""Bytes of one read: larger ones gain nothing, smaller ones cost calls."""
FINGERPRINT_BYTES: Final = 64
"""A file whose first bytes changed was truncated, even when it has grown past where we were."""
SETTLED_NS: Final = 2 * 10**9
"""A time of last writing tells two writings apart once it is this old: file systems and network
servers round it to a clock tick, or to a whole second."""
LATE_READS_MAX: Final = 100
"""Reads of a rotated file without news until it is closed: its writer may go on for a while."""

_LOG = logging.getLogger(__name__)
_NOTHING: Final = Block(b"")


@dataclass(slots=True, kw_only=True)
class FollowCounters:
    """What was read so far, and what did not go straight.  Counters only grow."""

    bytes_read: int = 0
    lines: int = 0
    lines_cut: int = 0
    lines_undecodable: int = 0
    truncations: int = 0
    rotations: int = 0
    read_errors: int = 0


@dataclass(slots=True)
class _Open:
    """An open file.  ``line_offset`` is behind the last whole line that was read."""

    fd: int
    identity: tuple[int, int]
    offset: int
    head: bytes
    splitter: LineSplitter
    line_offset: int
    has_size: bool
    """A pipe has none, so its size says nothing."""
    reads_without_news: int = 0
    looked_at_mtime_ns: int = -1
    """When the file was last written to, as far as that time can still tell a new writing."""

    def next_bytes(self) -> bytes:
        return os.pread(self.fd, CHUNK_BYTES_MAX, self.offset)

    def took(self, data: bytes) -> None:
        line_end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if line_end:
            self.line_offset = self.offset + line_end
        self.offset += len(data)
        if len(self.head) < FINGERPRINT_BYTES:
            self.head = os.pread(self.fd, FINGERPRINT_BYTES, 0)[: self.offset]

    def head_changed(self) -> bool:
        return bool(self.head) and os.pread(self.fd, len(self.head), 0) != self.head

    def was_rewritten(self, mtime_ns: int) -> bool:
        """Whether the file, as long as it was, holds something else now.

        Whoever only adds changes the size; this long by chance is a file written anew.
        """
        if mtime_ns == self.looked_at_mtime_ns:
            return False
        if time.time_ns() - mtime_ns > SETTLED_NS:
            self.looked_at_mtime_ns = mtime_ns
        return self.head_changed()

    def begin_again(self) -> None:
        self.looked_at_mtime_ns = -1
        self.offset = self.line_offset = 0
        self.head = b""
        self.splitter.reset()

    def skip_hole(self) -> None:
        """Go on where a sparse file's next data is: a hole may be as long as the file was."""
        with contextlib.suppress(OSError):  # not offered here, or nothing but a hole
            self.offset = max(self.offset, os.lseek(self.fd, self.offset, os.SEEK_DATA))


@dataclass(slots=True)
class FollowedFile:
    """The lines of ``path`` from its start, its present end (``from_end``), or a ``position``.

    ``behind`` is True when the last read may have left something, ``missing`` while there is no
    file to read.
    """

    path: Path
    counters: FollowCounters
    from_end: bool = False
    position: Position | None = None
    behind: bool = False
    missing: bool = True
    splitter: LineSplitter = field(default_factory=LineSplitter)
    idle_reads: int = 0
    """Reads since the last one that found something."""
    _open: _Open | None = None
    _late: _Open | None = None
    """The file that had this name before, as long as it is still written to."""
    _trouble: str = ""

    def read(self) -> list[str]:
        """Return the lines that came since the last read.  Never raises for the file's sake."""
        return [line for line in self.read_block().data.decode().split("\n") if line]

    def read_block(self) -> Block:
        """Return the same as one block."""
        self.behind = False
        try:
            if self._open is not None and self._late is None and self._is_unchanged(self._open):
                self.idle_reads += 1
                return _NOTHING
            block = self._read_late() or self._read()
        except OSError as error:
            self._fail(error)
            return _NOTHING
        self._trouble = ""
        self.idle_reads = 0 if block.data or self.behind else self.idle_reads + 1
        return block

    def close(self) -> None:
        """Close the file.  The next read goes on where this one stopped, if it is the same."""
        if self._open is not None:
            self.position = self.place()
            os.close(self._open.fd)
        self._open = None
        self._close_late()
        self.behind = False

    def place(self) -> Position | None:
        """Return how far whole lines were read, or None while nothing was."""
        if self._open is None:
            return self.position
        device, inode = self._open.identity
        return Position(
            device=device, inode=inode, offset=self._open.line_offset, head=self._open.head
        )

    # --- reading ----------------------------------------------------------------------------

    def _is_unchanged(self, file: _Open) -> bool:
        """Whether this is still the file of that name and ends where it was read to.

        Nearly every read of a quiet file ends here, twenty times a second.
        """
        try:
            seen = os.stat(self.path)  # noqa: PTH116 - see above
        except OSError:
            return False
        same = seen.st_size == file.offset and (seen.st_dev, seen.st_ino) == file.identity
        if not same or not file.has_size:
            return False
        if file.was_rewritten(seen.st_mtime_ns):
            self._begin_again(file)
            return False
        return True

    def _read(self) -> Block:
        if self._open is None and not self._begin():
            return _NOTHING
        assert self._open is not None
        data = self._open.next_bytes()
        if data and self._open.head_changed():
            self._begin_again(self._open)
            data = self._open.next_bytes()
        if not data:
            data = self._look_at_path(self._open)
        return self._take(self._open, data) if data else _NOTHING

    def _take(self, file: _Open, data: bytes) -> Block:
        file.took(data)
        self.behind = self.behind or len(data) == CHUNK_BYTES_MAX
        if not data[0] and data.count(0) == len(data):
            file.skip_hole()
        counters, splitter = self.counters, file.splitter
        cut, undecodable = splitter.cut, splitter.undecodable
        block = splitter.feed_block(data)
        counters.bytes_read += len(data)
        counters.lines += block.lines
        counters.lines_cut += splitter.cut - cut
        counters.lines_undecodable += splitter.undecodable - undecodable
        return block

    def _begin(self) -> bool:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self.missing = True
            self.from_end = False  # what appears later is new altogether
            return False
        self.missing = False
        seen = os.fstat(fd)
        identity = (seen.st_dev, seen.st_ino)
        head = os.pread(fd, FINGERPRINT_BYTES, 0)
        offset, known = (seen.st_size if self.from_end else 0), self.position
        if known is not None and identity == (known.device, known.inode):
            same = head.startswith(known.head) and seen.st_size >= known.offset
            offset = known.offset if same else 0
            self.counters.truncations += not same
        self.splitter.reset()
        regular = stat.S_ISREG(seen.st_mode)
        self._open = _Open(fd, identity, offset, head[:offset], self.splitter, offset, regular)
        self.from_end, self.position = False, None
        return True

    def _begin_again(self, file: _Open) -> None:
        self.counters.truncations += 1
        file.begin_again()

    def _look_at_path(self, file: _Open) -> bytes:
        """Ask whether this is still the file of that name, and as long as it was.

        Returns what was written on between the last read and the question.
        """
        try:
            seen = os.stat(self.path)  # noqa: PTH116 - asked many times a second
        except FileNotFoundError:
            return b""  # it may be written on under no name, or come back under this one
        if (seen.st_dev, seen.st_ino) != file.identity:
            data = file.next_bytes()
            self.behind = True
            if data:
                return data
            self.counters.rotations += 1
            self._close_late()
            self._late, self._open, self.splitter = file, None, LineSplitter()
        elif seen.st_size < file.offset or (
            file.has_size and seen.st_size == file.offset and file.was_rewritten(seen.st_mtime_ns)
        ):
            self._begin_again(file)
            self.behind = True
        return b""

    def _read_late(self) -> Block | None:
        """Read what is still written to the file that had this name before."""
        late = self._late
        if late is None:
            return None
        data = late.next_bytes()
        if data:
            late.reads_without_news = 0
            block = self._take(late, data)
            self.behind = True  # the file of that name has not been looked at
            return block
        late.reads_without_news += 1
        if late.reads_without_news > LATE_READS_MAX:
            self._close_late()
        return None

    def _close_late(self) -> None:
        if self._late is not None:
            os.close(self._late.fd)
        self._late = None

    def _fail(self, error: OSError) -> None:
        self.counters.read_errors += 1
        self.missing = True
        self.close()
        reason = error.strerror or str(error)
        if reason != self._trouble:
            self._trouble = reason
            _LOG.warning("%s cannot be read, trying on: %s", self.path, reason)
