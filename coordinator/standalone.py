"""Coordinator and sidecar in one process: the whole of Outrider for one machine.

They speak over the same WebSocket as on a cluster, through loopback, so nothing is special about
it but the order of starting and stopping.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

from coordinator.daemon import CoordinatorConfig, announce, run_coordinator

LEAVE_WITHIN_S: Final = 30.0
"""How long the coordinator may take to notice that the job's only sidecar has left for good."""

Sidecar: TypeAlias = Callable[[str, asyncio.Event], Coroutine[Any, Any, int]]
"""Runs the sidecar that dials the given URL until the event is set."""


async def run_standalone(config: CoordinatorConfig, sidecar: Sidecar, stop: asyncio.Event) -> int:
    """Serve and run one job of one node until it ends or ``stop`` is set.

    Returns 0 when the job completed or a person ended it, 1 when it failed.  No worker is left
    behind in any case: the sidecar, which ends them, is always awaited before the coordinator is
    let go.
    """
    ready, sidecar_stop, coordinator_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    urls: list[str] = []

    def listening(url: str) -> None:
        announce(url)
        urls.append(url)
        ready.set()

    serving = asyncio.create_task(
        run_coordinator(config, coordinator_stop, listening=listening), name="coordinator"
    )
    running: asyncio.Task[int] | None = None
    try:
        await _first_of(ready, serving)
        if serving.done():
            return serving.result()
        running = asyncio.create_task(sidecar(urls[0], sidecar_stop), name="sidecar")
        await _first_of(stop, serving, running)
        sidecar_stop.set()
        status = await running
        if not stop.is_set():
            await asyncio.wait([serving], timeout=LEAVE_WITHIN_S)
        coordinator_stop.set()
        return await serving or status
    finally:
        sidecar_stop.set()
        coordinator_stop.set()
        await asyncio.gather(
            *(task for task in (running, serving) if task is not None), return_exceptions=True
        )


async def _first_of(event: asyncio.Event, *tasks: "asyncio.Task[int]") -> None:
    """Wait for the event or for the first task to end."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
