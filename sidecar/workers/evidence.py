"""Looks at workers once more before they are stopped: stacks, kernel, environment, collectives.

Runs one py-spy a rank and reads ``/proc``, all ranks at once, and ends when its budget does with
whatever there is by then.  What is kept, and how it is written, is `sidecar.evidence_format`'s.
The workers are only looked at: nothing is attached to them, and a stopped one stays stopped.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import stat
import sysconfig
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sidecar.events import EvidenceTaken, TakeInspection
from sidecar.evidence_format import StackError, bounded, flight_lines, no_stacks, stacks
from sidecar.evidence_format import process_facts as facts_of
from sidecar.rank_evidence import ProcessFacts, RankEvidence, ThreadStack
from sidecar.workers.processes import GONE, process_state
from sidecar.workers.worker import Worker

AT_ONCE_MAX: Final = 16
"""py-spy processes at a time: each takes some 20 ms of a core."""
ATTEMPTS_MAX: Final = 3
"""A stack that changes while it is read cannot be read; the next moment it can."""
DUMP_BYTES_MAX: Final = 16 << 20
"""Far above the dump of a thousand threads."""
SAID_BYTES_MAX: Final = 16 << 10
RECORD_BYTES_MAX: Final = 8 << 20
"""Largest Flight Recorder dump that is read; torch keeps a few thousand entries."""
REAP_S: Final = 0.5
"""A killed process is gone within milliseconds, unless it waits for a worker's memory."""
CGROUPS: Final = Path("/sys/fs/cgroup")

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """What the file system said of one worker."""

    process: ProcessFacts | None
    collectives: tuple[str, ...]
    missing: tuple[str, ...]


class EvidenceCapture:
    """One look at a time; a newer one takes the place of an older.

    ``put`` gets the result.  ``py_spy`` is the program, by default the one that was installed
    with this Python.
    """

    def __init__(self, put: Callable[[EvidenceTaken], None], py_spy: str | None = None) -> None:
        self._put = put
        self._py_spy = py_spy or _installed()
        self._at_once = asyncio.Semaphore(AT_ONCE_MAX)
        self._task: asyncio.Task[None] | None = None
        self._running: set[int] = set()

    @property
    def pids(self) -> frozenset[int]:
        """Return the processes of this capture, which are nobody's orphans."""
        return frozenset(self._running)

    def begin(
        self, asked: TakeInspection, workers: Sequence[Worker], ranks: Collection[int]
    ) -> bool:
        """Look at ``workers``, where there is a budget.  Returns whether a result will follow.

        ``ranks`` are this node's, those whose process has ended included.
        """
        if asked.evidence_budget_s <= 0 or not ranks:
            return False
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._look(asked, workers, ranks))
        self._task.add_done_callback(_say_failure)
        return True

    async def close(self) -> None:
        """End what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(
        self, asked: TakeInspection, workers: Sequence[Worker], ranks: Collection[int]
    ) -> None:
        deadline = asyncio.get_running_loop().time() + asked.evidence_budget_s
        gone = set(ranks) - {worker.rank for worker in workers}
        ended = RankEvidence(missing=("its process has ended",))
        looks = (self._look_at(worker, deadline, asked.evidence_budget_s) for worker in workers)
        seen = await asyncio.gather(*looks)
        evidence = {str(worker.rank): found for worker, found in zip(workers, seen, strict=True)}
        evidence.update({str(rank): ended for rank in gone})
        self._put(EvidenceTaken(round_id=asked.round_id, evidence=evidence))

    async def _look_at(self, worker: Worker, deadline: float, budget_s: float) -> RankEvidence:
        missing: list[str] = []
        read = _Read(None, (), ())
        threads: tuple[ThreadStack, ...] = ()
        stacks_of = asyncio.create_task(self._stacks_of(worker.pid, deadline))
        try:
            async with asyncio.timeout_at(deadline):
                read = await asyncio.to_thread(_read, worker.pid, worker.flight_record)
            threads = await stacks_of
        except TimeoutError:
            missing.append(f"the look took longer than its {budget_s:g} s")
        except StackError as error:
            missing.append(str(error))
        finally:
            stacks_of.cancel()
        return bounded(
            RankEvidence(
                threads=threads,
                process=read.process,
                environment=worker.environment,
                flight_record=read.collectives,
                missing=(*read.missing, *missing),
            )
        )

    async def _stacks_of(self, pid: int, deadline: float) -> tuple[ThreadStack, ...]:
        """Return the stacks of ``pid``.  Raises `StackError` and `TimeoutError`."""
        if self._py_spy is None:
            raise StackError("no stacks, py-spy is not installed; pip install py-spy")
        async with asyncio.timeout_at(deadline), self._at_once:
            for attempt in range(1, ATTEMPTS_MAX + 1):
                try:
                    return stacks(await self._dump(self._py_spy, pid), pid)
                except StackError:
                    if attempt == ATTEMPTS_MAX or process_state(pid) in (GONE, "Z"):
                        raise
        raise AssertionError("the last attempt returns or raises")

    async def _dump(self, py_spy: str, pid: int) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *(py_spy, "dump", "--json", "--nonblocking", "--pid", str(pid)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise StackError(f"no stacks, {py_spy} cannot be run: {reason}") from error
        self._running.add(process.pid)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            dump, said = await asyncio.gather(
                _all_of(process.stdout, DUMP_BYTES_MAX), _all_of(process.stderr, SAID_BYTES_MAX)
            )
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), REAP_S)
            self._running.discard(process.pid)
        if code != 0:
            raise StackError(no_stacks(said))
        return dump


async def _all_of(stream: asyncio.StreamReader, bytes_max: int) -> bytes:
    """Return what comes until the end; what is beyond ``bytes_max`` is dropped with the pipe."""
    try:
        return await stream.readexactly(bytes_max)
    except asyncio.IncompleteReadError as error:
        return error.partial


def _installed() -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


# --- files, read beside the loop --------------------------------------------------------------


def _read(pid: int, flight_record: Path) -> _Read:
    """Read what the kernel and torch left in files.  None of these reads waits for the worker."""
    missing: list[str] = []
    process = _process(pid)
    if process is None:
        missing.append("its process has ended")
    collectives: tuple[str, ...] = ()
    try:
        if stat.S_ISREG(flight_record.stat().st_mode):  # opening a pipe would wait for its writer
            with flight_record.open("rb") as file:
                collectives = flight_lines(file.read(RECORD_BYTES_MAX))
    except FileNotFoundError:
        pass  # torch was not asked to keep one
    except (OSError, ValueError) as error:
        missing.append(f"the Flight Recorder's file cannot be read: {error}")
    return _Read(process, collectives, tuple(missing))


def _process(pid: int) -> ProcessFacts | None:
    proc = Path("/proc") / str(pid)
    try:
        open_files = len(os.listdir(proc / "fd"))  # noqa: PTH208 - only the count matters
    except OSError:
        open_files = None
    group = _text(proc / "cgroup") or ""
    used, limit = _memory_files(group)
    return facts_of(
        _text(proc / "status") or "",
        wchan=_text(proc / "wchan"),
        open_files=open_files,
        memory_used=_text(used),
        memory_limit=_text(limit),
    )


def _memory_files(group: str) -> tuple[Path, Path]:
    """Return where the control group in ``/proc/<pid>/cgroup`` tells its memory, and its limit."""
    for line in group.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # version 1
            folder = CGROUPS / "memory" / path.lstrip("/")
            return folder / "memory.usage_in_bytes", folder / "memory.limit_in_bytes"
    unified = group.rpartition("0::")[2].strip().lstrip("/")
    return CGROUPS / unified / "memory.current", CGROUPS / unified / "memory.max"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("the look at the workers failed", exc_info=error)
