"""The daemon's watch over its node's hardware: fatal events become findings on the event loop.

Decides how a judged fault is worded as a `HardwareFinding`; judges nothing itself.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from sidecar.events import XID_REASON, HardwareFinding, HardwareRecovered
from sidecar.hardware.health import HealthCleared, HealthConfig, HealthEvent
from sidecar.hardware.monitor import HardwareHealthMonitor
from sidecar.hardware.readings import METRICS, Metric
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.hardware.sources import HealthSource

LINE_CHARS_MAX: Final = 1000
_LOG = logging.getLogger(__name__)


class HardwareWatch:
    """Watches until `run` is cancelled.  ``emit`` and ``cleared`` are called on the event loop.

    ``told`` names sources whose faults ``emit`` is not to hear, because whoever fills them tells
    of them itself.
    """

    def __init__(
        self,
        config: HealthConfig,
        sources: Sequence[HealthSource],
        emit: Callable[[HardwareFinding], None],
        *,
        cleared: Callable[[HealthCleared], None] | None = None,
        told: frozenset[str] = frozenset(),
    ) -> None:
        self._emit = emit
        self._told = told
        self._cleared = cleared
        self._loop: asyncio.AbstractEventLoop | None = None
        self._monitor = HardwareHealthMonitor(
            config, sources, self._on_event, on_clear=self._on_clear
        )

    async def run(self) -> None:
        """Watch until cancelled.  The sources are closed at the end."""
        self._loop = asyncio.get_running_loop()
        self._monitor.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._loop = None
            await asyncio.get_running_loop().run_in_executor(None, self._monitor.stop)

    def snapshot(self) -> HealthSnapshot:
        """Return the state of every device; answers at once, also while a device is stuck."""
        return self._monitor.snapshot()

    def _on_event(self, event: HealthEvent) -> None:
        if event.source not in self._told:
            self._call(self._emit, finding_of(event))

    def _on_clear(self, event: HealthCleared) -> None:
        if self._cleared is not None:
            self._call(self._cleared, event)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        loop = self._loop
        if loop is None:
            return  # being stopped: nobody listens any more
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _LOG.warning("the event loop ended before a hardware finding could be told")


async def watch_hardware(
    config: HealthConfig,
    sources: Sequence[HealthSource],
    emit: Callable[[HardwareFinding], None],
) -> None:
    """Watch this node's hardware until cancelled; ``emit`` hears each fatal device and metric."""
    await HardwareWatch(config, sources, emit).run()


def finding_of(event: HealthEvent) -> HardwareFinding:
    """Return a fatal event as the agent takes it.  What blames no single device blames the node."""
    unnamed = event.device.index is None or METRICS[event.metric].node_wide
    return HardwareFinding(
        gpu=None if unnamed else event.device.index,
        reason=reason_of(event.metric, event.value),
        message=event.message,
        line=f"{event.source}: {event.message}"[:LINE_CHARS_MAX],
    )


def recovery_of(event: HealthCleared) -> HardwareRecovered:
    """Return that a device's fault is over, as the agent takes it."""
    unnamed = event.device.index is None or METRICS[event.metric].node_wide
    return HardwareRecovered(
        gpu=None if unnamed else event.device.index,
        reason=XID_REASON if event.metric is Metric.XID else reason_of(event.metric, None),
        message=event.message,
    )


def reason_of(metric: Metric, value: float | None) -> str:
    """Return the reason code of a fault: one word, the same for the same fault."""
    if metric is Metric.XID and value is not None:
        return f"{XID_REASON}{value:.0f}"
    return "".join(word.capitalize() for word in metric.value.split("_"))
