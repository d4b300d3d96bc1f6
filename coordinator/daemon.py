"""The coordinator as a process: journal, core, fleet and API put together.

It wires and serves; every decision is the job core's.  Losing this process stops no training:
the journal holds what was decided, and the sidecars dial in again.
"""

import asyncio
import errno
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aiohttp import web

from coordinator.audit_trail import AuditTrail
from coordinator.events import Accept, Dismiss, Effect, Event, Finished, Persist, Say, Send
from coordinator.fleet import Fleet
from coordinator.guard import guard
from coordinator.history import History
from coordinator.incidents import Incident
from coordinator.job import JobCore
from coordinator.journal import JOURNAL_NAME, Journal
from coordinator.journal_format import DurableState, JournalError
from coordinator.ledger import Ledger, report
from coordinator.listening import CoordinatorError, Door, listen, listen_for_scrapes
from coordinator.meter import Meter
from coordinator.metrics import Exposition, JobNumbers
from coordinator.offender_store import OffenderStore
from coordinator.offenders import Strike, strikes_of
from coordinator.operator_api import BODY_BYTES_MAX, OperatorApi
from coordinator.outbox import Outbox
from coordinator.phases import JobPhase
from coordinator.settings import JobSettings
from coordinator.streams import drop
from coordinator.url_file import UrlFile
from coordinator.wording import one_line
from sidecar.drive import drive, monotonic
from sidecar.file_limit import allow_files
from sidecar.http_faults import server_log
from sidecar.loop_lag import LoopLag

INBOX_EVENTS_MAX: Final = 65_536
"""Events that may wait for the core: each link then waits to be read, which slows its sender."""
SAID_CHARS_MAX: Final = 4000
"""Longest line of the log; it may quote what workers and people wrote."""
FAREWELL_S: Final = 20.0
"""Longest wait for the sidecars to leave after the job ended: a stop with grace, and some."""
HANDLERS_END_S: Final = 1.0
"""Longest wait for open HTTP requests at the end."""
LEDGER_KEPT_EVERY_S: Final = 15.0
"""Between two writes of the job's accounts: as often as they are scraped."""

log = logging.getLogger("outrider.coordinator")
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """How one coordinator is run."""

    settings: JobSettings
    state_dir: Path
    door: Door = field(default_factory=Door)
    offenders: Path | None = None
    """The file in which all jobs of this machine remember nodes; None remembers nothing."""
    linger_s: float = 2.0
    """How long the finished job can still be looked at, once every sidecar has left."""
    admit_label: tuple[str, str] | None = field(default=None, repr=False)
    """A label that a sidecar must carry to be let in; None lets in every one of the job."""
    refuse_ended: bool = False
    """Whether a job that ended before is an error; a supervised one answers with its outcome."""
    after_stop: str = "training goes on and finds it again"
    """What its log says of the training when it is asked to stop before the job has ended."""


def announce(url: str) -> None:
    """Print the first line, from which scripts learn the port.  Raises `CoordinatorError`."""
    try:
        sys.stdout.write(f"outrider: coordinator listening on {url}\n")
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EBADF:  # closed on purpose: whoever did that does not ask
            drop(sys.stdout)
            return
        raise CoordinatorError(
            f"the first line cannot be written to standard output ({error.strerror}); give it a"
            " place that takes it, such as /dev/null"
        ) from error


async def run_coordinator(
    config: CoordinatorConfig, stop: asyncio.Event, *, listening: Announce = announce
) -> int:
    """Serve the job until it ends or ``stop`` is set.

    Returns 1 when the job failed, 0 when it completed, a person ended it or ``stop`` came first.
    Raises `CoordinatorError` or `JournalError` when it cannot start or go on.
    """
    config.door.check()
    reason = allow_files(config.settings.nnodes, all_there_are=True)
    if reason is not None:
        raise CoordinatorError(reason)
    journal = Journal.open(config.state_dir / JOURNAL_NAME)
    try:
        coordinator = await _Coordinator.restore(config, journal)
        return await coordinator.run(stop, listening)
    finally:
        await journal.close()


class _Coordinator:
    """One run of the process."""

    def __init__(
        self,
        config: CoordinatorConfig,
        journal: Journal,
        state: DurableState,
        *,
        ledger: Ledger,
        offenders: OffenderStore | None,
        strikes: tuple[Strike, ...],
    ) -> None:
        now, settings = monotonic(), config.settings
        wall_offset_ns = time.time_ns() - now
        self._config = config
        self._journal = journal
        self._offenders = offenders
        self._trail = AuditTrail(journal, settings.job)
        self._history = History()
        self._url_file = UrlFile(config.state_dir)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_EVENTS_MAX)
        self._core = JobCore(settings, state, wall_offset_ns, now, strikes)
        self._meter = Meter(self._core, ledger, wall_offset_ns, now)
        self._loop_lag = LoopLag()
        self._fleet = Fleet(
            self._inbox,
            job=settings.job,
            heartbeat_s=settings.heartbeat_s,
            admit_label=config.admit_label,
        )
        self._outbox = Outbox(commit=self._commit, execute=self._execute)
        self._finished: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._ended_before = state.phase.terminal
        if self._ended_before:
            self._execute(Finished(outcome=state.phase, reason=state.outcome_reason))

    @classmethod
    async def restore(cls, config: CoordinatorConfig, journal: Journal) -> "_Coordinator":
        """Go on from where the journal ends."""
        job = config.settings.job
        known = journal.load(job)
        if known is not None and known.phase.terminal:
            text = (
                f"job {job} has {known.phase} before, by the journal in {config.state_dir}; give"
                " another --job or --state-dir to run it anew"
            )
            if config.refuse_ended:
                raise CoordinatorError(text)
            log.warning("%s", text)
        elif known is not None:
            log.info("job %s goes on: %s, generation %d", job, known.phase, known.generation)
        ledger = journal.load_ledger(job) or Ledger.begin(time.time_ns())
        offenders = None if config.offenders is None else OffenderStore(config.offenders)
        strikes = () if offenders is None else await offenders.read()
        state = known or DurableState(job=job)
        self = cls(config, journal, state, ledger=ledger, offenders=offenders, strikes=strikes)
        for incident in await journal.incidents(job):
            self._history.note(incident)
        return self

    async def run(self, stop: asyncio.Event, listening: Announce) -> int:
        """Serve until the end."""
        api = self._api()
        runner = _runner(self._application(api))
        await runner.setup()
        numbers = _runner(_numbers_only(api))
        self._url_file.clear()
        try:
            url = await listen(runner, self._config.door)
            await listen_for_scrapes(numbers, self._config.door)
            self._url_file.write(url)
            listening(url)
            return await self._until_the_end(stop)
        finally:
            self._url_file.withdraw()
            await self._fleet.close()
            await numbers.cleanup()
            await runner.cleanup()
            if self._offenders is not None:
                await self._offenders.flush()

    def _api(self) -> OperatorApi:
        job = self._config.settings.job
        return OperatorApi(
            view=lambda: self._core.view(monotonic()),
            inbox=self._inbox,
            journal=self._journal,
            exposition=Exposition(self._numbers),
            ledger=lambda: report(job, self._meter.look(monotonic())),
            trail=self._trail,
        )

    def _application(self, api: OperatorApi) -> web.Application:
        door = guard(self._config.door.admission(), self._trail)
        app = web.Application(middlewares=[door], client_max_size=BODY_BYTES_MAX)
        app.add_routes([*api.routes(), *self._fleet.routes()])
        return app

    def _numbers(self) -> JobNumbers:
        """Return everything that a scrape shows, apart from what goes on changing."""
        now = monotonic()
        return JobNumbers(
            now_s=time.time(),
            view=self._core.view(now),
            history=self._history.copy(),
            ledger=self._meter.look(now).copy(),
            commands=self._meter.commands.copy(),
            told=self._meter.told.copy(),
            refused=self._fleet.messages_refused,
            dropped=self._fleet.links_too_slow,
            loop_lag=self._loop_lag.families(),
        )

    async def _until_the_end(self, stop: asyncio.Event) -> int:
        workers = [
            asyncio.create_task(drive(self._meter, self._inbox, self._outbox.put), name="core"),
            asyncio.create_task(self._outbox.run(), name="outbox"),
            asyncio.create_task(self._loop_lag.measure(), name="loop lag"),
            asyncio.create_task(self._keep_ledger(), name="ledger"),
        ]
        end = asyncio.create_task(self._end_of_job(stop), name="end")
        try:
            await asyncio.wait([end, *workers], return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                if worker.done():
                    worker.result()  # neither returns by itself: this raises why it ended
            return await end
        finally:
            for task in (end, *workers):
                task.cancel()
            await asyncio.gather(end, *workers, return_exceptions=True)
            with suppress(JournalError):  # whatever ended the process has been raised already
                await self._write_ledger()

    async def _end_of_job(self, stop: asyncio.Event) -> int:
        """Wait for the job's end and the sidecars' leave, or for ``stop``."""
        stopping = asyncio.create_task(stop.wait())
        parting = asyncio.create_task(self._farewell())
        try:
            await asyncio.wait([stopping, parting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            parting.cancel()
            await asyncio.gather(stopping, parting, return_exceptions=True)
        if not self._finished.done():
            log.info("the coordinator stops; %s", self._config.after_stop)
            return 0
        return int(self._finished.result().outcome == JobPhase.FAILED)

    async def _farewell(self) -> None:
        await asyncio.shield(self._finished)
        if self._ended_before:  # sidecars that have not heard of the end are still dialling
            await asyncio.sleep(FAREWELL_S)
        await self._fleet.flush(FAREWELL_S)
        await self._fleet.wait_empty(FAREWELL_S)
        await asyncio.sleep(self._config.linger_s)

    async def _keep_ledger(self) -> None:
        """Write the accounts down now and then; what passed since is booked by the job's phase."""
        while True:
            await asyncio.sleep(LEDGER_KEPT_EVERY_S)
            await self._write_ledger()

    async def _write_ledger(self) -> None:
        ledger = self._meter.look(monotonic()).copy()
        await self._journal.keep_ledger(self._config.settings.job, ledger)
        await asyncio.to_thread(self._url_file.keep)

    async def _commit(self, state: DurableState, incidents: Sequence[Incident]) -> None:
        await self._journal.commit(state, *incidents)
        await asyncio.to_thread(self._url_file.keep)
        for incident in incidents:
            self._history.note(incident)
        struck = [strike for incident in incidents for strike in strikes_of(incident)]
        if struck and self._offenders is not None:
            self._offenders.remember(struck)

    def _execute(self, effect: Effect) -> None:
        match effect:
            case Accept() | Dismiss() | Send():
                self._fleet.execute(effect)
            case Say():
                level = logging.getLevelNamesMapping().get(effect.level.upper(), logging.INFO)
                log.log(level, "%s", one_line(effect.text, SAID_CHARS_MAX))
            case Finished():
                if not self._finished.done():
                    reason = one_line(effect.reason, SAID_CHARS_MAX)
                    log.info("the job %s: %s", effect.outcome, reason)
                    self._finished.set_result(effect)
            case Persist():
                raise AssertionError("the outbox commits these itself")


def _runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(app, access_log=None, logger=server_log(), shutdown_timeout=HANDLERS_END_S)


def _numbers_only(api: OperatorApi) -> web.Application:
    """Return what a monitoring network may reach: numbers, and whether we live."""
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.add_routes([web.get("/metrics", api.metrics), web.get("/healthz", api.health)])
    return app
