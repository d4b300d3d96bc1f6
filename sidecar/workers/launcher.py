"""Starts, hears and ends this node's workers.

A worker leads its own session, writes to files (a pipe that nobody reads would block it), dies
with the sidecar, and takes its descendants with it.  This shell reports what happened, with the
true cause, and decides nothing about what follows: `WorkersGone` is said only when the kernel
knows no process of the generation any more.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from scout.progress import ProgressPageError
from sidecar.api import Start
from sidecar.events import Orders, SpawnFailed, WorkerExited, WorkersGone, WorkersSpawned
from sidecar.evidence_format import redacted
from sidecar.rank_table import RankTable
from sidecar.workers.command import script_version
from sidecar.workers.files import LogFiles, last_lines, open_rank_files
from sidecar.workers.launch import LaunchSettings
from sidecar.workers.marks import SIDECAR_MARK_ENV
from sidecar.workers.orphans import (
    WORKERS_REMEMBERED_MAX,
    Family,
    find_strays,
    kill_orphans,
)
from sidecar.workers.pages import ProgressPages
from sidecar.workers.polite import Courtesy
from sidecar.workers.processes import (
    become_subreaper,
    die_with_parent,
    reap,
    signal_group,
)
from sidecar.workers.resource_config import write_resource_config
from sidecar.workers.tee import Tee
from sidecar.workers.warm_pool import WarmPool, WarmStartError
from sidecar.workers.worker import Worker, exit_cause, settled, spawn_reason

STATE_POLL_S: Final = 0.02
"""Between two looks at workers that were asked to leave, and at orphans that were killed."""
STUCK_WARNING_S: Final = 10.0
"""A process that outlives SIGKILL this long hangs in the kernel: say so, and again as often."""
STRAYS_PERIOD_S: Final = 10.0
"""How often ended orphans are collected while training goes on."""
LAST_LINES: Final = 20

_LOG = logging.getLogger(__name__)

LauncherEvent = WorkersSpawned | SpawnFailed | WorkerExited | WorkersGone


@dataclass(slots=True)
class _Ending:
    """The one stop that is under way; a later, harsher one sharpens it."""

    generation: int
    deadline: float
    changed: asyncio.Event
    keep: frozenset[int]


class Launcher:
    """The workers of one node.  Every method belongs to the event loop's thread.

    ``warm`` offers workers that have imported already; ``helpers`` names processes of this
    sidecar that are no workers and nobody's orphans.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        pages: ProgressPages,
        put: Callable[[LauncherEvent], None],
        *,
        warm: WarmPool | None = None,
        helpers: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self._settings = settings
        self._pages = pages
        self._put = put
        self._warm = warm
        self._helpers = helpers
        self._workers: dict[int, Worker] = {}
        self._files: dict[int, dict[int, LogFiles]] = {}
        self._marks: dict[int, str] = {}
        self._ending: _Ending | None = None
        self._ending_task: asyncio.Task[None] | None = None
        self._tee = Tee(settings.tee)
        if not become_subreaper():
            _LOG.warning("not a subreaper: a detached process of a worker can outlive a stop")

    # --- asked for by the core ------------------------------------------------------------

    def spawn(self, start: Start, keep: frozenset[int] = frozenset()) -> None:
        """Start every worker of ``start``.  Ends in `WorkersSpawned` or `SpawnFailed`.

        Those of the local ranks ``keep`` that live are carried into its generation.
        """
        if self._ending is not None:
            reason = f"generation {self._ending.generation} is still being stopped"
            self._put(SpawnFailed(generation=start.generation, reason=reason))
            return
        living = [it for it in self._workers.values() if it.local_rank in keep]
        missing = set(range(self._settings.nproc)) - {it.local_rank for it in living}
        started: list[Worker] = []
        carried: dict[int, Orders] = {}
        try:
            self.keep_table(RankTable().started(start), start.group_rank)
            for local_rank in sorted(missing):
                started.append(self._spawn_one(start, local_rank))  # noqa: PERF401 - kept on error
            for worker in living:
                carried[worker.local_rank] = self._carry(worker, start)
        except (OSError, ProgressPageError, subprocess.SubprocessError) as error:
            for worker in started:
                self._abandon(worker)
            self._pages.remove(start.generation)
            self._put(SpawnFailed(generation=start.generation, reason=spawn_reason(error)))
            return
        loop = asyncio.get_running_loop()
        for worker in started:
            self._workers[worker.pid] = worker
            loop.add_reader(worker.pidfd, self._collect, worker.pid)
        everybody = [*started, *living]
        self._files[start.generation] = {w.local_rank: w.files for w in everybody}
        self._tee.follow({w.local_rank: (w.rank, w.files) for w in started})
        pids = {worker.local_rank: worker.pid for worker in everybody}
        self._pages.remove(start.generation - 1)
        version = script_version(self._settings.command)
        self._put(
            WorkersSpawned(
                generation=start.generation, pids=pids, carried=carried, script_version=version
            )
        )

    def keep_table(self, table: RankTable, group_rank: int) -> None:
        """Write the table of hosts for scripts that read it.  Raises `OSError`."""
        write_resource_config(self._settings.resource_config, table, group_rank)

    def kill(self, generation: int, grace_s: float, keep: frozenset[int] = frozenset()) -> None:
        """End the workers of ``generation`` and older that are not of the local ranks ``keep``.

        Ends in `WorkersGone`.  Asked again while it is under way, the higher generation, the
        earlier deadline and the last ``keep`` hold.
        """
        deadline = asyncio.get_running_loop().time() + max(0.0, grace_s)
        if self._ending is not None:
            self._ending.generation = max(self._ending.generation, generation)
            self._ending.deadline = min(self._ending.deadline, deadline)
            self._ending.keep = keep
            self._ending.changed.set()
            return
        self._ending = _Ending(generation, deadline, asyncio.Event(), keep)
        self._ending_task = asyncio.create_task(self._end(self._ending))

    # --- asked for by other shells --------------------------------------------------------

    def worker_of(self, pid: int) -> Worker | None:
        """Return the running worker with this process id."""
        return self._workers.get(pid)

    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the running workers."""
        return tuple(self._workers)

    def running(self, generation: int | None) -> tuple[Worker, ...]:
        """Return the running workers of ``generation``."""
        return tuple(it for it in self._workers.values() if it.generation == generation)

    def log_files(self, generation: int) -> Mapping[int, LogFiles]:
        """Return local rank -> output files of ``generation``, empty when it never ran here."""
        return self._files.get(generation, {})

    async def collect_strays(self) -> None:
        """Reap orphans that ended by themselves, for as long as the sidecar runs."""
        while True:
            await asyncio.sleep(STRAYS_PERIOD_S)
            strays = await asyncio.to_thread(find_strays, self._family(ended_generation=-1))
            for pid in strays:
                if pid not in self._marks:  # a worker may have been started meanwhile
                    reap(pid)

    async def close(self, limit_s: float) -> bool:
        """End everything at once; return whether it was gone within ``limit_s``."""
        newest = max((w.generation for w in self._workers.values()), default=0)
        self.kill(max(newest, *self._files, 0), grace_s=0.0)
        assert self._ending_task is not None, "a kill starts it"
        await asyncio.wait([self._ending_task], timeout=limit_s)
        await asyncio.to_thread(self._tee.close)
        return not self._workers

    # --- starting -------------------------------------------------------------------------

    def _spawn_one(self, start: Start, local_rank: int) -> Worker:
        rank = self._settings.rank(start, local_rank)
        page = self._pages.create(start.generation, rank, local_rank)
        mark = secrets.token_hex(8)
        with open_rank_files(self._settings.folder(start, local_rank)) as (files, stdout, stderr):
            environment = self._settings.environment(start, local_rank, page, files, mark)
            pid, process = self._run(environment, stdout, stderr)
        self._pages.bind(start.generation, local_rank, pid)
        self._remember(pid, mark)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        return Worker(
            generation=start.generation,
            local_rank=local_rank,
            rank=rank,
            pid=pid,
            files=files,
            process=process,
            pidfd=pidfd,
            environment=redacted(environment),
            flight_record=page.flight_record,
            mark=mark,
            born=start.generation,
        )

    def _carry(self, worker: Worker, start: Start) -> Orders:
        """Make a living worker one of ``start``; return what it must be told of that."""
        local_rank = worker.local_rank
        rank = self._settings.rank(start, local_rank)
        page = self._pages.create(start.generation, rank, local_rank)
        self._pages.bind(start.generation, local_rank, worker.pid)
        with open_rank_files(self._settings.folder(start, local_rank)) as (files, _, _):
            environment = self._settings.environment(start, local_rank, page, files, worker.mark)
        worker.generation, worker.rank = start.generation, rank
        worker.files, worker.flight_record = files, page.flight_record
        worker.environment = redacted(environment)
        inherited = self._settings.inherited
        envs = {name: it for name, it in environment.items() if inherited.get(name) != it}
        return Orders(envs=envs, stdout=str(files.stdout), stderr=str(files.stderr))

    def _run(
        self, environment: Mapping[str, str], stdout: BinaryIO, stderr: BinaryIO
    ) -> tuple[int, subprocess.Popen[bytes] | None]:
        """Start one worker, warm if that is offered."""
        if self._warm is not None and self._warm.ready:
            try:
                outputs = (stdout.fileno(), stderr.fileno())
                return self._warm.fork(environment, outputs, str(Path.cwd())), None
            except WarmStartError as error:
                _LOG.warning("a worker starts cold: %s", error)
        process = subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
            self._settings.command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - two system calls, no lock
        )
        return process.pid, process

    def _remember(self, pid: int, mark: str) -> None:
        self._marks.pop(pid, None)
        self._marks[pid] = mark
        while len(self._marks) > WORKERS_REMEMBERED_MAX:
            del self._marks[next(iter(self._marks))]

    def _abandon(self, worker: Worker) -> None:
        signal_group(worker.pid, signal.SIGKILL)
        os.kill(worker.pid, signal.SIGKILL)  # a warm one may not lead its group yet
        os.waitpid(worker.pid, 0)
        settled(worker, 0)
        os.close(worker.pidfd)

    # --- hearing --------------------------------------------------------------------------

    def _collect(self, pid: int) -> None:
        """Report the end of worker ``pid``; its pidfd became readable."""
        worker = self._workers[pid]
        # Not reaped yet: its number still means this group, so its children can be hit safely.
        peek = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if peek is None:
            return
        if not (peek.si_code == os.CLD_EXITED and peek.si_status == 0):
            signal_group(pid, signal.SIGKILL)
        status = reap(pid)
        assert status is not None, "nobody else reaps a worker"
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        del self._workers[pid]
        cause = exit_cause(status)
        settled(worker, -(cause.signal or 0) or (cause.code or 0))
        if self._ending is not None:
            self._ending.changed.set()
        self._put(
            WorkerExited(
                generation=worker.generation,
                local_rank=worker.local_rank,
                pid=pid,
                cause=cause,
                last_lines=last_lines(worker.files, LAST_LINES),
            )
        )

    # --- ending ---------------------------------------------------------------------------

    async def _end(self, ending: _Ending) -> None:
        loop = asyncio.get_running_loop()
        courtesy = Courtesy(loop.time())
        courtesy.ask((it.pid for it in self._meant(ending)), ending.deadline, loop.time())
        while loop.time() < ending.deadline and self._meant(ending):
            await _changed(ending, min(STATE_POLL_S, ending.deadline - loop.time()))
            courtesy.ask((it.pid for it in self._meant(ending)), ending.deadline, loop.time())
        await self._kill_until_gone(ending)
        self._ending = None
        self._pages.remove(ending.generation, keep=ending.keep)
        self._tee.forget(keep=ending.keep)
        for old in [g for g in self._files if g < ending.generation]:
            del self._files[old]
        self._put(WorkersGone(generation=ending.generation, kept=ending.keep))

    async def _kill_until_gone(self, ending: _Ending) -> None:
        loop = asyncio.get_running_loop()
        complain_at = loop.time() + STUCK_WARNING_S
        while True:
            meant = self._meant(ending)
            for worker in meant:
                signal_group(worker.pid, signal.SIGKILL)
            family = self._family(ending.generation, ending.keep)
            left = await asyncio.to_thread(kill_orphans, family)
            if left.nobody and not self._meant(ending):
                return
            if loop.time() >= complain_at:
                _LOG.warning("%s", left.told(worker.pid for worker in self._meant(ending)))
                complain_at = loop.time() + STUCK_WARNING_S
            await _changed(ending, STATE_POLL_S)

    def _meant(self, ending: _Ending) -> list[Worker]:
        old = [w for w in self._workers.values() if w.generation <= ending.generation]
        return [w for w in old if w.local_rank not in ending.keep]

    def _family(self, ended_generation: int, keep: frozenset[int] = frozenset()) -> Family:
        workers = self._workers.values()
        stay = [w for w in workers if w.generation > ended_generation or w.local_rank in keep]
        return Family(
            marks=dict(self._marks),
            running=frozenset(w.pid for w in workers) | self._helpers(),
            keep=frozenset(w.pid for w in stay),
            sidecar_mark=self._settings.inherited.get(SIDECAR_MARK_ENV),
            sole_parent=self._settings.sole_parent,
        )


async def _changed(ending: _Ending, wait_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ending.changed.wait(), max(0.0, wait_s))
    ending.changed.clear()
