"""The sidecar's one connection to the coordinator: dialled, kept, and dialled again.

Carries levels up and commands down.  While the coordinator is away only the latest status is
kept, because it says everything; losing the connection stops no training.  What a command means
is for the core to decide.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from ssl import SSLContext
from typing import Final, Protocol

import aiohttp

from sidecar.access import Access
from sidecar.api import (
    DOWNWARD,
    UPLINK_PATH,
    Downward,
    EvidenceReport,
    Goodbye,
    Hello,
    ProgressReport,
    StatusReport,
    Upward,
    Welcome,
)
from sidecar.codec import MESSAGE_BYTES_MAX, InvalidMessageError, decode
from sidecar.events import CommandReceived, UplinkOpened
from sidecar.fitting import fitted

REDIAL_S_MIN: Final = 0.1
REDIAL_S_FIRST: Final = 1.5
"""A fleet loses its coordinator in one moment, so that even the first tries are spread this far."""
REDIAL_S_MAX: Final = 5.0
"""Bounds of the back-off: ten thousand nodes must not dial a restarted coordinator at once."""
STEADY_S: Final = 10.0
"""A connection that lasted this long was a good one: losing it is news, and begins a new count."""
REMIND_S: Final = 30.0
"""How often an unreachable coordinator is mentioned again."""
HANDSHAKE_S_MAX: Final = 10.0
"""Longest wait for the connection, and again for the welcome."""
SEND_S_MAX: Final = 10.0
"""Longest wait for the kernel to take a message before the connection counts as dead."""
PING_S: Final = 5.0
"""Silence after which the peer is asked for a sign of life."""
ANSWERS_MAX: Final = 16
"""Unsent answers to inspections; older ones are of no use to anybody."""

NOTHING: Final = Access()

_LOG = logging.getLogger(__name__)


class UplinkObserver(Protocol):
    """Who hears what came of the connection."""

    def put(self, event: CommandReceived | UplinkOpened) -> None:
        """Take an event for the core."""

    def dismissed(self, reason: str) -> None:
        """The coordinator does not want this sidecar, now or later."""


class Uplink:
    """One sidecar's way to its coordinator at ``url`` (``http``, ``https``, ``ws`` or ``wss``)."""

    def __init__(
        self,
        url: str,
        hello: Hello,
        observer: UplinkObserver,
        access: Access = NOTHING,
        cut: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = url.rstrip("/")
        self.connected = False
        self.connects = 0
        """Welcomes heard, since the start."""
        self._hello = hello
        self._observer = observer
        self._headers = access.headers()
        self._ssl: SSLContext | bool = access.client() or True
        self._status: StatusReport | None = None
        self._answers: deque[ProgressReport | EvidenceReport] = deque(maxlen=ANSWERS_MAX)
        self._news = asyncio.Event()
        self._tries = 0
        self._welcomed_at: float | None = None
        self._complained_at: float | None = None
        self._cut = cut
        self._cut_told: tuple[str, ...] = ()

    def report(self, message: StatusReport | ProgressReport | EvidenceReport) -> None:
        """Send when possible.  A status replaces every earlier one that was not sent."""
        if isinstance(message, StatusReport):
            self._status = message
        else:
            self._answers.append(message)
        self._news.set()

    async def run(self) -> None:
        """Keep the connection until cancelled or dismissed for good."""
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    if await self._converse(session):
                        return
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._complain(error)
                finally:
                    self.connected = False
                    self._parted()
                await asyncio.sleep(self._pause_s())

    async def flush(self, limit_s: float) -> None:
        """Wait until everything was handed to the kernel, for at most ``limit_s`` seconds."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while self.connected and (self._status is not None or self._answers):
            if asyncio.get_running_loop().time() >= deadline:
                return
            await asyncio.sleep(0.01)

    async def _converse(self, session: aiohttp.ClientSession) -> bool:
        """Hold one connection to its end.  True when dialling again is of no use."""
        async with asyncio.timeout(HANDSHAKE_S_MAX):
            socket = await session.ws_connect(
                f"{self.url}{UPLINK_PATH}",
                headers=self._headers,
                ssl=self._ssl,
                heartbeat=PING_S,
                max_msg_size=MESSAGE_BYTES_MAX,
            )
        async with socket:
            await self._send(socket, self._hello)
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                first = await _receive(socket)
            if isinstance(first, Goodbye):
                return self._goodbye(first)
            if not isinstance(first, Welcome):
                raise aiohttp.ClientError("the coordinator did not say welcome")
            self._welcomed(first)
            sender = asyncio.create_task(self._send_news(socket))
            try:
                return await self._hear(socket)
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)

    def _welcomed(self, welcome: Welcome) -> None:
        _LOG.info("connected to the coordinator at %s", self.url)
        self.connected = True
        self.connects += 1
        self._welcomed_at = asyncio.get_running_loop().time()
        self._complained_at = None
        self._answers.clear()  # they answer rounds of an earlier connection
        self._observer.put(UplinkOpened(heartbeat_s=welcome.heartbeat_s))

    def _parted(self) -> None:
        """Begin the back-off anew, unless the connection was lost again as soon as it was made."""
        now, began = asyncio.get_running_loop().time(), self._welcomed_at
        self._welcomed_at = None
        if began is not None and now - began >= STEADY_S:
            self._tries = 0

    async def _hear(self, socket: aiohttp.ClientWebSocketResponse) -> bool:
        while (message := await _receive(socket)) is not None:
            match message:
                case Goodbye():
                    return self._goodbye(message)
                case Welcome():
                    self._observer.put(UplinkOpened(heartbeat_s=message.heartbeat_s))
                case _:
                    self._observer.put(CommandReceived(command=message))
        raise aiohttp.ClientError("the connection ended")

    async def _send_news(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._answers:
                    await self._send(socket, self._answers.popleft())
                if (status := self._status) is not None:
                    await self._send(socket, status)
                    if self._status is status:
                        self._status = None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            _LOG.debug("sending to the coordinator failed: %s", error)
            self._news.set()
            await socket.close()  # ends the hearing side, which dials again

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, message: Upward) -> None:
        """Send as much of the message as its frame can hold."""
        frame = fitted(message)
        left_out = ("all of it",) if frame is None else frame.left_out
        if left_out:
            self._cut()
            if left_out != self._cut_told:
                _LOG.warning(
                    "a %s is too large for the coordinator; left out: %s",
                    message.TYPE,
                    ", ".join(left_out),
                )
            self._cut_told = left_out
        if frame is not None:
            async with asyncio.timeout(SEND_S_MAX):
                await socket.send_str(frame.data.decode())

    def _goodbye(self, goodbye: Goodbye) -> bool:
        if goodbye.retry:
            _LOG.info("the coordinator at %s says: %s; dialling again", self.url, goodbye.reason)
            return False
        self._observer.dismissed(goodbye.reason)
        return True

    def _pause_s(self) -> float:
        """Return the next wait: exponential, and drawn from all of it, the longest wait too."""
        ceiling = min(REDIAL_S_MAX, REDIAL_S_FIRST * 2 ** min(self._tries, 16))
        self._tries += 1
        return random.uniform(REDIAL_S_MIN, ceiling)  # noqa: S311 - no secret

    def _complain(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if self._complained_at is not None and now < self._complained_at + REMIND_S:
            return
        self._complained_at = now
        why = str(error) or "no answer in time"
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            why = f"its certificate is not one of our authority's for that name: {error}"
        elif isinstance(error, aiohttp.ClientConnectorError):
            why = error.strerror or why
        elif isinstance(error, aiohttp.WSServerHandshakeError):
            why = f"HTTP status {error.status}"
            if error.status in (401, 403):
                why = "it refuses our token or certificate; see tokenFile and tls"
        _LOG.warning("cannot reach the coordinator at %s, retrying (%s)", self.url, why)


async def _receive(socket: aiohttp.ClientWebSocketResponse) -> Downward | None:
    """Return the next message that can be understood, or None at the end of the connection."""
    while True:
        frame = await socket.receive()
        if frame.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            return None
        try:
            return decode(frame.data, DOWNWARD)
        except InvalidMessageError as error:
            _LOG.warning("message from the coordinator ignored: %s", error)
