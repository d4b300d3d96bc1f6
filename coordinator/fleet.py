"""The sidecars' WebSockets: who is connected, what they say, what is sent to them.

Turns connections into events and effects into frames.  It never judges a message beyond "can it
be read": who may join and what a silence means is decided by the job core.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from coordinator.audit_trail import CALLER
from coordinator.events import (
    Accept,
    Dismiss,
    Event,
    LinkClosed,
    LinkOpened,
    LinkSpoke,
    Send,
)
from sidecar.api import UPLINK_PATH, UPWARD, Downward, Goodbye, Hello, Upward, Welcome
from sidecar.codec import MESSAGE_BYTES_MAX, InvalidMessageError, decode, encode
from sidecar.pace import Pace
from sidecar.roles import ANYBODY

LINKS_MAX: Final = 16_384
"""Open connections, presented or not: above the 10 000 nodes that one process is meant for."""
HELLO_TIMEOUT_S: Final = 5.0
"""A connection that has not presented itself by then is not a sidecar."""
PING_INTERVAL_S: Final = 5.0
"""Silence after which a ping is sent; half of it without a pong ends the link."""
SEND_TIMEOUT_S: Final = 10.0
"""A frame that the peer's kernel does not take for this long ends the link."""
CLOSE_TIMEOUT_S: Final = 2.0
"""Wait for the peer's half of a close."""
OUTBOX_MESSAGES_MAX: Final = 64
"""Unsent messages per link.  The core sends a handful per recovery, so more means a stuck peer."""
MESSAGES_PER_SECOND_MAX: Final = 200
"""Per link.  A sidecar tells what changed, a few times a second at worst; beyond this it is read
more slowly, and the others are read as before."""
MESSAGES_BURST_MAX: Final = 1_000
"""A node of many ranks answers an inspection at once."""

log = logging.getLogger("outrider.fleet")


@dataclass(slots=True, eq=False)
class _Link:
    number: int
    socket: web.WebSocketResponse
    request: web.Request
    outbox: asyncio.Queue[str | None] = field(
        default_factory=lambda: asyncio.Queue(OUTBOX_MESSAGES_MAX)
    )
    """Frames to send; None closes the link after everything before it."""
    sending: bool = False
    pace: Pace = field(default_factory=lambda: Pace(MESSAGES_PER_SECOND_MAX, MESSAGES_BURST_MAX))

    @property
    def flushed(self) -> bool:
        return self.outbox.empty() and not self.sending

    def abort(self) -> None:
        """Drop the connection at once; the reader notices and ends the link."""
        if self.request.transport is not None:
            self.request.transport.abort()


class Fleet:
    """Every open link of one job's coordinator."""

    def __init__(
        self,
        inbox: "asyncio.Queue[Event]",
        *,
        job: str,
        heartbeat_s: float,
        admit_label: tuple[str, str] | None = None,
    ) -> None:
        self._inbox = inbox
        self._admit_label = admit_label
        self._welcome = Welcome(job=job, heartbeat_s=heartbeat_s)
        self._links: dict[int, _Link] = {}
        self._presented: set[int] = set()
        self._last_number = 0
        self._changed = asyncio.Event()
        self._last_sent: tuple[Downward | None, str] = (None, "")
        self.messages_refused = 0
        """Messages that could not be read, since the start."""
        self.links_too_slow = 0
        """Links dropped because their peer did not take what was sent, since the start."""

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the one route that sidecars dial."""
        return [web.get(UPLINK_PATH, self._serve)]

    @property
    def open_links(self) -> int:
        """Number of connections that presented themselves and are still open."""
        return len(self._presented)

    def execute(self, effect: Accept | Dismiss | Send) -> None:
        """Start the effect.  Never blocks; a link that is gone or stuck ends by itself."""
        link = self._links.get(effect.link)
        if link is None:
            return
        match effect:
            case Accept():
                self._post(link, self._welcome)
            case Send():
                self._post(link, effect.command)
            case Dismiss():
                self._dismiss(link, effect.reason, retry=effect.retry)

    async def flush(self, limit_s: float) -> bool:
        """Wait until everything was handed to the peers' kernels.  False when time ran out."""
        return await self._until(
            lambda: all(link.flushed for link in self._links.values()), limit_s
        )

    async def wait_empty(self, limit_s: float) -> bool:
        """Wait until every presented sidecar has left.  False when time ran out."""
        return await self._until(lambda: not self._presented, limit_s)

    async def close(self) -> None:
        """End every link politely: sidecars dial again, their training goes on."""
        await asyncio.gather(
            *(
                link.socket.close(code=WSCloseCode.GOING_AWAY, message=b"coordinator stops")
                for link in list(self._links.values())
            ),
            return_exceptions=True,
        )

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if len(self._links) >= LINKS_MAX:
            raise web.HTTPServiceUnavailable(text=f"more than {LINKS_MAX} connections")
        socket = web.WebSocketResponse(
            timeout=CLOSE_TIMEOUT_S,
            heartbeat=PING_INTERVAL_S,
            max_msg_size=MESSAGE_BYTES_MAX,
            compress=False,
        )
        await socket.prepare(request)
        self._last_number += 1
        link = _Link(self._last_number, socket, request)
        self._links[link.number] = link
        writer = asyncio.create_task(self._write(link))
        try:
            await self._read(link)
        except InvalidMessageError as error:
            self._refuse(link, f"message refused: {error}", retry=link.number in self._presented)
            await self._until(lambda: socket.closed, SEND_TIMEOUT_S + CLOSE_TIMEOUT_S)
        finally:
            writer.cancel()
            await self._forget(link)
        return socket

    async def _read(self, link: _Link) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await self._next(link)
        except TimeoutError:
            raise InvalidMessageError(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
        if hello is None:
            return
        if not isinstance(hello, Hello):
            raise InvalidMessageError(f"the first message must be hello, not {hello.TYPE}")
        if self._admit_label is not None:
            name, secret = self._admit_label
            if not hmac.compare_digest(hello.labels.get(name, "").encode(), secret.encode()):
                raise InvalidMessageError("this coordinator serves the job of one machine only")
        caller = link.request.get(CALLER, ANYBODY)
        if caller.node not in (None, hello.node):
            raise InvalidMessageError(
                f"the certificate is that of node {caller.node}, not of {hello.node}"
            )
        self._presented.add(link.number)
        await self._inbox.put(LinkOpened(link=link.number, hello=hello))
        while (message := await self._next(link)) is not None:
            if isinstance(message, Hello):
                raise InvalidMessageError("hello was said already on this connection")
            await self._inbox.put(LinkSpoke(link=link.number, message=message))
            await link.pace.keep()

    async def _next(self, link: _Link) -> Upward | None:
        frame = await link.socket.receive()
        if frame.type in (WSMsgType.TEXT, WSMsgType.BINARY):
            return decode(frame.data, UPWARD)
        if frame.type is WSMsgType.ERROR and isinstance(frame.data, WebSocketError):
            self.messages_refused += 1  # too big, or no WebSocket frame: the library said goodbye
            log.warning("link %d from %s: %s", link.number, link.request.remote, frame.data)
        return None

    async def _write(self, link: _Link) -> None:
        while True:
            frame = await link.outbox.get()
            link.sending = True
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    if frame is None:
                        await link.socket.close()
                        return
                    await link.socket.send_str(frame)
            except TimeoutError:
                self._too_slow(link, f"took nothing for {SEND_TIMEOUT_S:g} s")
                return
            except ConnectionError as error:
                log.debug("link %d is gone: %s", link.number, error)
                link.abort()
                return
            finally:
                link.sending = False
                self._changed.set()

    async def _forget(self, link: _Link) -> None:
        self._links.pop(link.number, None)
        if link.number in self._presented:
            self._presented.discard(link.number)
            await self._inbox.put(LinkClosed(link=link.number))
        self._changed.set()

    def _post(self, link: _Link, message: Downward) -> None:
        try:
            link.outbox.put_nowait(self._encoded(message))
        except asyncio.QueueFull:
            self._too_slow(link, f"more than {OUTBOX_MESSAGES_MAX} messages wait for it")

    def _dismiss(self, link: _Link, reason: str, *, retry: bool) -> None:
        self._post(link, Goodbye(reason=reason, retry=retry))
        with suppress(asyncio.QueueFull):
            link.outbox.put_nowait(None)

    def _refuse(self, link: _Link, reason: str, *, retry: bool) -> None:
        self.messages_refused += 1
        log.warning("link %d from %s: %s", link.number, link.request.remote, reason)
        self._dismiss(link, reason, retry=retry)

    def _too_slow(self, link: _Link, why: str) -> None:
        self.links_too_slow += 1
        log.warning("link %d to %s dropped: %s", link.number, link.request.remote, why)
        link.abort()

    def _encoded(self, message: Downward) -> str:
        """Encode once what a broadcast sends many times."""
        if self._last_sent[0] is not message:
            self._last_sent = (message, encode(message).decode())
        return self._last_sent[1]

    async def _until(self, done: Callable[[], bool], limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                while not done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return done()
        return True
