"""How late the event loop is: a sleep that ends late says that something held the loop up.

Both daemons measure themselves with it, because a watcher that is late is a watcher to distrust.
"""

import asyncio
from typing import Final

from prometheus_client import Histogram, disable_created_metrics
from prometheus_client.metrics_core import Metric

PERIOD_S: Final = 1.0
BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class LoopLag:
    """Run `measure` as a task; `families` may be called from anywhere."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nothing here reads
        self._histogram = Histogram(
            "outrider_loop_lag_seconds",
            "How late the process's event loop woke up, measured once a second.",
            buckets=BUCKETS_S,
            registry=None,
        )

    async def measure(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._histogram.observe(max(0.0, loop.time() - due))

    def families(self) -> tuple[Metric, ...]:
        """Return what was measured so far."""
        return tuple(self._histogram.collect())
