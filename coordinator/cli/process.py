"""Runs a daemon's coroutine until it ends or a signal asks it to."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import uvloop

from coordinator.cli.errors import INTERRUPTED

STOP_WITHIN_S: Final = 4.5
"""A daemon that has not stopped by itself this long after a signal is cancelled: Ctrl-C is
answered within five seconds."""


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[int]], *, sigterm: int) -> int:
    """Run ``main`` with an event that SIGINT and SIGTERM set, and return its exit status.

    ``sigterm`` is the exit status after SIGTERM: 0 for a service that was asked to leave,
    `TERMINATED` for work that was not finished.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_supervise(main, sigterm))


async def _supervise(main: Callable[[asyncio.Event], Awaitable[int]], sigterm: int) -> int:
    stop = asyncio.Event()
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    work = asyncio.ensure_future(main(stop))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait([work], timeout=STOP_WITHIN_S)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        if received and not _failed(work):
            return INTERRUPTED if received[0] is signal.SIGINT else sigterm
        return work.result()
    finally:
        stopping.cancel()


def _failed(work: "asyncio.Future[int]") -> bool:
    return work.done() and not work.cancelled() and work.exception() is not None
