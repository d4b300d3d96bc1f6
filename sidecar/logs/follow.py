"""One growing file, read in pieces as whole lines, over truncation and rotation.

Decides when a file has begun anew.  It polls, because nothing else works on network and overlay
file systems.  Not offered: lines between the last read and a truncation are gone, and of several
rotations between two reads only the last file is found.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sidecar.logs.lines import LineSplitter

CHUNK_BYTES_MAX: Final = 256 << 10
"""Bytes of one read: larger ones gain nothing, smaller ones cost calls."""
FINGERPRINT_BYTES: Final = 64
"""A file whose first bytes changed was truncated, even when it has grown past where we were."""

_LOG = logging.getLogger(__name__)


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
class FollowedFile:
    """The lines of ``path`` from its start, or from its present end (``from_end``).

    ``behind`` is True when the last read may have left something, ``missing`` while there is no
    file to read.
    """

    path: Path
    counters: FollowCounters
    from_end: bool = False
    behind: bool = False
    missing: bool = True
    splitter: LineSplitter = field(default_factory=LineSplitter)
    _fd: int | None = None
    _offset: int = 0
    _identity: tuple[int, int] = (0, 0)
    _head: bytes = b""
    _trouble: str = ""

    def read(self) -> list[str]:
        """Return the lines that came since the last read.  Never raises for the file's sake."""
        try:
            data = self._read()
        except OSError as error:
            self._fail(error)
            return []
        cut, undecodable = self.splitter.cut, self.splitter.undecodable
        lines = self.splitter.feed(data) if data else []
        counters = self.counters
        counters.bytes_read += len(data)
        counters.lines += len(lines)
        counters.lines_cut += self.splitter.cut - cut
        counters.lines_undecodable += self.splitter.undecodable - undecodable
        return lines

    def close(self) -> None:
        """Close the file.  The next read goes on where this one stopped, if it is the same."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self.behind = False

    def _read(self) -> bytes:
        self.behind = False
        if self._fd is None and not self._open():
            return b""
        assert self._fd is not None
        data = os.pread(self._fd, CHUNK_BYTES_MAX, self._offset)
        if data and self._head_changed():
            self._begin_again()
            data = os.pread(self._fd, CHUNK_BYTES_MAX, 0)
        if not data:
            data = self._look_at_path(self._fd)
        if data:
            self._offset += len(data)
            if len(self._head) < FINGERPRINT_BYTES:
                self._head = os.pread(self._fd, FINGERPRINT_BYTES, 0)[: self._offset]
            self.behind = self.behind or len(data) == CHUNK_BYTES_MAX
        self._trouble = ""
        return data

    def _open(self) -> bool:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self.missing = True
            self.from_end = False  # what appears later is new altogether
            return False
        self.missing = False
        seen = os.fstat(self._fd)
        identity = (seen.st_dev, seen.st_ino)
        if identity != self._identity or seen.st_size < self._offset:
            self._offset = seen.st_size if self.from_end else 0
            self._head = os.pread(self._fd, FINGERPRINT_BYTES, 0)[: self._offset]
            self.splitter.reset()
        self._identity, self.from_end = identity, False
        return True

    def _head_changed(self) -> bool:
        assert self._fd is not None
        return os.pread(self._fd, len(self._head), 0) != self._head if self._head else False

    def _begin_again(self) -> None:
        self.counters.truncations += 1
        self._offset, self._head = 0, b""
        self.splitter.reset()

    def _look_at_path(self, fd: int) -> bytes:
        """Ask whether this is still the file of that name, and as long as it was.

        Returns what was written on between the last read and the question.
        """
        try:
            seen = self.path.stat()
        except FileNotFoundError:
            return b""  # it may be written on under no name, or come back under this one
        if (seen.st_dev, seen.st_ino) != self._identity:
            self.behind = True
            data = os.pread(fd, CHUNK_BYTES_MAX, self._offset)
            if data:
                return data
            self.counters.rotations += 1
            self.close()
            self.behind, self._identity = True, (0, 0)
        elif seen.st_size < self._offset:
            self._begin_again()
            self.behind = True
        return b""

    def _fail(self, error: OSError) -> None:
        self.counters.read_errors += 1
        self.missing = True
        self.close()
        reason = error.strerror or str(error)
        if reason != self._trouble:
            self._trouble = reason
            _LOG.warning("%s cannot be read, trying on: %s", self.path, reason)
