"""This node's progress pages: made before a worker starts, read on a tick, removed afterwards.

One folder per sidecar, on shared memory where the machine has it.  A page that cannot be read
makes its rank's progress "not known"; it never makes the rank look healthy.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scout.clock import Instant
from scout.hang import RankSnapshot
from scout.held import ASLEEP, HeldWatch
from scout.kernel_sleep import sleeps
from scout.page_snapshot import with_progress
from scout.progress import PageReader, Progress, ProgressPageError, create_page
from sidecar.events import ProgressObserved
from sidecar.whole_numbers import whole_number
from sidecar.workers.processes import UNSEEN, process_state, read_process
from worker_shim.messages import FLIGHT_RECORD_SUFFIX

TICK_S: Final = 0.25
"""How often pages are read.  A read costs microseconds; a judgement needs seconds of silence."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - named after what it is, entries are 0700
FOLDER_PREFIX: Final = "outrider-"
PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
OWNER_NAME: Final = "owner"
"""File that tells whether a folder's sidecar still lives."""
FOLDER_NAME_CHARS_MAX: Final = 200
"""File names end at 255 bytes; the digest that makes ours unique must still fit."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Page:
    """One rank's page and the process that writes it."""

    generation: int
    rank: int
    local_rank: int
    path: Path
    token: int
    reader: PageReader | None = None
    pid: int | None = None
    held: HeldWatch = field(default_factory=HeldWatch)

    @property
    def flight_record(self) -> Path:
        """Where this page's worker may leave torch's Flight Recorder."""
        return self.path.with_name(f"{self.path.name}{FLIGHT_RECORD_SUFFIX}")


class ProgressPages:
    """The pages of one sidecar.  ``identity`` tells it from any other on this machine."""

    def __init__(self, *, job: str, node: str, identity: str) -> None:
        self._node = node
        self.folder = _page_folder(job, node, identity)
        """Where the pages stand."""
        self._pages: dict[tuple[int, int], Page] = {}
        self._claimed = False

    def claim(self) -> None:
        """Make the folder ours, and clear what sidecars that were killed left behind.

        No other sidecar may live under our name.  Raises `OSError`.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        _sweep(self.folder.parent)
        self.folder.mkdir(mode=0o700, parents=True)
        (self.folder / OWNER_NAME).write_text(_owner(os.getpid()) or "", encoding="utf-8")
        self._claimed = True

    def create(self, generation: int, rank: int, local_rank: int) -> Page:
        """Create a rank's page.  Raises `OSError` or `ProgressPageError`."""
        token = secrets.randbits(63)
        path = self.folder / f"generation-{generation}-rank-{rank}-{token:016x}"
        create_page(path, token)
        page = Page(generation, rank, local_rank, path, token)
        page.reader = PageReader.open(path, token)
        self._pages[generation, local_rank] = page
        return page

    def bind(self, generation: int, local_rank: int, pid: int) -> None:
        """Say which process writes the page."""
        self._pages[generation, local_rank].pid = pid

    def snapshots(self, now: Instant) -> tuple[RankSnapshot, ...]:
        """Look at every rank of the newest generation, in rank order."""
        newest = self.generation()
        mine = [page for page in self._pages.values() if page.generation == newest]
        return tuple(self._snapshot(page, now) for page in sorted(mine, key=lambda p: p.rank))

    def generation(self) -> int | None:
        """Return the newest generation that has pages here."""
        return max((page.generation for page in self._pages.values()), default=None)

    def ranks(self) -> Mapping[int, int]:
        """Return local rank -> global rank of the newest generation."""
        newest = self.generation()
        return {p.local_rank: p.rank for p in self._pages.values() if p.generation == newest}

    def remove(self, generation: int, keep: frozenset[int] = frozenset()) -> None:
        """Remove the pages of ``generation`` and older, but not those of local ranks ``keep``."""
        for key, page in list(self._pages.items()):
            if page.generation <= generation and page.local_rank not in keep:
                del self._pages[key]
                if page.reader is not None:
                    page.reader.close()
                page.path.unlink(missing_ok=True)
                page.flight_record.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove every page and the folder."""
        self.remove(max((page.generation for page in self._pages.values()), default=0))
        if self._claimed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _snapshot(self, page: Page, now: Instant) -> RankSnapshot:
        state = None if page.pid is None else process_state(page.pid)
        state = None if state == UNSEEN else state
        # How often a process went to sleep is asked only of one that cannot be woken.
        slept = sleeps(page.pid) if page.pid is not None and state == ASLEEP else None
        blank = RankSnapshot(
            rank=page.rank,
            node=self._node,
            local_rank=page.local_rank,
            process_state=state,
            held_ns=page.held.observe(state, slept, now),
        )
        progress = _read(page)
        return blank if progress is None else with_progress(blank, progress, now)


async def tick_pages(
    pages: ProgressPages, put: Callable[[ProgressObserved], None], period_s: float = TICK_S
) -> None:
    """Report what the pages say every ``period_s`` while there are any."""
    while True:
        await asyncio.sleep(period_s)
        generation = pages.generation()
        if generation is not None:
            seen = pages.snapshots(Instant(time.monotonic_ns()))
            put(ProgressObserved(generation=generation, ranks=seen))


def _read(page: Page) -> Progress | None:
    if page.reader is None:
        return None
    try:
        return page.reader.read()
    except (ProgressPageError, OSError, ValueError) as error:
        _LOG.warning("progress of rank %d is not known any more: %s", page.rank, error)
        page.reader.close()
        page.reader = None
        return None


def _page_folder(job: str, node: str, identity: str) -> Path:
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return base / f"{f'{FOLDER_PREFIX}{job}-{node}'[:FOLDER_NAME_CHARS_MAX]}-{digest}"


def _owner(pid: int) -> str | None:
    """Return what names the process for good: its pid namespace, pid and start; None if dead."""
    info = read_process(pid)
    if info is None or info.state in "ZX":
        return None
    return f"{PID_NAMESPACE.readlink()} {pid} {info.started}"


def _sweep(base: Path) -> None:
    """Remove the folders of our user's sidecars that were killed."""
    namespace = str(PID_NAMESPACE.readlink())
    for folder in base.glob(f"{FOLDER_PREFIX}*"):
        try:
            said = (folder / OWNER_NAME).read_text(encoding="utf-8")
            mine = folder.stat().st_uid == os.getuid()
        except (OSError, UnicodeDecodeError):
            continue
        where, _, rest = said.partition(" ")
        pid = whole_number(rest.partition(" ")[0])
        # A pid of another namespace says nothing here: its owner may well live.
        if mine and where == namespace and pid is not None and _owner(pid) != said:
            shutil.rmtree(folder, ignore_errors=True)
