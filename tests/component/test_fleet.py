import asyncio
import socket as sockets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from coordinator import fleet as fleet_module
from coordinator.events import (
    Accept,
    Dismiss,
    Event,
    LinkClosed,
    LinkOpened,
    LinkSpoke,
    Send,
)
from coordinator.fleet import Fleet
from sidecar.api import (
    DOWNWARD,
    PROTOCOL_VERSION,
    UPLINK_PATH,
    AgentState,
    Goodbye,
    Hello,
    Shutdown,
    StatusReport,
    Stop,
    Welcome,
)
from sidecar.codec import MESSAGE_BYTES_MAX, decode, encode
from worker_shim.messages import RestartMode

pytestmark = pytest.mark.component

DEADLINE_S = 30.0

HELLO = Hello(
    protocol=PROTOCOL_VERSION,
    agent_version="0",
    job="job",
    node="a",
    incarnation="1",
    host="127.0.0.1",
    http_port=1,
    nproc_per_node=1,
    spare=False,
)
STATUS = StatusReport(
    node="a",
    incarnation="1",
    state=AgentState.READY,
    generation=0,
    stopped_generation=0,
    topology_version=0,
    rendezvous_port=2,
)


class Stage:
    """A served fleet, its inbox and a client session."""

    def __init__(self, fleet: Fleet, inbox: "asyncio.Queue[Event]", port: int) -> None:
        self.fleet = fleet
        self.inbox = inbox
        self.port = port
        self.session = aiohttp.ClientSession()

    async def dial(self) -> aiohttp.ClientWebSocketResponse:
        """Connect without a word."""
        return await self.session.ws_connect(f"http://127.0.0.1:{self.port}{UPLINK_PATH}")

    async def join(self, hello: Hello = HELLO) -> tuple[aiohttp.ClientWebSocketResponse, int]:
        """Connect, present a node and return the socket and its link number."""
        link = await self.dial()
        await link.send_bytes(encode(hello))
        opened = await self.inbox.get()
        assert isinstance(opened, LinkOpened)
        assert opened.hello == hello
        return link, opened.link


@asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    """Serve a fleet on a free port."""
    inbox: asyncio.Queue[Event] = asyncio.Queue()
    fleet = Fleet(inbox, job="job", heartbeat_s=1.5)
    app = web.Application()
    app.add_routes(fleet.routes())
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stage = Stage(fleet, inbox, runner.addresses[0][1])
    try:
        yield stage
    finally:
        await fleet.close()
        await stage.session.close()
        await runner.cleanup()


def play(scene: Callable[[Stage], Awaitable[None]]) -> None:
    """Run one scene with a generous deadline."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), staged() as stage:
            await scene(stage)

    asyncio.run(main())


async def farewell(link: aiohttp.ClientWebSocketResponse) -> Goodbye:
    """Return the goodbye that must be the next and last message."""
    message = await link.receive()
    assert message.type is aiohttp.WSMsgType.TEXT, message
    goodbye = decode(message.data, DOWNWARD)
    assert isinstance(goodbye, Goodbye)
    assert (await link.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
    return goodbye


def test_a_sidecar_is_heard_answered_and_commanded_in_order() -> None:
    """A command before the welcome, or two commands swapped, starts the wrong generation."""

    async def scene(stage: Stage) -> None:
        link, number = await stage.join()
        await link.send_str(encode(STATUS).decode())
        assert await stage.inbox.get() == LinkSpoke(link=number, message=STATUS)
        stop = Stop(generation=3, restart_mode=RestartMode.PROCESS, reason="crash")
        stage.fleet.execute(Accept(link=number))
        stage.fleet.execute(Send(link=number, command=stop))
        stage.fleet.execute(Send(link=number, command=Shutdown(reason="done")))
        got = [decode((await link.receive()).data, DOWNWARD) for _ in range(3)]
        assert got == [Welcome(job="job", heartbeat_s=1.5), stop, Shutdown(reason="done")]
        await link.close()
        assert await stage.inbox.get() == LinkClosed(link=number)
        assert stage.fleet.open_links == 0

    play(scene)


def test_one_stop_reaches_every_link() -> None:
    """One missed node keeps the others waiting in a collective."""

    async def scene(stage: Stage) -> None:
        joined = [await stage.join(replace(HELLO, node=f"n{index}")) for index in range(20)]
        stop = Stop(generation=1, restart_mode=RestartMode.PROCESS, reason="crash")
        for _, number in joined:
            stage.fleet.execute(Send(link=number, command=stop))
        assert await stage.fleet.flush(DEADLINE_S)
        for link, _ in joined:
            assert decode((await link.receive()).data, DOWNWARD) == stop

    play(scene)


def test_a_dismissed_sidecar_is_told_why_and_let_go() -> None:
    """A sidecar that is only cut off dials again forever and nobody learns the reason."""

    async def scene(stage: Stage) -> None:
        link, number = await stage.join()
        stage.fleet.execute(Dismiss(link=number, reason="wrong job", retry=False))
        assert await farewell(link) == Goodbye(reason="wrong job", retry=False)
        assert await stage.inbox.get() == LinkClosed(link=number)
        stage.fleet.execute(Send(link=number, command=Shutdown(reason="late")))

    play(scene)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"type":"launch"}', "unknown message type 'launch'"),
        (b'{"type":"hello","protocol":"1"}', "protocol"),
        (encode(STATUS), "the first message must be hello"),
    ],
)
def test_a_bad_first_message_is_refused_with_its_reason(words: bytes, reason: str) -> None:
    """A stranger must not become a node, and its owner should learn what is wrong."""

    async def scene(stage: Stage) -> None:
        link = await stage.dial()
        await link.send_bytes(words)
        goodbye = await farewell(link)
        assert reason in goodbye.reason
        assert not goodbye.retry
        assert stage.fleet.messages_refused == 1
        assert stage.inbox.empty()

    play(scene)


def test_a_bad_later_message_ends_the_link_but_the_sidecar_may_return() -> None:
    """One unreadable status must not cost the node, nor be taken as a status."""

    async def scene(stage: Stage) -> None:
        link, number = await stage.join()
        await link.send_str('{"type":"status","node":5}')
        goodbye = await farewell(link)
        assert "StatusReport" in goodbye.reason
        assert goodbye.retry
        assert await stage.inbox.get() == LinkClosed(link=number)
        _, again = await stage.join()
        assert again != number

    play(scene)


def test_a_message_beyond_the_size_limit_ends_the_link() -> None:
    """One node must not fill the coordinator's memory."""

    async def scene(stage: Stage) -> None:
        link, number = await stage.join()
        with suppress(ConnectionError):  # the refusal may overtake the last bytes
            await link.send_bytes(b" " * (MESSAGE_BYTES_MAX + 1))
        assert await stage.inbox.get() == LinkClosed(link=number)
        assert stage.fleet.messages_refused == 1

    play(scene)


def test_a_silent_connection_is_shown_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open connections would pile up until no sidecar gets in."""
    monkeypatch.setattr(fleet_module, "HELLO_TIMEOUT_S", 0.1)

    async def scene(stage: Stage) -> None:
        assert "no hello within" in (await farewell(await stage.dial())).reason
        assert stage.inbox.empty()

    play(scene)


def test_a_peer_that_answers_no_ping_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lost its power closes no socket; its loss must still be seen."""
    monkeypatch.setattr(fleet_module, "PING_INTERVAL_S", 0.2)

    async def scene(stage: Stage) -> None:
        _, writer = await raw_join(stage.port)
        opened = await stage.inbox.get()
        assert isinstance(opened, LinkOpened)
        assert await stage.inbox.get() == LinkClosed(link=opened.link)
        writer.close()

    play(scene)


def test_a_peer_that_takes_nothing_is_dropped_and_delays_nobody() -> None:
    """One stuck node must not hold back the stop of all others."""

    async def scene(stage: Stage) -> None:
        quick, quick_number = await stage.join(replace(HELLO, node="quick"))
        _, writer = await raw_join(stage.port)
        opened = await stage.inbox.get()
        assert isinstance(opened, LinkOpened)
        bulky = Shutdown(reason="x" * 500_000)
        for _ in range(fleet_module.OUTBOX_MESSAGES_MAX + 30):
            stage.fleet.execute(Send(link=opened.link, command=bulky))
            await asyncio.sleep(0)
        stage.fleet.execute(Send(link=quick_number, command=Shutdown(reason="now")))
        assert decode((await quick.receive()).data, DOWNWARD) == Shutdown(reason="now")
        assert await stage.inbox.get() == LinkClosed(link=opened.link)
        assert stage.fleet.links_too_slow >= 1
        assert stage.fleet.open_links == 1
        writer.close()

    play(scene)


def test_closing_the_fleet_says_going_away() -> None:
    """A sidecar that takes a planned stop for an error alarms people for nothing."""

    async def scene(stage: Stage) -> None:
        link, _ = await stage.join()
        receiving = asyncio.ensure_future(link.receive())
        await stage.fleet.close()
        assert (await receiving).data == aiohttp.WSCloseCode.GOING_AWAY
        assert await stage.fleet.wait_empty(DEADLINE_S)

    play(scene)


async def raw_join(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Present a node over a bare socket that will read nothing and answer no ping."""
    bare = sockets.socket()
    bare.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    bare.setblocking(False)
    await asyncio.get_running_loop().sock_connect(bare, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=bare, limit=1024)
    writer.write(
        f"GET {UPLINK_PATH} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    payload = encode(replace(HELLO, node="stuck"))
    header = bytes([0x81, 0x80 | 126]) + len(payload).to_bytes(2, "big") + bytes(4)
    writer.write(header + payload)
    await writer.drain()
    return reader, writer
