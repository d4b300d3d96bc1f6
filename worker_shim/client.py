"""The one background thread in the training process: a socket and a regular tick.

It moves bytes between `session.Outbox` and the sidecar's Unix socket, dials again when the
sidecar went away, and calls a tick function whenever that said it wants to be called.  Every wait
has a limit and no send ever blocks: the training thread only takes a lock that is held for
microseconds.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from worker_shim.framing import BadFrame, Decoder, FrameTooLargeError, encode
from worker_shim.messages import CheckpointQuery, SidecarReply
from worker_shim.session import Outbox, Owed, Waiting

HEARTBEAT_S: Final = 2.0
"""Between two signs of life on an otherwise quiet connection."""
REDIAL_S_MIN: Final = 0.1
REDIAL_S_MAX: Final = 2.0
"""A sidecar that restarts is found again within two seconds; one that never comes costs little."""
WAIT_LOOK_S: Final = 1.0
"""Between two looks at whether a wait without an end is given up, should nobody say so."""
READ_BYTES: Final = 1 << 16
NOTES_MAX: Final = 16
"""Different complaints in the rank's log; a broken sidecar must not flood it."""

_log: Final = logging.getLogger("outrider")


class Client:
    """A connection to the sidecar that outlives the sidecar."""

    def __init__(self, path: str | None, outbox: Outbox, tick: Callable[[int], float]) -> None:
        """``tick`` is given the monotonic instant in ns, and returns the seconds until the next."""
        self.guard = threading.Condition()
        """Held for microseconds at a time, and across a fork."""
        self._path = path
        self._outbox = outbox
        self._tick = tick
        self._answers: dict[int, SidecarReply] = {}
        self._awaited: set[int] = set()
        self._decoder = Decoder()
        self._outgoing = bytearray()
        self._socket: socket.socket | None = None
        self._was_accepted = False
        self._unreachable: str | None = None
        self._redial_s = REDIAL_S_MIN
        self._dial_at = 0.0
        self._heartbeat_at = 0.0
        self._closing_at: float | None = None
        self._notes: set[str] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="outrider", daemon=True)

    # --- the training thread's side ---------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def first_contact(self, timeout_s: float) -> str | None:
        """Wait until the sidecar answered; return why it cannot be reached, if it cannot."""
        with self.guard:
            self.guard.wait_for(self._is_known, timeout_s)
            return self._unreachable

    def update(self, change: Callable[[Outbox], object]) -> None:
        """Change what is owed; the thread sends it."""
        with self.guard:
            change(self._outbox)
        self._wake()

    def ask(self, message: Owed, timeout_s: float) -> SidecarReply | None:
        """Owe ``message`` and wait for its answer; None when there was none in time.

        Where no sidecar was ever heard, nobody is waited for.  A report stays owed after the
        wait, a question does not.
        """
        with self.guard:
            if self._path is None or self._outbox.rejected is not None:
                return None
            ticket = self._outbox.owe(message)
            self._awaited.add(ticket)
            self._wake()
            if self._was_accepted or self._unreachable is None:
                self.guard.wait_for(lambda: not self._outbox.is_owed(ticket), timeout_s)
            self._awaited.discard(ticket)
            if isinstance(message, CheckpointQuery):
                self._outbox.forget(ticket)
            return self._answers.pop(ticket, None)

    def await_answer(
        self, message: Waiting, meanwhile: Callable[[], object], given_up: Callable[[], bool]
    ) -> SidecarReply | None:
        """Owe ``message``, do something ``meanwhile``, and wait for as long as it takes.

        None when the sidecar refused this process, or once ``given_up`` says so; it is asked
        whenever something was heard and every `WAIT_LOOK_S`.
        """
        with self.guard:
            if self._path is None or self._outbox.rejected is not None:
                return None
            ticket = self._outbox.owe(message)
            self._awaited.add(ticket)
        self._wake()
        meanwhile()
        with self.guard:
            while self._outbox.is_owed(ticket) and not given_up():
                self.guard.wait(WAIT_LOOK_S)
            self._awaited.discard(ticket)
            self._outbox.forget(ticket)
            return self._answers.pop(ticket, None)

    def hurry(self) -> None:
        """Wake who waits for an answer, to look whether it is given up."""
        with self.guard:
            self.guard.notify_all()

    def close(self, flush_s: float) -> None:
        """Send what is owed, for at most ``flush_s`` seconds, and end the thread."""
        self._closing_at = time.monotonic() + flush_s
        self._wake()
        if self._thread.is_alive():
            self._thread.join(flush_s + 1.0)

    def release(self) -> None:
        """After `close`: give back what the thread was woken with, if it ended."""
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def abandon(self) -> None:
        """In a forked child, where the thread does not exist: drop our copies of its handles."""
        self._drop_socket()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _is_known(self) -> bool:
        answered = self._outbox.accepted or self._outbox.rejected is not None
        return answered or self._unreachable is not None

    def _wake(self) -> None:
        # A full pipe wakes the thread already; behind a closed one there is none to wake.
        with suppress(OSError):
            os.write(self._wake_write, b"\0")

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        tick_at = time.monotonic()
        while not self._is_finished():
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + self._tick(time.monotonic_ns())
            if self._path is not None and self._outbox.rejected is None:
                self._keep_connection(self._path)
            self._move_bytes(max(0.0, tick_at - time.monotonic()))
        with self.guard:
            self._drop_socket()

    def _is_finished(self) -> bool:
        closing_at = self._closing_at
        if closing_at is None:
            return False
        with self.guard:
            nothing_to_do = self._socket is None or self._outbox.owed == 0
            unsent = bool(self._outgoing)
        return (nothing_to_do and not unsent) or time.monotonic() >= closing_at

    def _keep_connection(self, path: str) -> None:
        now = time.monotonic()
        with self.guard:
            if self._socket is None and now >= self._dial_at:
                self._dial(path, now)
            if self._socket is None:
                return
            if now >= self._heartbeat_at and self._outbox.accepted and not self._outgoing:
                self._outgoing += encode(self._outbox.heartbeat())
                self._heartbeat_at = now + HEARTBEAT_S
            for frame in self._outbox.frames():
                try:
                    self._outgoing += encode(frame)
                except FrameTooLargeError as error:
                    self._note(f"a message was not sent: {error}")

    def _dial(self, path: str, now: float) -> None:
        # A Unix socket connects or refuses at once, so that the lock is not held for long; it is
        # held so that a fork cannot happen between the socket's birth and our knowing of it.
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        dialled.setblocking(False)
        try:
            dialled.connect(path)
        except OSError as error:
            dialled.close()
            self._unreachable = error.strerror or str(error)
            self._dial_at = now + self._redial_s
            self._redial_s = min(2 * self._redial_s, REDIAL_S_MAX)
            self.guard.notify_all()
            return
        self._socket = dialled
        self._decoder = Decoder()
        self._outgoing.clear()
        self._outbox.opened()
        self._heartbeat_at = now + HEARTBEAT_S

    def _move_bytes(self, timeout_s: float) -> None:
        connection = self._socket
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if connection is not None:
            writable = select.POLLOUT if self._outgoing else 0
            poller.register(connection, select.POLLIN | writable)
        ready = dict(poller.poll(timeout_s * 1000))
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, READ_BYTES)
        if connection is None or connection.fileno() not in ready:
            return
        try:
            if self._outgoing:
                del self._outgoing[: connection.send(self._outgoing)]
            if ready[connection.fileno()] & ~select.POLLOUT:
                self._hear(connection.recv(READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self._lose()

    def _hear(self, data: bytes) -> None:
        if not data:
            self._lose()
            return
        with self.guard:
            for frame in self._decoder.feed(data):
                heard = self._outbox.heard(frame)
                if heard.note is not None:
                    self._note(heard.note)
                if heard.ticket in self._awaited and heard.reply is not None:
                    self._answers[heard.ticket] = heard.reply
                if isinstance(frame, BadFrame) and frame.fatal:
                    self._lose()
            if self._outbox.accepted:
                self._was_accepted = True
                self._unreachable = None
                self._redial_s = REDIAL_S_MIN
            if self._outbox.rejected is not None:
                self._drop_socket()
            self.guard.notify_all()

    def _lose(self) -> None:
        with self.guard:
            self._drop_socket()
            self._outbox.closed()
            self._dial_at = time.monotonic() + self._redial_s
            self._redial_s = min(2 * self._redial_s, REDIAL_S_MAX)

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._outgoing.clear()

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) < NOTES_MAX:
            self._notes.add(text)
            _log.warning("outrider: %s", text)
