"""The re-executable block: what a rank runs again after a fault, without ending its process.

    @worker_shim.restartable
    def train() -> None: ...                    # or

    for attempt in worker_shim.restartable():
        with attempt: ...

Before the block the rank stands at a barrier until its sidecar says "start", and takes ranks and
environment from there.  A fault anywhere in the job brings it back: pending collectives are called
off, the block is left by an exception that the script need not know, process groups are destroyed.
The process, what it has imported, its device contexts and whatever the script keeps outside of
the block stay.  A rank that cannot be brought back is ended by its sidecar and started anew.

Without a sidecar the block runs once, as if nothing stood around it.
"""

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, ParamSpec, Self, TypeVar, overload

from worker_shim.attachment import ATTACHMENT, Session
from worker_shim.break_free import (
    call_off_collectives,
    collect_garbage,
    connections,
    destroy_groups,
    process_groups,
)
from worker_shim.client import Client
from worker_shim.messages import (
    Ack,
    AtBarrier,
    JobFault,
    JobHalt,
    JobStart,
    LeftBlock,
    PastBarrier,
    RestartMode,
)
from worker_shim.store_wait import STORE_WAIT

INTERRUPT_SIGNAL: Final = signal.SIGRTMIN + 8
"""Wakes the training thread from a sleep, a lock or a loop.  Nobody else is known to use it; the
handler stands only while a block runs."""
ASK_AGAIN_S: Final = 1.0
"""Between two tries to get the training thread out of the block: time for its own clean-up."""
REPORT_S_MAX: Final = 2.0
"""Longest wait for the sidecar to take in this rank's own failure."""
WATCHER_S_MAX: Final = 5.0
"""Longest wait for the thread that called a run off, which is through in milliseconds."""
MESSAGE_CHARS_MAX: Final = 2000

_OURS: Final = str(Path(__file__).parent) + os.sep
_log: Final = logging.getLogger("outrider")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class BlockCalledOff(BaseException):
    """Raised in the training thread to leave the block.  Not an `Exception`: nobody handles it."""


class Attempt:
    """One run of the block, as a context.  ``over`` says that no other follows."""

    def __init__(self, block: "_Block") -> None:
        self._block = block
        self.over = False

    def __enter__(self) -> Self:
        """Wait at the barrier."""
        self._block.enter()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        """Leave the block; the exception is swallowed when another attempt follows."""
        self._block.armed = False
        self.over = not self._block.leave(error)
        return not self.over


@overload
def restartable() -> Iterator[Attempt]: ...
@overload
def restartable(function: Callable[_P, _R]) -> Callable[_P, _R]: ...
def restartable(
    function: Callable[_P, _R] | None = None,
) -> Callable[_P, _R] | Iterator[Attempt]:
    """Mark the re-executable block: a decorator, or without a function the attempts at it.

    For the main thread; elsewhere, and without a sidecar, the block runs once.  What the script
    keeps inside of it is made anew by each run, which begins with the process groups.
    """
    if function is None:
        return _attempts()
    body = function

    @functools.wraps(body)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for attempt in _attempts():
            with attempt:
                result = body(*args, **kwargs)
        return result

    return run


def _attempts() -> Iterator[Attempt]:
    block = _Block(ATTACHMENT.attach())
    while True:
        attempt = Attempt(block)
        yield attempt
        if attempt.over:
            return


class _Block:
    """The state of one block over its runs.  Belongs to the training thread."""

    def __init__(self, session: Session) -> None:
        self.armed = False
        """The block may be left by an exception now."""
        self._session = session
        self._epoch = 0
        self._halted = threading.Event()
        self._left = threading.Event()
        self._before: frozenset[int] = frozenset()
        self._handler = signal.getsignal(INTERRUPT_SIGNAL)
        self._watcher: threading.Thread | None = None
        main = threading.current_thread() is threading.main_thread()
        self._client = session.client if main else None
        if session.attached and not main:
            session.warn_once("a restartable block outside of the main thread runs once")

    # --- at the barrier ---------------------------------------------------------------------

    def enter(self) -> None:
        """Stand at the barrier until the sidecar says start."""
        if self._client is None:
            return
        message = AtBarrier(local_rank=self._session.local_rank, epoch=self._epoch)
        start = self._client.await_answer(message, collect_garbage, lambda: False)
        if not isinstance(start, JobStart):
            self._session.warn_once("the sidecar knows of no barrier: the block runs once")
            self._client = None
            return
        self._take(start)
        self._before = connections()
        signal.signal(INTERRUPT_SIGNAL, self._interrupted)
        self._halted.clear()
        self._left.clear()
        self._watcher = threading.Thread(
            target=self._watch,
            args=(self._client, start.generation),
            name="outrider-restart",
            daemon=True,
        )
        self._watcher.start()
        STORE_WAIT.leave_if_called_off = self._leave_if_called_off
        self.armed = True

    def _take(self, start: JobStart) -> None:
        """Take ranks, environment and files of the generation that starts."""
        os.environ.update(start.worker_envs)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # a script may close it
                stream.flush()
        for path, descriptor in ((start.stdout, 1), (start.stderr, 2)):
            if path is not None:
                _write_to(path, descriptor)
        if start.generation != self._session.generation:
            self._session.turn_to(start.generation)
        self._epoch = start.generation

    # --- leaving the block ------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> bool:
        """Take the end of a run.  Returns whether the block is to be run again."""
        client = self._client
        if client is None:
            return False
        halted = self._halted.is_set()
        STORE_WAIT.leave_if_called_off = None
        self._left.set()
        client.hurry()
        signal.signal(INTERRUPT_SIGNAL, signal.SIG_IGN)  # one may be on its way still
        if self._watcher is not None:  # what it calls off must not be the next run's
            self._watcher.join(WATCHER_S_MAX)
        wants_to_end = isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit)
        if wants_to_end or (error is None and not halted):
            self._finish(client)
            return False
        if error is not None and not halted and not self._report(client, error):
            return False
        kept = process_groups()
        try:
            destroy_groups(self._before)
        except Exception as trouble:
            _log.warning("outrider: no in-process restart, torch's groups stay: %s", trouble)
            if error is None:
                raise
            return False
        if error is not None:
            traceback.clear_frames(error.__traceback__)
        kept.clear()
        return True

    def _finish(self, client: Client) -> None:
        said = LeftBlock(local_rank=self._session.local_rank)
        client.update(lambda outbox: outbox.owe(said))
        if self._handler not in (None, signal.SIG_DFL):  # the default would end the process
            signal.signal(INTERRUPT_SIGNAL, self._handler)
        self._client = None

    def _report(self, client: Client, error: BaseException) -> bool:
        """Tell of this rank's own failure.  Returns whether the sidecar took it in."""
        traceback.print_exception(error)
        sys.stderr.flush()
        fault = JobFault(
            local_rank=self._session.local_rank,
            reason=type(error).__name__,
            message=f"{type(error).__name__}: {error}"[:MESSAGE_CHARS_MAX],
            restart_mode=RestartMode.IN_PROCESS,
        )
        return isinstance(client.ask(fault, REPORT_S_MAX), Ack)

    # --- being called off -------------------------------------------------------------------

    def _watch(self, client: Client, epoch: int) -> None:
        """Wait until the run is called off, and get the training thread out of it.  A thread."""
        message = PastBarrier(local_rank=self._session.local_rank, epoch=epoch)
        answer = client.await_answer(message, _nothing, self._left.is_set)
        if not isinstance(answer, JobHalt):
            return
        self._halted.set()
        while not self._left.is_set():
            main = threading.main_thread().ident
            assert main is not None, "the main thread has begun"
            signal.pthread_kill(main, INTERRUPT_SIGNAL)
            call_off_collectives(self._before)
            self._left.wait(ASK_AGAIN_S)

    def _interrupted(self, _number: int, frame: FrameType | None) -> None:
        ours = frame is not None and frame.f_code.co_filename.startswith(_OURS)
        if not ours:
            self._leave_if_called_off()

    def _leave_if_called_off(self) -> None:
        if self.armed and self._halted.is_set():
            raise BlockCalledOff


def _write_to(path: str, descriptor: int) -> None:
    """Let ``descriptor`` write to ``path``, unless the script has redirected it somewhere else."""
    try:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name != Path(path).name:
            return
        fresh = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.dup2(fresh, descriptor, inheritable=True)
        os.close(fresh)
    except OSError as error:
        _log.warning("outrider: output stays in the files of before: %s", error)


def _nothing() -> None:
    """In place of something to do while waiting."""
