"""Attaching a training process to its sidecar, and the calls a script may make then.

We are guests here: whatever goes wrong is one line in the rank's log, and training goes on.
Nothing raises into the script, nothing waits without a limit, and a process that was not
launched by a sidecar gets a session that does nothing.
"""

import atexit
import functools
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, SupportsIndex, TypeVar

from scout.progress import PageWriter, ProgressPageError
from worker_shim.checkpoint import AnyPath, CheckpointKind, CheckpointTracker
from worker_shim.client import Client
from worker_shim.instrument import Instruments
from worker_shim.messages import (
    FLIGHT_RECORD_SUFFIX,
    GENERATION_ENV,
    PROGRESS_PAGE_ENV,
    PROGRESS_TOKEN_ENV,
    SOCKET_ENV,
    JobFault,
    RestartMode,
)
from worker_shim.phases import (
    DeclaredPhase,
    WatchedLoader,
    checkpoint_phase,
    declared_phase,
)
from worker_shim.scout_guard import ScoutGuard
from worker_shim.scout_guard import begin as tell_of_scout
from worker_shim.session import Outbox, StepCounter

ATTACH_S_MAX: Final = 1.0
"""Longest wait in `attach`.  A sidecar answers in a millisecond; one that is busy answers later."""
FAULT_S_MAX: Final = 1.0
"""Wait for a fault's answer: the script is about to die of it, and the report should not."""
FLUSH_S_MAX: Final = 1.0
"""Wait at the process's end for reports that are owed still."""
IDLE_TICK_S: Final = 60.0
"""Between two ticks that do nothing."""

_log: Final = logging.getLogger("outrider")
_P = ParamSpec("_P")
_R = TypeVar("_R")
T = TypeVar("T")


def _quietly(
    method: "Callable[Concatenate[Session, _P], _R | None]",
) -> "Callable[Concatenate[Session, _P], _R | None]":
    """Turn whatever a call raises into one warning: the last line of a guest's manners."""

    @functools.wraps(method)
    def guarded(session: "Session", /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return method(session, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training must not see it, whatever it is
            session.warn_once(f"{method.__name__} did nothing: {type(error).__name__}: {error}")
            return None

    return guarded


class Session:
    """What `attach` returns.  Its methods are the whole of what a script can say."""

    def __init__(
        self,
        client: Client | None = None,
        instruments: Instruments | None = None,
        steps: StepCounter | None = None,
        local_rank: int = 0,
        generation: int = 0,
    ) -> None:
        self.generation = generation
        """The job's run number that this process belongs to."""
        self._client = client
        self._instruments = instruments
        self._track = instruments.track if instruments is not None else None
        self._local_rank = local_rank
        self._warned: set[str] = set()
        self._checkpoints = (
            CheckpointTracker(client, steps or StepCounter(), local_rank) if client else None
        )

    @property
    def client(self) -> Client | None:
        """The connection, None when there is none."""
        return self._client

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._local_rank

    @property
    def attached(self) -> bool:
        """False when every call is a no-op."""
        return self._client is not None

    @_quietly
    def notify_labels(self, labels: Mapping[str, object]) -> None:
        """Say where this rank stands in the parallel layout, e.g. ``{"dp": 3, "pp": 0}``."""
        self._look_for_torch()
        if self._client is not None:
            told = {str(key): str(value) for key, value in labels.items()}
            self._client.update(lambda outbox: outbox.set_labels(told))

    @_quietly
    def checkpoint_saved(
        self,
        step: SupportsIndex,
        path: AnyPath,
        prefix: str = "checkpoint",
        kind: CheckpointKind = "model",
    ) -> None:
        """Say that this rank's part of the checkpoint of ``step`` is durable at ``path``."""
        self._look_for_torch()
        if self._checkpoints is not None:
            self._checkpoints.saved(step, path, prefix, kind)

    def latest_checkpoint(
        self,
        prefix: str = "checkpoint",
        default: AnyPath | None = None,
        kind: CheckpointKind = "model",
    ) -> str | None:
        """Return the checkpoint that every rank is to load, or ``default``."""
        own = self._path_of(default)
        chosen = self._chosen(prefix, own, kind)
        return own if chosen is None else chosen[0]

    @_quietly
    def _path_of(self, default: AnyPath | None) -> str | None:
        return None if default is None else os.fsdecode(default)

    @_quietly
    def report_fault(
        self, reason: str, restart_mode: RestartMode | str | None = None, message: str = ""
    ) -> None:
        """Say that this rank failed, and how deep a restart it needs."""
        if self._client is None:
            return
        try:
            mode = None if restart_mode is None else RestartMode(restart_mode)
        except ValueError as error:
            self.warn_once(f"the fault is reported without a restart mode: {error}")
            mode = None
        fault = JobFault(
            local_rank=self._local_rank,
            reason=str(reason),
            message=str(message),
            restart_mode=mode,
        )
        self._client.ask(fault, FAULT_S_MAX)

    @_quietly
    def _chosen(self, prefix: str, default: str | None, kind: str) -> tuple[str | None] | None:
        """Return the answer in a tuple, because "begin from nothing" is an answer too."""
        self._look_for_torch()
        if self._checkpoints is None:
            return None
        return (self._checkpoints.latest(prefix, default, kind),)

    def phase(self, name: str, limit_s: float | None = None) -> DeclaredPhase:
        """Return the context of a phase that may last ``limit_s`` seconds without a stall."""
        self._look_for_torch()
        return declared_phase(self._track, name, limit_s, self.warn_once)

    def checkpoint_io(self, direction: str, limit_s: float | None = None) -> DeclaredPhase:
        """Return the context of reading or writing a checkpoint."""
        self._look_for_torch()
        return checkpoint_phase(self._track, direction, limit_s, self.warn_once)

    def instrument_dataloader(self, loader: Iterable[T]) -> Iterable[T]:
        """Return ``loader`` with its waits published."""
        self._look_for_torch()
        return loader if self._track is None else WatchedLoader(self._track, loader)

    def turn_to(self, generation: int) -> None:
        """Belong to ``generation``, whose variables the environment holds already."""
        if self._client is None:
            return
        self.generation = generation
        self._client.update(lambda outbox: outbox.turn_to(generation))
        if self._instruments is not None:
            self._instruments.renew()
        page = _open_page(os.environ)
        if self._instruments is not None and page is not None:
            self._instruments.turn_to(page)

    def _look_for_torch(self) -> None:
        if self._instruments is not None:
            self._instruments.install()

    def warn_once(self, text: str) -> None:
        """Put one line into the rank's log, the first time."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("outrider: %s", text)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close(FLUSH_S_MAX)

    def _detach(self) -> None:
        """Leave torch as it was, say what is owed still, and let go."""
        if self._instruments is not None:
            self._instruments.remove()
        if self._client is not None:
            self._client.close(FLUSH_S_MAX)
            self._client.release()
        self._client = self._instruments = self._track = self._checkpoints = None

    def _abandon(self) -> None:
        """In a forked child: its parent speaks for the rank, the child never does."""
        if self._instruments is not None:
            self._instruments.silence()
        if self._client is not None:
            self._client.abandon()
        self._client = self._instruments = self._track = self._checkpoints = None


class Attachment:
    """The session of this process, if it attached."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._nobody = Session()
        self._attaching = threading.Lock()
        self._held: threading.Condition | None = None
        self._is_registered = False

    def present(self) -> Session:
        """Return the session, or one that does nothing."""
        return self.session or self._nobody

    def attach(self) -> Session:
        """Begin the session unless there is one."""
        with self._attaching:
            if self.session is None:
                self.session = _open_session(os.environ)
                if self.session.attached and not self._is_registered:
                    self._is_registered = True
                    atexit.register(self._at_exit)
                    os.register_at_fork(
                        before=self._before_fork,
                        after_in_parent=self._after_in_parent,
                        after_in_child=self._after_in_child,
                    )
            return self.session

    def detach(self) -> None:
        """End the session, if there is one; `attach` begins another."""
        with self._attaching:
            session, self.session = self.session, None
            if session is not None:
                session._detach()  # noqa: SLF001 - same module

    def _at_exit(self) -> None:
        if self.session is not None:
            self.session._close()  # noqa: SLF001 - same module

    def _before_fork(self) -> None:
        client = self.session._client if self.session is not None else None  # noqa: SLF001
        self._held = client.guard if client is not None else None
        if self._held is not None:
            self._held.acquire()

    def _after_in_parent(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def _after_in_child(self) -> None:
        self._held = None
        self._attaching = threading.Lock()
        if self.session is not None:
            self.session._abandon()  # noqa: SLF001 - same module


ATTACHMENT: Final = Attachment()


def _open_session(environment: Mapping[str, str]) -> Session:
    path = environment.get(SOCKET_ENV) or None
    if path is None and not environment.get(PROGRESS_PAGE_ENV):
        _log.warning(
            "outrider: not attached, %s is not set; training goes on without it", SOCKET_ENV
        )
        return Session()
    try:
        local_rank = int(environment.get("LOCAL_RANK", "0"))
        generation = int(environment.get(GENERATION_ENV, "0"))
    except ValueError as error:
        _log.warning("outrider: not attached, LOCAL_RANK or %s: %s", GENERATION_ENV, error)
        return Session()
    steps = StepCounter()
    page = _open_page(environment)
    instruments = None
    if page is not None:
        flight_record = Path(environment[PROGRESS_PAGE_ENV] + FLIGHT_RECORD_SUFFIX)
        instruments = Instruments(steps, page, flight_record, ScoutGuard(environment))
    outbox = Outbox(
        client_id=f"{os.getpid()}-{secrets.token_hex(4)}",
        generation=generation,
        local_rank=local_rank,
        pid=os.getpid(),
    )
    client = Client(path, outbox, instruments.tick if instruments is not None else _idle)
    if instruments is not None:
        instruments.install()
    client.start()
    tell_of_scout(client, steps, local_rank)
    if path is None:  # an observer without a sidecar reads the page
        return Session(client, instruments, steps, local_rank, generation)
    unreachable = client.first_contact(ATTACH_S_MAX)
    if unreachable is not None:
        _log.warning(
            "outrider: no sidecar at %s (%s); training goes on without it", path, unreachable
        )
    return Session(client, instruments, steps, local_rank, generation)


def _open_page(environment: Mapping[str, str]) -> PageWriter | None:
    path = environment.get(PROGRESS_PAGE_ENV)
    if not path:
        return None
    try:
        return PageWriter.open(path, int(environment.get(PROGRESS_TOKEN_ENV, "")))
    except (ProgressPageError, OSError, ValueError) as error:
        _log.warning("outrider: progress is not published: %s", error)
        return None


def _idle(_now_ns: int) -> float:
    """Without a page there is nothing to say."""
    return IDLE_TICK_S
