"""Where kernel lines are read: the kernel's own device, or a file in any log's format.

Decides where reading begins: at the end of what is there, or, where this machine has not been
restarted since, at the record after the last one that was judged.  Judges nothing.
"""

import contextlib
import errno
import json
import logging
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from sidecar.hardware.kernel_line import KernelLine, LineReader, Mark, read_record
from sidecar.logs.follow import FollowCounters, FollowedFile

RECORD_BYTES_MAX: Final = 8192
"""A /dev/kmsg record is read whole or not at all; the kernel's own limit is 8 KiB."""
RECORDS_MAX: Final = 1000
"""Records of one read, so that a flooded kernel log cannot keep the thread."""
REOPEN_S_MIN: Final = 0.2
REOPEN_S_MAX: Final = 5.0
"""Bounds of the back-off while the device fails: once it is well, it is read again in seconds."""
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
CURSOR_BYTES_MAX: Final = 1024

_LOG = logging.getLogger(__name__)


class KernelSource(Protocol):
    """Where kernel lines come from."""

    @property
    def missing(self) -> bool:
        """True while there is no log."""

    @property
    def behind(self) -> bool:
        """True while the last read may have left something."""

    def read(self) -> list[KernelLine | Mark]:
        """Return what came since the last read.  Never raises for the log's sake."""

    def judged(self) -> None:
        """Note that all that was read has been judged."""

    def close(self) -> None:
        """Let go of the log."""


def open_source(path: Path, counters: FollowCounters, cursor: Path | None) -> KernelSource:
    """Return the source for ``path``: a character device is read by record, anything else by line.

    ``cursor`` is a file that keeps the place in the device over a restart of this process.
    """
    try:
        is_device = stat.S_ISCHR(path.stat().st_mode)
    except OSError:
        is_device = False
    if is_device:
        return KernelDevice(path, counters, cursor)
    return LogFile(FollowedFile(path, counters, from_end=True))


@dataclass(slots=True)
class LogFile:
    """Syslog, dmesg's output, or a journal's export, whatever the file holds."""

    file: FollowedFile
    reader: LineReader = field(default_factory=LineReader)

    @property
    def missing(self) -> bool:
        """True while there is no file."""
        return self.file.missing

    @property
    def behind(self) -> bool:
        """True while the last read may have left something."""
        return self.file.behind

    def read(self) -> list[KernelLine | Mark]:
        """Return what the kernel said in the lines that came."""
        found = (self.reader.feed(line) for line in self.file.read())
        return [one for one in found if one is not None]

    def judged(self) -> None:
        """Do nothing: only lines written from now on count in a file."""

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class KernelDevice:
    """``/dev/kmsg``: a read gives one record."""

    def __init__(self, path: Path, counters: FollowCounters, cursor: Path | None) -> None:
        self._path = path
        self._counters = counters
        self._cursor = None if cursor is None else Cursor(cursor)
        self._fd: int | None = None
        self._trouble = ""
        self._reopen_at = 0.0
        self._reopen_s = REOPEN_S_MIN
        self._opened = False
        self._after: int | None = None
        self._skipped: int | None = None
        self._seen: int | None = None
        self.missing = True
        self.behind = False

    def read(self) -> list[KernelLine | Mark]:
        """Return the records that came since the last read."""
        found: list[KernelLine | Mark] = []
        if self._fd is None and time.monotonic() < self._reopen_at:
            return found
        try:
            if self._fd is None:
                self._fd = self._open(found)
            self._take_records(self._fd, found)
        except OSError as error:
            self._fail(error)
        else:
            self.missing, self._trouble, self._reopen_s = False, "", REOPEN_S_MIN
        return found  # what was read before a failure counts too

    def judged(self) -> None:
        """Keep the place, so that a restarted process goes on from here."""
        if self._cursor is not None and self._seen is not None:
            self._cursor.save(self._seen)

    def close(self) -> None:
        """Close the device."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _fail(self, error: OSError) -> None:
        """Say that nothing is read, and look again later, ever less often."""
        self._counters.read_errors += 1
        self.missing, self.behind = True, False
        self.close()
        self._reopen_at = time.monotonic() + self._reopen_s
        self._reopen_s = min(2 * self._reopen_s, REOPEN_S_MAX)
        reason = error.strerror or str(error)
        if reason != self._trouble:
            self._trouble = reason
            _LOG.warning("%s cannot be read, trying on: %s", self._path, reason)

    def _open(self, found: list[KernelLine | Mark]) -> int:
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if self._seen is not None:
            self._after = self._seen  # opened again after trouble: go on where we were
        elif self._opened:
            found.append(Mark.GAP)  # what was written during the trouble is not known
        elif self._cursor is not None:
            self._after = self._cursor.load()
        self._opened = True
        # From the first record that is left, if we know which ones were judged already.
        os.lseek(fd, 0, os.SEEK_END if self._after is None else os.SEEK_SET)
        return fd

    def _take_records(self, fd: int, found: list[KernelLine | Mark]) -> None:
        for _ in range(RECORDS_MAX):
            try:
                record = os.read(fd, RECORD_BYTES_MAX)
            except BlockingIOError:
                if self._place_is_unknown():
                    self._begin_again(fd, found)
                    continue
                self.behind = False
                return
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                # The kernel overwrote records before they were read; the next read goes on.
                self._counters.read_errors += 1
                found.append(Mark.GAP)
                continue
            if not record:  # the kernel's own device waits instead of ending
                raise OSError(errno.ENODATA, "it ends, which the kernel's own log never does")
            found += self._record(record.decode(errors="replace"))
            self._counters.bytes_read += len(record)
            self._counters.lines += 1
        self.behind = True

    def _place_is_unknown(self) -> bool:
        """Return whether the log ends before the record that was judged last."""
        return None not in (self._after, self._skipped) and self._skipped != self._after

    def _begin_again(self, fd: int, found: list[KernelLine | Mark]) -> None:
        """Read all that is left: the place that was kept is one of another log."""
        found.append(Mark.GAP)
        self._after = self._skipped = None
        os.lseek(fd, 0, os.SEEK_SET)

    def _record(self, record: str) -> list[KernelLine | Mark]:
        sequence = record[:64].split(",", 2)[1:2]
        seq = int(sequence[0]) if sequence and sequence[0].isdecimal() else None
        if seq is not None:
            before, self._after = self._after, None
            if before is not None and seq <= before:
                self._after, self._skipped = before, seq
                return []  # judged before this process was started again
            self._seen = seq
            if before is not None and seq > before + 1:
                one = read_record(record)
                return [Mark.GAP] if one is None else [Mark.GAP, one]
        one = read_record(record)
        return [] if one is None else [one]


@dataclass(slots=True)
class Cursor:
    """A small file: the boot, and the last record of it that was judged."""

    path: Path
    _boot: str = ""
    _saved: int | None = None

    def load(self) -> int | None:
        """Return the last judged record of this boot, None when there is none."""
        try:
            kept = json.loads(self.path.read_bytes()[:CURSOR_BYTES_MAX])
        except (OSError, ValueError):
            return None
        if not isinstance(kept, dict) or kept.get("boot") != self._this_boot():
            return None
        seq = kept.get("seq")
        return seq if isinstance(seq, int) and not isinstance(seq, bool) and seq >= 0 else None

    def save(self, seq: int) -> None:
        """Keep ``seq``; a cursor that cannot be kept costs only what a restart would have seen."""
        boot = self._this_boot()
        if seq == self._saved or not boot:
            return
        draft = self.path.with_suffix(".new")
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps({"boot": boot, "seq": seq}), encoding="utf-8")
            draft.replace(self.path)
            self._saved = seq

    def _this_boot(self) -> str:
        if not self._boot:
            with contextlib.suppress(OSError):
                self._boot = BOOT_ID.read_text(encoding="ascii").strip()
        return self._boot
