"""The node's end of the worker <-> sidecar conversation: a Unix stream server.

A connection belongs to the worker whose process id the kernel vouches for, and speaks for that
local rank and generation only.  What cannot be accepted is answered, counted, and never stops the
server.  What a message means is for the core to decide.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from sidecar.codec import InvalidMessageError, from_plain
from sidecar.events import WorkerSpoke
from sidecar.pace import Pace
from worker_shim.framing import BadFrame, Decoder, FrameTooLargeError, encode
from worker_shim.messages import (
    PROTOCOL_VERSION,
    WORKER_MESSAGES,
    AtBarrier,
    Envelope,
    Heartbeat,
    Init,
    JobData,
    Refusal,
    SidecarReply,
    WorkerMessage,
    reply_frame,
)

SOCKET_PATH_BYTES_MAX: Final = 107
"""``sun_path`` holds 108 bytes with its terminating zero."""
CONNECTIONS_MAX: Final = 1024
"""Across all workers: 64 workers with 16 client objects each."""
READ_BYTES: Final = 64 << 10
REPLY_BACKLOG_BYTES_MAX: Final = 1 << 20
"""Unread replies of one connection; a client that never reads is cut off, not buffered for."""
MESSAGES_PER_SECOND_MAX: Final = 200
"""Per connection.  An honest worker sends a few a minute; beyond this it is read more slowly."""
MESSAGES_BURST_MAX: Final = 400

BAD_FRAME: Final = "bad_frame"
"""Label of errors that have no message type."""
FOREIGN_PEER: Final = "foreign_peer"
STALE: Final = "stale_generation"
WRONG_RANK: Final = "wrong_rank"
INVALID: Final = "invalid_message"
ERROR_KINDS: Final = (BAD_FRAME, FOREIGN_PEER, STALE, WRONG_RANK, INVALID)

_AT_REST: Final = (Init, AtBarrier, JobData, Heartbeat)
"""What a worker may say of an earlier generation of its own: nobody told it of the present one."""
_CREDENTIALS: Final = struct.Struct("3i")
_LOG = logging.getLogger(__name__)


class SocketPathError(ValueError):
    """The socket cannot be made at that path; the text names the way out."""


class KnownWorker(Protocol):
    """What the launcher knows about a running worker, as of now.

    ``born`` is the generation it was started in, ``generation`` the one it was carried into.
    """

    @property
    def generation(self) -> int: ...  # noqa: D102
    @property
    def local_rank(self) -> int: ...  # noqa: D102
    @property
    def born(self) -> int: ...  # noqa: D102


@dataclass(slots=True)
class _Connection:
    """One client."""

    number: int
    writer: asyncio.StreamWriter
    worker: KnownWorker
    pace: Pace = field(default_factory=lambda: Pace(MESSAGES_PER_SECOND_MAX, MESSAGES_BURST_MAX))
    decoder: Decoder = field(default_factory=Decoder)


class _RefusedError(Exception):
    """Why a message is not accepted, and under which kind it is counted."""

    def __init__(self, kind: str, reason: str, reply_to: int | None) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.reply_to = reply_to


class WorkerServer:
    """Accepts workers' connections; ``put`` receives what they say, by connection number."""

    def __init__(
        self,
        path: Path,
        worker_of: Callable[[int], KnownWorker | None],
        put: Callable[[WorkerSpoke], None],
    ) -> None:
        check_socket_path(path)
        self.path = path
        self.messages: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._worker_of = worker_of
        self._put = put
        self._connections: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_number = 1
        self._server: asyncio.Server | None = None
        self._bound: tuple[int, int] | None = None

    async def start(self) -> None:
        """Listen.  Raises `SocketPathError` when the path is somebody else's, or `OSError`."""
        await _clear_stale(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The mode stands before anybody can connect: bound, narrowed, then listening.
            listener.bind(str(self.path))
            self._bound = _identity(self.path)
            self.path.chmod(0o600)
            listener.setblocking(False)
            self._server = await asyncio.start_unix_server(self._accepted, sock=listener)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """Stop listening, close every connection, remove the socket."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections.values()):
            connection.writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if _identity(self.path) == self._bound:  # another sidecar's may stand there by now
            self.path.unlink(missing_ok=True)

    def send(self, connection: int, reply: SidecarReply) -> bool:
        """Send ``reply``; False when the connection is gone or does not read its replies."""
        known = self._connections.get(connection)
        return known is not None and self._write(known, reply)

    # --- one connection -------------------------------------------------------------------

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs this in a task"
        self._tasks.add(task)
        connection: _Connection | None = None
        try:
            connection = self._admit(writer)
            if connection is not None:
                await self._serve(connection, reader)
        except (ConnectionError, TimeoutError):
            pass  # a worker that ends closes its socket in whatever way it dies
        finally:
            if connection is not None:
                del self._connections[connection.number]
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _admit(self, writer: asyncio.StreamWriter) -> _Connection | None:
        pid = _peer_pid(writer)
        worker = self._worker_of(pid)
        if worker is None:
            self.errors[FOREIGN_PEER] += 1
            reason = f"process {pid} is not a worker of this node's present generation"
            writer.write(encode(reply_frame(Refusal(reply_to=None, reason=reason))))
            return None
        if len(self._connections) >= CONNECTIONS_MAX:
            self.errors[BAD_FRAME] += 1
            reason = f"more than {CONNECTIONS_MAX} connections; close those that are not used"
            writer.write(encode(reply_frame(Refusal(reply_to=None, reason=reason))))
            return None
        connection = _Connection(
            number=self._next_number,
            writer=writer,
            worker=worker,
        )
        self._next_number += 1
        self._connections[connection.number] = connection
        return connection

    async def _serve(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(READ_BYTES):
            for frame in connection.decoder.feed(data):
                await connection.pace.keep()
                if not self._handle(connection, frame):
                    return

    def _handle(self, connection: _Connection, frame: dict[str, Any] | BadFrame) -> bool:
        """Pass one frame on or refuse it; False when the connection must end."""
        if isinstance(frame, BadFrame):
            self.errors[BAD_FRAME] += 1
            sent = self._write(connection, Refusal(reply_to=None, reason=frame.reason))
            return sent and not frame.fatal
        try:
            envelope, message = _understand(connection, frame)
        except _RefusedError as refused:
            self.errors[refused.kind] += 1
            return self._write(
                connection, Refusal(reply_to=refused.reply_to, reason=refused.reason)
            )
        self.messages[message.TYPE] += 1
        self._put(WorkerSpoke(connection=connection.number, envelope=envelope, message=message))
        return True

    def _write(self, connection: _Connection, reply: SidecarReply) -> bool:
        transport = connection.writer.transport
        if transport.is_closing():
            return False
        if transport.get_write_buffer_size() > REPLY_BACKLOG_BYTES_MAX:
            _LOG.warning(
                "local rank %d does not read its replies; closing", connection.worker.local_rank
            )
            transport.abort()
            return False
        try:
            frame = encode(reply_frame(reply))
        except (FrameTooLargeError, UnicodeEncodeError):
            short = Refusal(reply_to=None, reason="the answer would be too large to send")
            frame = encode(reply_frame(short))
        connection.writer.write(frame)
        return True


def check_socket_path(path: Path) -> None:
    """Raise `SocketPathError` when the system cannot hold the path."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES_MAX:
        raise SocketPathError(
            f"socket path {path} is {size} bytes long, the system allows {SOCKET_PATH_BYTES_MAX}; "
            "choose a shorter runDir (--run-dir)"
        )


def _understand(connection: _Connection, frame: dict[str, Any]) -> tuple[Envelope, WorkerMessage]:
    seq = frame.get("seq")
    reply_to = seq if isinstance(seq, int) else None
    try:
        orjson.dumps(frame)
    except orjson.JSONEncodeError as error:
        # What is let in is told to the coordinator, and what cannot be would end that telling.
        raise _RefusedError(kind=INVALID, reason=str(error), reply_to=reply_to) from None
    kind = frame.get("type")
    cls = WORKER_MESSAGES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise _RefusedError(kind=INVALID, reason=f"unknown type {kind!r}", reply_to=reply_to)
    # A client of the HyperPod agent's protocol says none of these; the kernel knows them for it.
    known = {
        "seq": 0,
        "generation": connection.worker.generation,
        "pid": 0,
        "protocol": PROTOCOL_VERSION,
    }
    body = {**known, **frame}
    try:
        envelope = from_plain(body, Envelope)
        message = from_plain(body, cls)
    except InvalidMessageError as error:
        raise _RefusedError(kind=INVALID, reason=str(error), reply_to=reply_to) from None
    if message.local_rank != connection.worker.local_rank:
        reason = (
            f"this process is local rank {connection.worker.local_rank} "
            f"and may not speak for local rank {message.local_rank}"
        )
        raise _RefusedError(kind=WRONG_RANK, reason=reason, reply_to=reply_to)
    worker = connection.worker
    at_rest = isinstance(message, _AT_REST) and worker.born <= envelope.generation
    if envelope.generation != worker.generation and not (
        at_rest and envelope.generation <= worker.generation
    ):
        reason = (
            f"message of generation {envelope.generation}, "
            f"this worker belongs to generation {connection.worker.generation}"
        )
        raise _RefusedError(kind=STALE, reason=reason, reply_to=reply_to)
    return envelope, message


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    peer = writer.get_extra_info("socket")
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _uid, _gid = _CREDENTIALS.unpack(raw)
    return int(pid)


async def _clear_stale(path: Path) -> None:
    """Remove the socket of a sidecar that was killed; refuse what is anybody else's."""
    try:
        mode = path.lstat().st_mode  # noqa: ASYNC240 - one system call
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):  # a file refuses a connection too, and is not ours to remove
        raise SocketPathError(
            f"{path} exists and is no socket; move it away, or choose another runDir (--run-dir)"
        )
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - one system call
        return
    writer.close()
    raise SocketPathError(
        f"another sidecar listens on {path}; stop it, or choose another runDir (--run-dir)"
    )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
