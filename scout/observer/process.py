"""The observer's own process: look at the page, trade words, judge, write down what was found.

It ends with the training process, and says so to the others before it does.  Nothing that goes
wrong here reaches training: the status file says ``degraded`` and why, and the observer tries on.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from scout.clock import Instant, seconds
from scout.held import ASLEEP, HeldWatch
from scout.kernel_sleep import sleeps
from scout.observer.config import ObserverConfig
from scout.observer.exchange import Exchange, ExchangeError, exchange_for, write_whole
from scout.observer.rounds import Rounds
from scout.observer.words import Word
from scout.page_snapshot import with_progress
from scout.phases_learned import DeadlinePolicy, LearnedPhases
from scout.progress import PageReader, Progress, ProgressPageError
from scout.report import Place, report
from scout.snapshot import RankSnapshot

TICK_S: Final = 0.25
"""Between two looks at the page."""
TRADE_S: Final = 1.0
"""Between two trades while the rank moves; one that is silent trades at every tick."""
STATUS_S: Final = 5.0
"""Between two status files without news: an older one means that the observer is gone."""
LAST_WORD_S_MAX: Final = 1.0
"""Time for telling the others that the training process has ended."""
_PR_SET_PDEATHSIG: Final = 1


class Observer:
    """One rank's observer."""

    def __init__(self, config: ObserverConfig, exchange: Exchange) -> None:
        self._config = config
        self._exchange = exchange
        self._rounds = Rounds(config=config, began=_now())
        self._learned = LearnedPhases()
        self._held = HeldWatch()
        self._policy = DeadlinePolicy(
            most_ns=seconds(config.stall_timeout_s),
            least_ns=seconds(config.stall_timeout_min_s),
            factor=config.stall_factor,
        )
        self._reader: PageReader | None = None
        self._count = 0
        self._trade_at = 0.0
        self._status_at = 0.0
        self._told = ("", "")
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Observe until the training process ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        trouble = await self._open()
        while not self._ending.is_set() and os.getppid() == self._config.pid:
            trouble = await self._open() if trouble and self._exchange.port < 0 else trouble
            trouble = await self._tick(trouble)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), TICK_S)
        await self._end()

    async def _open(self) -> str:
        try:
            await self._exchange.open()
        except ExchangeError as error:
            self._exchange.port = -1
            return str(error)
        return ""

    async def _tick(self, trouble: str) -> str:
        """Look once; return what is wrong, empty when nothing is."""
        now, clock = _now(), time.monotonic()
        self._rounds.take(self._look(now), now)
        is_silent = self._rounds.is_silent(now)
        mine = self._rounds.words()[self._config.rank]
        if self._exchange.port >= 0 and (is_silent or clock >= self._trade_at):
            self._trade_at = clock + TRADE_S
            trouble = await self._trade(mine)
        now = _now()
        if self._rounds.look(now):
            self._say(now)
        self._write_status(trouble, now)
        return trouble

    async def _trade(self, mine: Word) -> str:
        try:
            words = await self._exchange.trade(mine, self._rounds.words())
        except ExchangeError as error:
            return str(error)
        for word in words:
            if word.seen.rank != self._config.rank:
                self._rounds.take(word, _now())
        return ""

    # --- looking ----------------------------------------------------------------------------

    def _look(self, now: Instant) -> Word:
        self._count += 1
        config = self._config
        state = _process_state(config.pid)
        slept = sleeps(config.pid) if state == ASLEEP else None
        blank = RankSnapshot(
            rank=config.rank,
            node=config.host,
            local_rank=config.local_rank,
            process_state=state,
            held_ns=self._held.observe(state, slept, now),
        )
        progress = self._progress()
        seen = blank if progress is None else with_progress(blank, progress, now)
        self._learned.learn(seen, now)
        seen = replace(
            seen,
            stall_limit_ns=self._learned.limit(seen, self._policy).ns,
            usual_silence_ns=self._learned.usual_ns(seen),
        )
        if not self._rounds.is_silent(now):
            # Where a rank stands is asked only when somebody is held up.
            seen = replace(seen, groups=())
        place = Place(
            rank=config.rank, host=config.host, local_rank=config.local_rank, gpu=config.gpu
        )
        return Word(count=self._count, seen=seen, place=place, port=max(0, self._exchange.port))

    def _progress(self) -> Progress | None:
        try:
            if self._reader is None:
                self._reader = PageReader.open(self._config.page, self._config.token)
            return self._reader.read()
        except (ProgressPageError, OSError, ValueError):
            self._reader = None
            return None

    # --- telling ----------------------------------------------------------------------------

    def _report(self) -> Mapping[str, Any] | None:
        if self._rounds.verdict is None:
            return None
        return report(
            self._rounds.verdict,
            run=self._config.run,
            generation=self._config.generation,
            at_ns=time.time_ns(),
            reporter=self._config.rank,
            places=self._rounds.places(),
        )

    def _say(self, now: Instant) -> None:
        """Print the verdict, once for all observers: the lowest rank that answers speaks."""
        missing = self._rounds.missing(now)
        answering = [rank for rank in range(self._config.world_size) if rank not in missing]
        if not answering or answering[0] != self._config.rank:
            return
        found = self._rounds.verdict
        text = "every rank makes progress again" if found is None else found.why
        sys.stderr.write(f"outrider observer: {text}\n")
        sys.stderr.flush()

    def _write_status(self, trouble: str, now: Instant) -> None:
        found, clock = self._report(), time.monotonic()
        missing = self._rounds.missing(now)
        if trouble or self._reader is None:
            state = "degraded"
            reason = trouble or f"progress page {self._config.page} cannot be read"
        elif found is not None:
            state, reason = "reporting", str(found["why"])
        elif missing:
            state, reason = "waiting", f"no answer from ranks {', '.join(map(str, missing[:8]))}"
        else:
            state, reason = "watching", ""
        told = (state, "" if found is None else str(found["id"]))
        if told == self._told and clock < self._status_at:
            return
        self._told, self._status_at = told, clock + STATUS_S
        body = {
            "schema_version": 1,
            "rank": self._config.rank,
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "state": state,
            "reason": reason,
            "report": found,
        }
        status = Path(self._config.status)
        with contextlib.suppress(OSError):  # a full disk must not end the observation
            write_whole(status, json.dumps(body))
            write_whole(status.with_suffix(".prom"), self._metrics(state))

    def _metrics(self, state: str) -> str:
        """Return the status in Prometheus' text format, for a collector that reads files."""
        labels = f'{{run="{_quoted(self._config.run)}",rank="{self._config.rank}"}}'
        lines = [
            "# HELP outrider_observer_degraded 1 while the observer cannot do its work.",
            "# TYPE outrider_observer_degraded gauge",
            f"outrider_observer_degraded{labels} {int(state == 'degraded')}",
            "# HELP outrider_observer_reporting 1 while a verdict stands.",
            "# TYPE outrider_observer_reporting gauge",
            f"outrider_observer_reporting{labels} {int(state == 'reporting')}",
            "# HELP outrider_observer_last_look_timestamp_seconds When it last wrote this.",
            "# TYPE outrider_observer_last_look_timestamp_seconds gauge",
            f"outrider_observer_last_look_timestamp_seconds{labels} {time.time():.0f}",
        ]
        return "\n".join(lines) + "\n"

    async def _end(self) -> None:
        """Tell the others that the training process is gone, and let go.

        The metrics go too: what is left of an observer that did not come here is an old file.
        """
        with contextlib.suppress(OSError):
            Path(self._config.status).with_suffix(".prom").unlink(missing_ok=True)
        with contextlib.suppress(ExchangeError, TimeoutError):
            async with asyncio.timeout(LAST_WORD_S_MAX):
                if self._exchange.port >= 0:
                    await self._exchange.trade(self._look(_now()), self._rounds.words())
        await self._exchange.close()
        if self._reader is not None:
            self._reader.close()


def _now() -> Instant:
    return Instant(time.monotonic_ns())


def _process_state(pid: int) -> str:
    """Return the letter of ``/proc/<pid>/stat``, X when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X"
    return stat[stat.rindex(")") + 2]


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def end_with_parent(pid: int) -> None:
    """Ask the kernel to end us with our parent; one that has ended already is noticed by itself."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != pid:
        raise SystemExit(0)


def main() -> int:
    """Read the configuration from standard input and observe."""
    try:
        config = ObserverConfig.from_json(sys.stdin.readline())
    except (ValueError, TypeError) as error:
        sys.stderr.write(f"outrider observer: no configuration on standard input: {error}\n")
        return 2
    end_with_parent(config.pid)
    asyncio.run(Observer(config, exchange_for(config)).run())
    return 0
