"""Follows the kernel's log and convicts the GPU that a fatal Xid names.

Decides only what was said already: one finding for a device and code until the daemon restarts.
What is fatal stands in `sidecar.hardware.xid`.  A log that is not there is said and retried, and
never means that the hardware is well.
"""

import asyncio
import errno
import logging
import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from sidecar.events import HardwareFinding
from sidecar.hardware.xid import XidEvent, XidSeverity, normalise_pci, parse_xid
from sidecar.logs.follow import FollowCounters, FollowedFile

KMSG: Final = Path("/dev/kmsg")
POLL_S: Final = 0.1
RECORD_BYTES_MAX: Final = 8192
"""A /dev/kmsg record is read whole or not at all; the kernel's own limit is 8 KiB."""
RECORDS_MAX: Final = 1000
"""Records of one read, so that a flooded kernel log cannot keep the thread."""
REMEMBERED_MAX: Final = 4096
"""Devices and codes remembered; far more than a node has, and a bound on a garbled log."""
LINE_CHARS_MAX: Final = 1000

_LOG = logging.getLogger(__name__)


class _Source(Protocol):
    """Where kernel lines come from.  ``missing`` is True while there is none."""

    missing: bool

    def read(self) -> list[str]: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class KernelLogCounters(FollowCounters):
    """What was read, and the Xids seen, by severity."""

    xids: dict[XidSeverity, int] = field(default_factory=lambda: dict.fromkeys(XidSeverity, 0))
    findings: int = 0


class KernelLogWatcher:
    """Findings about this node's GPUs.  ``emit`` is called on the event loop.

    ``gpus`` maps a PCI address, in any spelling, to the device's index.
    """

    def __init__(
        self,
        path: Path,
        gpus: Mapping[str, int],
        emit: Callable[[HardwareFinding], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._path = path
        self._gpus = {normalise_pci(pci) or pci.lower(): index for pci, index in gpus.items()}
        self._emit = emit
        self._poll_s = poll_s
        self._said: set[tuple[str, int]] = set()
        self._source: _Source | None = None
        self._missing_said = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel-log")
        self.counters = KernelLogCounters()

    async def run(self) -> None:
        """Follow the log until cancelled; only lines written from now on count."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                lines = await loop.run_in_executor(self._thread, self._read)
                for line in lines:
                    self._judge(line)
                await asyncio.sleep(self._poll_s)
        finally:
            if self._source is not None:
                self._thread.submit(self._source.close)
            self._thread.shutdown(wait=False)

    @property
    def available(self) -> bool:
        """True while there is a log to read.  False is "not known", never "well"."""
        return self._source is not None and not self._source.missing

    def _read(self) -> list[str]:
        if self._source is None:
            self._source = _open_source(self._path, self.counters)
        lines = self._source.read()
        if self._source.missing and not self._missing_said:
            self._missing_said = True
            _LOG.warning("no kernel log is read from %s yet; it is looked for again", self._path)
        elif not self._source.missing and self._missing_said:
            self._missing_said = False
            _LOG.info("the kernel log at %s is read now", self._path)
        return lines

    def _judge(self, line: str) -> None:
        event = parse_xid(line)
        if event is None:
            return
        meaning = event.meaning
        self.counters.xids[meaning.severity] += 1
        key = (event.pci, event.code)
        if key in self._said:
            return
        if len(self._said) < REMEMBERED_MAX:
            self._said.add(key)
        gpu = self._gpus.get(event.pci)
        if meaning.severity is not XidSeverity.FATAL:
            _LOG.warning("%s", _sentence(event, gpu))
            return
        self.counters.findings += 1
        self._emit(
            HardwareFinding(
                gpu=gpu,
                reason=f"Xid{event.code}",
                message=_sentence(event, gpu),
                line=line[:LINE_CHARS_MAX],
            )
        )


def _sentence(event: XidEvent, gpu: int | None) -> str:
    meaning = event.meaning
    who = f"GPU {gpu}" if gpu is not None else "a GPU that is not among this node's known ones"
    return f"Xid {event.code} on {who} (PCI {event.pci}): {meaning.meaning}; {meaning.action}"


def _open_source(path: Path, counters: FollowCounters) -> _Source:
    try:
        is_device = stat.S_ISCHR(path.stat().st_mode)
    except OSError:
        is_device = False
    if is_device:
        return _KernelDevice(path, counters)
    return FollowedFile(path, counters, from_end=True)


class _KernelDevice:
    """``/dev/kmsg``: a read gives one record, of those written since it was opened."""

    def __init__(self, path: Path, counters: FollowCounters) -> None:
        self._path = path
        self._counters = counters
        self._fd: int | None = None
        self._trouble = ""
        self.missing = True

    def read(self) -> list[str]:
        """Return the records that came since the last read."""
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._fd, 0, os.SEEK_END)
            return self._records(self._fd)
        except OSError as error:
            self._counters.read_errors += 1
            self.missing = True
            self.close()
            reason = error.strerror or str(error)
            if reason != self._trouble:
                self._trouble = reason
                _LOG.warning("%s cannot be read, trying on: %s", self._path, reason)
            return []

    def close(self) -> None:
        """Close the device."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _records(self, fd: int) -> list[str]:
        lines: list[str] = []
        while len(lines) < RECORDS_MAX:
            try:
                record = os.read(fd, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                # The kernel overwrote records before they were read; the next read goes on.
                self._counters.read_errors += 1
                continue
            if not record:
                break
            text = record.decode(errors="replace")
            lines.append(text.split("\n", 1)[0])
            self._counters.bytes_read += len(record)
            self._counters.lines += 1
        self.missing = False
        return lines
