"""The sidecar as a process: core, workers, sockets and watchers put together.

It wires and serves; every decision is the agent core's.  However it ends, it leaves no worker,
no socket and no shared memory behind.
"""

import asyncio
import contextlib
import logging
import signal
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from sidecar.agent import AgentCore
from sidecar.api import Shutdown, StatusReport
from sidecar.api_server import ApiServer
from sidecar.config import NodeConfig, read_access
from sidecar.drive import drive, monotonic
from sidecar.events import (
    AnswerWorker,
    CommandReceived,
    DiscardState,
    Effect,
    Event,
    InspectionTaken,
    KeepTable,
    KillWorkers,
    PortReserved,
    ProgressObserved,
    Quit,
    Reply,
    Report,
    ReservePort,
    Say,
    SpawnWorkers,
    TakeInspection,
    WatchLogs,
    WorkerExited,
    WorkersGone,
)
from sidecar.given_files import system_reason
from sidecar.hardware.nvml import GpuInventory
from sidecar.inspection import by_rank
from sidecar.live_numbers import LiveNumbers
from sidecar.loop_lag import LoopLag
from sidecar.metrics import NodeCounters
from sidecar.node_shown import NodeShown
from sidecar.startup import (
    SidecarError,
    agent_config,
    agent_version,
    cannot_make_socket,
    introduction,
    known_gpus,
    launch_settings,
    listen,
    log_watch,
    node_watch,
    prepare,
)
from sidecar.uplink import Uplink
from sidecar.workers.evidence import EvidenceCapture
from sidecar.workers.guardian import Guardian, draw_mark
from sidecar.workers.ipc_server import SocketPathError, WorkerServer
from sidecar.workers.launcher import Launcher
from sidecar.workers.pages import ProgressPages, tick_pages
from sidecar.workers.ports import PortError, ReservedPort, reserve_port
from sidecar.workers.processes import ancestors
from sidecar.workers.warm_pool import WarmPool

__all__ = ["SidecarError", "prepare", "run_sidecar"]

INBOX_EVENTS_MAX: Final = 65_536
"""Events that may wait for the core, which takes one in microseconds."""
PORT_RETRY_S: Final = 1.0
"""Between two tries to reserve a port on a machine that has none left."""
LEAVE_S_MAX: Final = 15.0
"""A shutdown ends within this; the core's own limit for its workers is shorter."""
CLOSE_S_MAX: Final = 5.0
"""Longest wait for the last process of a worker at the very end."""
KERNEL_SIGNALS: Final = (signal.SIGKILL, signal.SIGBUS)
"""What the kernel ends a process with when memory is gone or broken."""
LEVELS: Final = logging.getLevelNamesMapping()
FAREWELL_S_MAX: Final = 1.0
"""Longest wait for the last status to leave."""

log = logging.getLogger("outrider.sidecar")


async def run_sidecar(
    config: NodeConfig,
    stop: asyncio.Event,
    *,
    sole_parent: bool = False,
    output: Path | None = None,
) -> int:
    """Serve one node until the job ends, it is dismissed, or ``stop`` is set.

    Returns the exit status.  ``sole_parent`` says that this process has no other children than
    the workers, so that any other child is one of their orphans; ``output`` is the folder that
    `prepare` made of this run, where that was done already.  Raises `SidecarError` or
    `sidecar.config.ConfigError` when it cannot start.
    """
    output = output or prepare(config)
    sidecar = _Sidecar(config, await known_gpus(), output, sole_parent=sole_parent)
    try:
        return await sidecar.run(stop)
    finally:
        await sidecar.close()


class _Sidecar:
    """One run of the process: every shell, and the table that ties effects to them."""

    def __init__(
        self, config: NodeConfig, gpus: GpuInventory, output: Path, *, sole_parent: bool
    ) -> None:
        self._config = config
        self._gpus = gpus
        self.counters = NodeCounters()
        self._incarnation = uuid.uuid4().hex
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_EVENTS_MAX)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._port: ReservedPort | None = None
        self._stopping = False
        self._access = read_access(config)
        self._core = AgentCore(agent_config(config, self._incarnation), monotonic())
        socket_path = config.socket_path()
        self._pages = ProgressPages(
            job=config.job, node=config.node_name, identity=str(socket_path)
        )
        self._guardian = Guardian(draw_mark(config.job, config.node_name))
        settings = launch_settings(config, output, self._guardian.mark, sole_parent=sole_parent)
        self._warm = WarmPool(settings.command, settings.inherited)
        self._evidence = EvidenceCapture(self.put)
        self._hardware = node_watch(config, gpus, self.put, owner=self._local_rank_of)
        self._kernel_log = self._hardware.kernel_log
        self._launcher = Launcher(
            settings,
            self._pages,
            self._heard_launcher,
            warm=self._warm,
            helpers=lambda: (
                self._warm.pids | self._evidence.pids | self._hardware.helpers | self._guardian.pids
            ),
        )
        self._workers = WorkerServer(socket_path, self._launcher.worker_of, self.put)
        self._logs, self._rules_file = log_watch(config, self.put)
        self._lag = LoopLag()
        live = LiveNumbers(self._logs, self._pages, self._lag)
        self._shown = NodeShown(
            config.job,
            core=self._core,
            counters=self.counters,
            workers=self._workers,
            hardware=self._hardware,
            live=live,
        )
        self._api = ApiServer(
            self._shown,
            self.put,
            agent_version=agent_version(),
            spare=config.spare,
            access=self._access,
        )
        self._uplink: Uplink | None = None
        self._effects = self._carriers()

    def _carriers(self) -> dict[type[Effect], Callable[[Any], object]]:
        """Return what carries each kind of effect out."""
        return {
            SpawnWorkers: self._spawn,
            KillWorkers: self._kill,
            KeepTable: self._keep_table,
            DiscardState: lambda _: self._warm.start_over(),
            WatchLogs: self._watch_logs,
            TakeInspection: self._inspect,
            ReservePort: lambda _: self._reserve_port(),
            Report: self._report,
            AnswerWorker: lambda effect: self._workers.send(effect.connection, effect.reply),
            Reply: self._api.answer,
            Quit: self._quit,
            Say: lambda effect: log.log(LEVELS[effect.level], "%s", effect.text),
        }

    # --- the life of the process ------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until the end; `close` must follow."""
        http_port = await self._listen()
        await asyncio.to_thread(self._guardian.begin)
        hello = introduction(self._config, self._incarnation, http_port, self._gpus)
        self._uplink = Uplink(
            self._config.coordinator, hello, self, self._access, self.counters.cut
        )
        for effect in self._core.begin():
            self._start_effect(effect)
        self._shown.uplink = self._uplink
        self._shown.driving = self._spawn_task(drive(self._core, self._inbox, self._start_effect))
        self._spawn_task(self._uplink.run())
        self._spawn_task(tick_pages(self._pages, self._saw_progress))
        if self._config.spare and self._config.warm_workers:
            self._warm.begin(self._config.warm_modules)
        self._spawn_task(self._lag.measure())
        self._spawn_task(self._hardware.run())
        if self._rules_file is not None:
            self._spawn_task(self._rules_file.run())
        self._spawn_task(self._launcher.collect_strays())
        log.info("node %s: API on %s:%d", self._config.node_name, self._config.http_host, http_port)
        await self._wait_for_end(stop)
        return self._ended.result()

    async def close(self) -> None:
        """End workers, connections and files, in the order in which they need one another."""
        if self._uplink is not None:
            await self._uplink.flush(FAREWELL_S_MAX)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._evidence.close()
        self._warm.close()
        if not await self._launcher.close(CLOSE_S_MAX):
            log.error("workers still run; the kernel ends them when this process is gone")
        await asyncio.to_thread(self._guardian.close, CLOSE_S_MAX)
        self._logs.close()
        await self._workers.close()
        await self._api.close()
        self._pages.close()
        if self._port is not None:
            self._port.release()

    async def _listen(self) -> int:
        try:
            await self._workers.start()
        except SocketPathError as error:
            raise SidecarError(str(error)) from None
        except OSError as error:
            raise cannot_make_socket(error, self._workers.path) from None
        try:
            self._pages.claim()  # only now is it certain that no other sidecar stands here
        except OSError as error:
            reason = error.strerror or str(error)
            raise SidecarError(f"no progress pages in {self._pages.folder}: {reason}") from None
        return await listen(self._api, self._config)

    async def _wait_for_end(self, stop: asyncio.Event) -> None:
        asked: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        either: list[asyncio.Future[Any]] = [asked, self._ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                return
            self.put(CommandReceived(command=Shutdown(reason="asked to end")))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S_MAX):
                    await asyncio.shield(self._ended)
                return
            log.error("the shutdown did not end within %g s; leaving", LEAVE_S_MAX)
            self._end(1)
        finally:
            asked.cancel()

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """End the process when a part of it failed: a sidecar that half works hides faults."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("a part of the sidecar failed; ending its workers", exc_info=error)
        self._end(1)

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    # --- events -----------------------------------------------------------------------------

    def put(self, event: Event) -> None:
        """Give the core an event."""
        try:
            self._inbox.put_nowait(event)
        except asyncio.QueueFull:
            self.counters.events_dropped += 1
            if not isinstance(event, ProgressObserved):  # the next tick says it again
                log.critical("the core's inbox is full; dropped %s", type(event).__name__)

    def dismissed(self, reason: str) -> None:
        """End: the coordinator does not want this sidecar."""
        log.error("the coordinator refuses this sidecar: %s", reason)
        command = Shutdown(reason=f"refused by the coordinator: {reason}", exit_code=1)
        self.put(CommandReceived(command=command))

    def _saw_progress(self, event: ProgressObserved) -> None:
        # After the first step, what the job loads is loaded, and a core can be spared.
        if self._config.warm_workers and any(seen.step is not None for seen in event.ranks):
            pids, modules = self._launcher.pids(), self._config.warm_modules
            self._warm.stepped(event.generation, pids, modules)
        self._logs.saw_progress(event.generation, event.ranks)
        self.put(event)

    def _heard_launcher(self, event: Event) -> None:
        if isinstance(event, WorkerExited):
            self.counters.exited(event.cause, asked_for=self._stopping)
            log.info("local rank %d ended with %s", event.local_rank, event.cause)
            if event.cause.signal in KERNEL_SIGNALS and not self._stopping:
                self._kernel_log.after_catching_up(lambda: self.put(event))
                return
        elif isinstance(event, WorkersGone):
            self._stopping = False
            self._logs.stop()
        self.put(event)

    def _local_rank_of(self, pid: int) -> int | None:
        """Return whose worker, or whose worker's child, a process is."""
        workers = map(self._launcher.worker_of, ancestors(pid))
        return next((worker.local_rank for worker in workers if worker is not None), None)

    # --- effects ----------------------------------------------------------------------------

    def _start_effect(self, effect: Effect) -> None:
        self._effects[type(effect)](effect)

    def _spawn(self, effect: SpawnWorkers) -> None:
        self._guardian.ensure()
        self._hardware.started(effect.start.env)
        self._launcher.spawn(effect.start, effect.keep)

    def _kill(self, effect: KillWorkers) -> None:
        self._stopping = True
        self._launcher.kill(effect.generation, effect.grace_s, effect.keep)

    def _keep_table(self, effect: KeepTable) -> None:
        try:
            self._launcher.keep_table(effect.table, effect.group_rank)
        except OSError as error:  # the next start tries again, and says so where it cannot
            log.error("the table of hosts was not written: %s", system_reason(error))  # noqa: TRY400

    def _watch_logs(self, effect: WatchLogs) -> None:
        written = self._launcher.log_files(effect.generation)
        files = {local_rank: (one.stdout, one.stderr) for local_rank, one in written.items()}
        ranks, size = self._pages.ranks(), effect.world_size
        self._logs.watch(effect.generation, effect.rules, files, ranks=ranks, world_size=size)

    def _inspect(self, effect: TakeInspection) -> None:
        ranks, now = self._pages.ranks(), monotonic()
        workers = self._launcher.running(self._pages.generation())
        self.put(
            InspectionTaken(
                round_id=effect.round_id,
                ranks=self._pages.snapshots(now),
                log_tails=by_rank(self._logs.tails(), ranks, self._hardware.recent(now)),
                evidence_follows=self._evidence.begin(effect, workers, ranks.values()),
            )
        )

    def _reserve_port(self) -> None:
        try:
            fresh = reserve_port()
        except PortError as error:
            log.error("%s; trying again", error)  # noqa: TRY400 - a sentence, no traceback
            asyncio.get_running_loop().call_later(PORT_RETRY_S, self._reserve_port)
            return
        if self._port is not None:
            self._port.release()
        self._port = fresh
        self.put(PortReserved(port=fresh.number))

    def _report(self, effect: Report) -> None:
        if isinstance(effect.message, StatusReport):
            self.counters.reported(effect.message)
        if self._uplink is not None:
            self._uplink.report(effect.message)

    def _quit(self, effect: Quit) -> None:
        log.info("ending: %s", effect.reason)
        self._end(effect.code)
