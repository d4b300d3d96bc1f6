"""Follows the kernel's log and tells the agent what `sidecar.hardware.kernel_judge` found.

Decides nothing about a line.  A log that is not there is said and retried, and never means that
the hardware is well.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from scout.clock import Instant, seconds, since
from sidecar.events import HardwareFinding, ProcessNote
from sidecar.hardware.catalogue import Catalogue, XidSeverity, shipped
from sidecar.hardware.kernel_events import KernelFinding, KernelKind
from sidecar.hardware.kernel_health import HealthFeed, Listener
from sidecar.hardware.kernel_judge import KernelJudge
from sidecar.hardware.kernel_sources import KernelSource, open_source
from sidecar.logs.follow import FollowCounters

KMSG: Final = Path("/dev/kmsg")
POLL_S: Final = 0.2
"""A fault is told this soon; a worker's death asks at once."""
NOTES_MAX: Final = 64
"""Recent findings kept for evidence."""
NOTES_SHOWN_S: Final = 300.0
"""How long a finding speaks about what happens now."""
CURSOR_SAVED_EVERY_S: Final = 1.0
CATCH_UP_S_MAX: Final = 0.25
"""Longest wait for the kernel's word on a death; a read takes a millisecond."""
NOTES_GIVEN_MAX: Final = 5
"""Findings beside one rank's output."""

KILLERS: Final[Mapping[KernelKind, str]] = {
    KernelKind.OOM_KILL: "the kernel's OOM killer",
    KernelKind.MEMORY_FAILURE: "the kernel, because the machine's memory failed",
}
"""Who sent the signal, where the kernel itself did."""

_LOG = logging.getLogger(__name__)

Emit: TypeAlias = Callable[[HardwareFinding | ProcessNote], None]


@dataclass(slots=True, kw_only=True)
class KernelLogCounters(FollowCounters):
    """What was read: Xids by severity and by device and code, other lines by kind, and gaps.

    ``gpu_xids`` has the index of the device, None for one that is not known.
    """

    xids: dict[XidSeverity, int] = field(default_factory=lambda: dict.fromkeys(XidSeverity, 0))
    gpu_xids: dict[tuple[int | None, int], int] = field(default_factory=dict)
    kinds: dict[KernelKind, int] = field(default_factory=lambda: dict.fromkeys(KernelKind, 0))
    gaps: int = 0
    findings: int = 0


class KernelLogWatcher:
    """Findings about this node.  ``emit`` is called on the event loop.

    ``gpus`` maps a PCI address, in any spelling, to the device's index.  ``cursor`` is a file that
    keeps the place in the kernel's own log.  ``owner`` returns the local rank whose worker, or
    whose worker's child, a process is.  ``health`` is the hardware monitor's source, if there is a
    monitor.
    """

    def __init__(
        self,
        path: Path,
        gpus: Mapping[str, int],
        emit: Emit,
        poll_s: float = POLL_S,
        *,
        catalogue: Catalogue | None = None,
        cursor: Path | None = None,
        owner: Callable[[int], int | None] | None = None,
        health: Listener | None = None,
    ) -> None:
        self._path = path
        self._emit = emit
        self._poll_s = poll_s
        self._cursor = cursor
        self._owner = owner
        self._judge = KernelJudge(gpus, catalogue=catalogue)
        self._feed = None if health is None else HealthFeed(health, catalogue or shipped())
        self.gpus = tuple(sorted(set(gpus.values())))
        self._source: KernelSource | None = None
        self._missing_said = False
        self._saved_at = Instant(0)
        self._recent: deque[tuple[Instant, KernelFinding]] = deque(maxlen=NOTES_MAX)
        self._reading: set[asyncio.Task[Any]] = set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel-log")
        self._wanted = threading.Event()
        """Set when something else is to be done in the thread."""
        self.counters = KernelLogCounters()

    async def run(self) -> None:
        """Follow the log until cancelled; only what is written from now on counts."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                for finding in await loop.run_in_executor(self._thread, self._poll):
                    self._tell(finding)
        finally:
            self._thread.submit(self._close)
            self._wanted.set()
            self._thread.shutdown(wait=False)

    async def catch_up(self) -> bool:
        """Read and tell what is there now.  Returns whether there may be more."""
        reading = asyncio.get_running_loop().run_in_executor(self._thread, self._read)
        self._wanted.set()
        findings, behind = await reading
        for finding in findings:
            self._tell(finding)
        return behind

    def after_catching_up(self, then: Callable[[], None]) -> None:
        """Call ``then`` once what the log holds now was told, or after a moment.

        Whoever saw a process die by a signal first asks whether the kernel says why.
        """
        reading = asyncio.create_task(self.catch_up())

        async def wait() -> None:
            # Not cancelled when it takes longer: what it found would be lost.
            await asyncio.wait({reading}, timeout=CATCH_UP_S_MAX)
            then()

        for task in (reading, asyncio.create_task(wait())):
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    @property
    def available(self) -> bool:
        """True while there is a log to read.  False is "not known", never "well"."""
        return self._source is not None and not self._source.missing

    def recent(self, now: Instant) -> tuple[str, ...]:
        """Return what was found in the last minutes, oldest first, as lines of evidence."""
        limit = seconds(NOTES_SHOWN_S)
        lines = [
            f"kernel: {finding.message}"
            for at, finding in self._recent
            if since(at, now) <= limit and finding.severity is not XidSeverity.INFO
        ]
        return tuple(lines[-NOTES_GIVEN_MAX:])

    # --- on the thread ----------------------------------------------------------------------

    def _poll(self) -> list[KernelFinding]:
        """Read until there is something to tell, or something else to do in this thread."""
        while True:
            findings, behind = self._read()
            if self._wanted.wait(0 if behind or findings else self._poll_s):
                self._wanted.clear()
                return findings
            if findings:
                return findings

    def _read(self) -> tuple[list[KernelFinding], bool]:
        if self._source is None:
            self._source = open_source(self._path, self.counters, self._cursor)
        source, now = self._source, Instant(time.monotonic_ns())
        findings: list[KernelFinding] = []
        for found in source.read():
            findings += self._judge.take_read(found, now)
        findings += self._judge.tick(now)
        if self._feed is not None:
            self._feed.go_on(self._judge, now)
        self._count()
        if since(self._saved_at, now) >= seconds(CURSOR_SAVED_EVERY_S):
            self._saved_at = now
            source.judged()
        self._say_missing(source)
        return findings, source.behind

    def _say_missing(self, source: KernelSource) -> None:
        if source.missing and not self._missing_said:
            self._missing_said = True
            _LOG.warning("no kernel log is read from %s yet; it is looked for again", self._path)
        elif not source.missing and self._missing_said:
            self._missing_said = False
            _LOG.info("the kernel log at %s is read now", self._path)

    def _count(self) -> None:
        """Put the judge's counts where the event loop may read them: each key by itself."""
        seen, counters = self._judge.counters, self.counters
        counters.gaps, counters.findings = seen.gaps, seen.findings
        counters.xids.update(seen.severities)
        counters.kinds.update(seen.kinds)
        by_gpu: dict[tuple[int | None, int], int] = {}
        for (pci, code), count in seen.xids.items():
            key = self._judge.gpu_of(pci), code
            by_gpu[key] = by_gpu.get(key, 0) + count
        counters.gpu_xids = by_gpu

    def _close(self) -> None:
        if self._source is not None:
            self._source.judged()
            self._source.close()

    # --- on the event loop ------------------------------------------------------------------

    def _tell(self, finding: KernelFinding) -> None:
        self._recent.append((Instant(time.monotonic_ns()), finding))
        if finding.convicts:
            self._emit(
                HardwareFinding(
                    gpu=finding.gpu,
                    reason=finding.reason,
                    message=finding.message,
                    line=finding.line,
                )
            )
        else:
            quiet = finding.severity in (XidSeverity.INFO, XidSeverity.FOLLOW_UP)
            _LOG.log(logging.INFO if quiet else logging.WARNING, "%s", finding.message)
        if finding.pid is not None and finding.severity is not XidSeverity.FOLLOW_UP:
            self._emit(
                ProcessNote(
                    pid=finding.pid,
                    local_rank=None if self._owner is None else self._owner(finding.pid),
                    reason=finding.reason,
                    message=finding.message,
                    line=finding.line,
                    killer=KILLERS.get(finding.kind, ""),
                )
            )
