"""Runs a daemon's coroutine until it ends or a signal asks it to.

Decides how long a daemon may take to leave.  A disk or a driver may hold a thread for good, and
whatever that thread was asked for, it keeps nobody from ending.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import uvloop

from coordinator.cli.errors import INTERRUPTED, UserError
from coordinator.cli.signals import asks_to_leave
from sidecar.file_limit import allow_files

STOP_WITHIN_S: Final = 4.5
"""A daemon that has not stopped by itself this long after a signal is cancelled: Ctrl-C is
answered within five seconds."""
GONE_WITHIN_S: Final = 15.0
"""A process that is still there this long after a signal is ended from a thread of its own: its
loop is stuck.  The kernel then ends its workers."""
THREADS_MAX: Final = 32
"""Calls that may block at the same time; more wait for one of them."""

log = logging.getLogger("outrider.process")


def run_until_signal(main: Callable[[asyncio.Event], Awaitable[int]], *, sigterm: int) -> int:
    """Run ``main`` with an event that SIGINT and `asks_to_leave` set; return its status.

    ``sigterm`` is the exit status after any but SIGINT: 0 for a service that was asked to leave,
    `TERMINATED` for work that was not finished.  Raises `UserError` when there are too few files.
    """
    reason = allow_files(0)
    if reason is not None:
        raise UserError(reason)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(_supervise(main, sigterm))
    finally:
        try:
            runner.close()
        except (OSError, RuntimeError) as error:  # tidying needs descriptors too
            log.warning("the event loop was left as it was: %s", error.__context__ or error)


async def _supervise(main: Callable[[asyncio.Event], Awaitable[int]], sigterm: int) -> int:
    stop = asyncio.Event()
    received: list[signal.Signals] = []

    def status_after(number: signal.Signals) -> int:
        return INTERRUPTED if number is signal.SIGINT else sigterm

    def on_signal(number: signal.Signals) -> None:
        if not received:
            _end_for_certain(status_after(number))
        received.append(number)
        stop.set()

    loop = asyncio.get_running_loop()
    blocking = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="blocking")
    loop.set_default_executor(blocking)
    for number in (signal.SIGINT, *asks_to_leave()):
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
            return status_after(received[0])
        return work.result()
    finally:
        stopping.cancel()
        # The loop waits at its end for the threads of its executor: it gets one that has none.
        loop.set_default_executor(ThreadPoolExecutor(1))
        blocking.shutdown(wait=False, cancel_futures=True)


def _end_for_certain(status: int) -> None:
    """End the process from a thread of its own, should it not end by itself."""

    def end() -> None:
        log.error("the end took longer than %g s; leaving at once", GONE_WITHIN_S)
        os._exit(status)

    watchdog = threading.Timer(GONE_WITHIN_S, end)
    watchdog.daemon = True
    watchdog.start()


def _failed(work: "asyncio.Future[int]") -> bool:
    return work.done() and not work.cancelled() and work.exception() is not None
