"""How late the event loop is: a sleep that ends late says that something held the loop up.

Both daemons measure themselves with it, because a watcher that is late is a watcher to distrust.
"""

import asyncio
from bisect import bisect_left
from itertools import accumulate
from typing import Final

from prometheus_client.metrics_core import HistogramMetricFamily, Metric

PERIOD_S: Final = 1.0
BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class LoopLag:
    """Run `measure` as a task; `families` may be called from anywhere.

    The library's own histogram would keep its numbers in the job's ``PROMETHEUS_MULTIPROC_DIR``
    where the environment names one.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0

    async def measure(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.observe(max(0.0, loop.time() - due))

    def observe(self, late_s: float) -> None:
        """Count one wake-up that was ``late_s`` seconds late."""
        self._counts[bisect_left(BUCKETS_S, late_s)] += 1
        self._sum_s += late_s

    def families(self) -> tuple[Metric, ...]:
        """Return what was measured so far."""
        family = HistogramMetricFamily(
            "outrider_loop_lag_seconds",
            "How late the process's event loop woke up, measured once a second.",
        )
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        counts = map(float, accumulate(self._counts))
        family.add_metric([], list(zip(bounds, counts, strict=True)), self._sum_s)
        return (family,)
