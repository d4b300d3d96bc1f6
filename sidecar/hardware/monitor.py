"""The hardware monitor: reads sources on threads of low rhythm and tells what was judged.

Decides only when to read.  Each source has a thread, so one that does not return blinds itself
alone; nobody who asks for the state ever waits for a source.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from scout.clock import Instant, since
from sidecar.hardware.health import HardwareHealth, HealthCleared, HealthConfig, HealthEvent
from sidecar.hardware.readings import Severity
from sidecar.hardware.snapshot import HealthSnapshot, SourceHealth
from sidecar.hardware.sources import HealthSource, SourceError, WakingSource

STOP_S: Final = 4.0
"""How long `stop` waits for a source that is in the middle of a read."""
CLOSE_AFTER_S: Final = 1.0
"""How long of it before the source is closed under the read: a healthy one has ended by then."""
SOONEST_S: Final = 0.2
"""No source is read more often than this, whatever wakes it."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Runner:
    source: HealthSource
    wake: threading.Event
    thread: threading.Thread | None = None
    read_at: Instant | None = None
    started_at: Instant | None = None
    trouble: str = "not read yet"
    failures: int = 0


class HardwareHealthMonitor:
    """Judges what ``sources`` read and calls back.

    ``on_event`` hears each fatal device and metric once, ``on_clear`` when it has recovered, and
    ``on_warning`` each precursor once.  They are called on a thread of the monitor.
    """

    def __init__(
        self,
        config: HealthConfig,
        sources: Sequence[HealthSource],
        on_event: Callable[[HealthEvent], None],
        *,
        on_clear: Callable[[HealthCleared], None] | None = None,
        on_warning: Callable[[HealthEvent], None] | None = None,
    ) -> None:
        names = [source.name for source in sources]
        if len(set(names)) != len(names):
            raise ValueError(f"every health source needs a name of its own: {', '.join(names)}")
        self._config = config
        self._on_event = on_event
        self._on_clear = on_clear
        self._on_warning = on_warning
        self._health = HardwareHealth(config)
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._stopping = threading.Event()
        self._runners = [_Runner(source=source, wake=threading.Event()) for source in sources]

    def start(self) -> None:
        """Begin to read.  A monitor is started once."""
        for runner in self._runners:
            if runner.thread is not None:
                raise RuntimeError("the hardware monitor was started before")
            if isinstance(runner.source, WakingSource):
                runner.source.wake = runner.wake.set
            runner.thread = threading.Thread(
                target=self._run, args=(runner,), name=f"health-{runner.source.name}", daemon=True
            )
        for runner in self._runners:
            assert runner.thread is not None
            runner.thread.start()

    def stop(self) -> None:
        """Stop reading and close the sources.  One that is stuck is left to its daemon thread."""
        self._stopping.set()
        began = time.monotonic()
        for runner in self._runners:
            runner.wake.set()
        self._join(began + CLOSE_AFTER_S)
        for runner in self._runners:
            runner.source.close()
        self._join(began + STOP_S)

    def _join(self, deadline_s: float) -> None:
        for runner in self._runners:
            if runner.thread is not None:
                runner.thread.join(max(0.0, deadline_s - time.monotonic()))

    def poll_once(self) -> tuple[HealthEvent, ...]:
        """Read every source here and now, and return the new fatal events."""
        found: list[HealthEvent] = []
        for runner in self._runners:
            found += [event for event in self._read(runner) if event.severity is Severity.FATAL]
        return tuple(found)

    def snapshot(self) -> HealthSnapshot:
        """Return the state of every device, with the age of all that it rests on.

        Answers at once, also while a source is stuck.
        """
        now = _now()
        with self._lock:
            snapshot = self._health.snapshot(now)
        sources = tuple(_source_health(runner, now) for runner in self._runners)
        return replace(snapshot, sources=sources)

    # --- threads ------------------------------------------------------------------------------

    def _run(self, runner: _Runner) -> None:
        while True:
            runner.wake.clear()
            if self._stopping.is_set():  # looked at after the clearing, or `stop` goes unheard
                return
            began = time.monotonic()
            self._read(runner)
            due = began + self._config.poll_interval_s
            with self._lock:
                held = self._health.next_deadline()
            if held is not None:
                due = min(due, held / 1e9)
            wait_s = max(SOONEST_S, due - time.monotonic())
            if runner.wake.wait(wait_s):
                self._stopping.wait(max(0.0, began + SOONEST_S - time.monotonic()))

    def _read(self, runner: _Runner) -> list[HealthEvent]:
        source = runner.source
        runner.started_at = _now()
        try:
            readings = list(source.read())
        except SourceError as error:
            self._failed(runner, str(error))
            readings = []
        except Exception as error:  # noqa: BLE001 - a caller's source may raise anything at all
            self._failed(runner, f"{type(error).__name__}: {error}")
            readings = []
        else:
            runner.read_at, runner.trouble = _now(), ""
        runner.started_at = None
        # One at a time, so that a fault is never told after its recovery.
        with self._telling:
            with self._lock:
                outcomes = self._health.evaluate(readings, _now())
            for outcome in outcomes:
                self._tell(outcome)
        return [outcome for outcome in outcomes if isinstance(outcome, HealthEvent)]

    def _failed(self, runner: _Runner, reason: str) -> None:
        runner.failures += 1
        if reason != runner.trouble:
            _LOG.warning("health source %s cannot be read: %s", runner.source.name, reason)
        runner.trouble = reason

    def _tell(self, outcome: HealthEvent | HealthCleared) -> None:
        try:
            if isinstance(outcome, HealthCleared):
                _LOG.info("%s", outcome.message)
                if self._on_clear is not None:
                    self._on_clear(outcome)
            elif outcome.severity is Severity.FATAL:
                _LOG.error("%s", outcome.message)
                self._on_event(outcome)
            else:
                _LOG.warning("%s", outcome.message)
                if self._on_warning is not None:
                    self._on_warning(outcome)
        except Exception:  # noqa: BLE001 - see below; it is logged with its traceback
            # The caller's mistake must not end the watch over the other devices.
            _LOG.exception("the callback of the hardware monitor failed")


def _source_health(runner: _Runner, now: Instant) -> SourceHealth:
    started_at, read_at = runner.started_at, runner.read_at
    return SourceHealth(
        name=runner.source.name,
        age_s=None if read_at is None else since(read_at, now) / 1e9,
        reading_for_s=None if started_at is None else since(started_at, now) / 1e9,
        trouble=runner.trouble,
        failures=runner.failures,
    )


def _now() -> Instant:
    return Instant(time.monotonic_ns())
