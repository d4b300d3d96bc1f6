"""The uplink against a real WebSocket server on a loopback port."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from aiohttp import WSMsgType, web

from sidecar.access import Access
from sidecar.api import (
    UPLINK_PATH,
    UPWARD,
    AgentState,
    Goodbye,
    Hello,
    ProgressReport,
    Shutdown,
    StatusReport,
    Welcome,
)
from sidecar.codec import decode, encode
from sidecar.events import CommandReceived, UplinkOpened
from sidecar.uplink import ANSWERS_MAX, Uplink

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
HELLO = Hello(
    protocol=1,
    agent_version="0",
    job="job",
    node="n1",
    incarnation="i",
    host="127.0.0.1",
    http_port=1,
    nproc_per_node=1,
    spare=False,
)


def status(generation: int) -> StatusReport:
    return StatusReport(
        node="n1",
        incarnation="i",
        state=AgentState.READY,
        generation=generation,
        stopped_generation=0,
        topology_version=0,
        rendezvous_port=1,
    )


class Heard:
    def __init__(self) -> None:
        self.events: list = []
        self.reason: str | None = None

    def put(self, event: object) -> None:
        self.events.append(event)

    def dismissed(self, reason: str) -> None:
        self.reason = reason


class Coordinator:
    """Welcomes, keeps what it is told, and can answer with something else first."""

    def __init__(self) -> None:
        self.told: list = []
        self.sockets: list[web.WebSocketResponse] = []
        self.tokens: list[str | None] = []
        self.answer: Welcome | Goodbye = Welcome(job="job", heartbeat_s=2.0)
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.tokens.append(request.headers.get("Authorization"))
        self.sockets.append(socket)
        async for frame in socket:
            assert frame.type is WSMsgType.TEXT
            message = decode(frame.data, UPWARD)
            self.told.append(message)
            if isinstance(message, Hello):
                await socket.send_str(encode(self.answer).decode())
        return socket

    async def open(self) -> None:
        app = web.Application()
        app.router.add_get(UPLINK_PATH, self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        for socket in self.sockets:
            await socket.close()
        self.sockets.clear()
        await self._runner.cleanup()


@contextlib.asynccontextmanager
async def dialled(coordinator: Coordinator, token: str | None = None) -> AsyncIterator:
    heard = Heard()
    uplink = Uplink(f"http://127.0.0.1:{coordinator.port}/", HELLO, heard, Access(token))
    task = asyncio.create_task(uplink.run())
    try:
        yield uplink, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the world changes, nobody tells us
            await asyncio.sleep(0.01)


def test_the_core_hears_of_the_welcome_and_of_every_command():
    """A node would stay idle while its job waits for it."""

    async def scenario() -> None:
        coordinator = Coordinator()
        await coordinator.open()
        async with dialled(coordinator, token="secret") as (uplink, heard):
            await until(lambda: heard.events)
            assert heard.events == [UplinkOpened(heartbeat_s=2.0)]
            assert coordinator.told == [HELLO]
            assert coordinator.tokens == ["Bearer secret"]
            (socket,) = coordinator.sockets
            await socket.send_str('{"type": "from_the_future"}')
            command = Shutdown(reason="done")
            await socket.send_str(encode(command).decode())
            await until(lambda: len(heard.events) == 2)
            assert heard.events[1] == CommandReceived(command=command)
            uplink.report(status(1))
            await until(lambda: status(1) in coordinator.told)
        await coordinator.close()

    asyncio.run(scenario())


def test_a_coordinator_that_comes_back_hears_the_latest_status_only():
    """It would act on a state that was over long ago, or wait for one that was lost."""

    async def scenario() -> None:
        coordinator = Coordinator()
        await coordinator.open()
        async with dialled(coordinator) as (uplink, heard):
            await until(lambda: uplink.connected)
            await coordinator.close()
            await until(lambda: not uplink.connected)
            for generation in range(1, 50):
                uplink.report(status(generation))
            coordinator.told.clear()
            await coordinator.open()
            await until(lambda: len(coordinator.told) == 2)
            assert coordinator.told == [HELLO, status(49)]
            assert heard.events == [UplinkOpened(heartbeat_s=2.0)] * 2
            report = ProgressReport(round_id=1, node="n1", ranks=())
            uplink.report(report)
            await until(lambda: report in coordinator.told)
        await coordinator.close()

    asyncio.run(scenario())


def test_an_unreachable_coordinator_is_mentioned_once_and_dialled_again(caplog):
    """A person would see nothing at all, or a line for each of a thousand tries."""

    async def scenario() -> None:
        coordinator = Coordinator()
        await coordinator.open()
        await coordinator.close()
        with caplog.at_level(logging.WARNING, logger="sidecar.uplink"):
            async with dialled(coordinator) as (uplink, _):
                await until(lambda: uplink._tries >= 3)
                (record,) = caplog.records
                url = f"http://127.0.0.1:{coordinator.port}"
                assert f"cannot reach the coordinator at {url}, retrying" in record.message
                await coordinator.open()
                await until(lambda: uplink.connected)
        await coordinator.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("retry", [True, False])
def test_a_goodbye_ends_the_dialling_only_when_it_says_so(retry):
    """A node with the wrong job would dial for ever, or one that was early would give up."""

    async def scenario() -> None:
        coordinator = Coordinator()
        coordinator.answer = Goodbye(reason="unknown job", retry=retry)
        await coordinator.open()
        async with dialled(coordinator) as (uplink, heard):
            if retry:
                await until(lambda: len(coordinator.told) >= 2)
                assert heard.reason is None
            else:
                await until(lambda: heard.reason)
                assert heard.reason == "unknown job"
                assert len(coordinator.told) == 1
            assert not uplink.connected
            assert heard.events == []
        await coordinator.close()

    asyncio.run(scenario())


def test_c85_a_fleet_that_lost_its_coordinator_comes_back_spread_out():
    """A coordinator that is back would be dialled by every node in the same instant, and fall."""
    nodes, outage_s, slots_a_second = 1000, 60, 5
    random.seed(85)
    dials = [0] * (outage_s * slots_a_second)
    for _ in range(nodes):
        uplink = Uplink("http://127.0.0.1:1", HELLO, Heard())
        at_s = uplink._pause_s()
        while at_s < outage_s:
            dials[int(at_s * slots_a_second)] += 1
            at_s += uplink._pause_s()
    mean = sum(dials) / len(dials)
    assert max(dials) < 3 * mean
    assert max(dials[:slots_a_second]) < 3 * mean  # the first tries, and those after a welcome
    assert sum(dials) / nodes < outage_s  # and nobody dials without pause


def test_c85_answers_of_the_outage_are_kept_up_to_a_limit():
    """A long outage would fill the sidecar's memory."""

    async def scenario() -> None:
        coordinator = Coordinator()
        await coordinator.open()
        await coordinator.close()
        async with dialled(coordinator) as (uplink, _):
            await until(lambda: uplink._tries)
            for number in range(10 * ANSWERS_MAX):
                uplink.report(ProgressReport(round_id=number, node="n1", ranks=()))
                uplink.report(status(number))
            assert len(uplink._answers) == ANSWERS_MAX
            await coordinator.open()
            await until(lambda: coordinator.told[1:])
            assert coordinator.told == [HELLO, status(10 * ANSWERS_MAX - 1)]
        await coordinator.close()

    asyncio.run(scenario())


def test_a_status_above_the_limit_is_cut_and_heard(caplog):
    """A node whose every message is refused is lost, and its job with it."""

    async def scene() -> None:
        coordinator = Coordinator()
        await coordinator.open()
        cuts: list[int] = []
        uplink = Uplink(
            f"http://127.0.0.1:{coordinator.port}/",
            HELLO,
            Heard(),
            Access(),
            lambda: cuts.append(1),
        )
        task = asyncio.create_task(uplink.run())
        try:
            uplink.report(replace(status(3), message="x" * (9 << 20)))
            await until(lambda: len(coordinator.told) > 1)
            assert coordinator.told[1].generation == 3
            assert len(coordinator.told[1].message) < 1000
            assert len(cuts) == 1
            assert uplink.connects == 1
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await coordinator.close()

    asyncio.run(scene())
    assert "left out" in caplog.text


def test_connections_that_are_lost_as_soon_as_they_are_made_are_dialled_ever_more_slowly(
    monkeypatch,
):
    """A thousand sidecars that are each hung up on would dial a thousand times a second."""

    async def scene() -> None:
        coordinator = Coordinator()
        await coordinator.open()
        drawn: list[float] = []

        def longest(least: float, most: float) -> float:
            drawn.append(most)
            return 0.0

        monkeypatch.setattr(random, "uniform", longest)
        async with dialled(coordinator):
            for number in range(1, 5):
                await until(lambda wanted=number: len(drawn) >= wanted or coordinator.sockets)
                while len(drawn) < number:
                    for socket in coordinator.sockets:
                        await socket.close()
                    coordinator.sockets.clear()
                    await asyncio.sleep(0.01)
        assert drawn[:4] == [1.5, 3.0, 5.0, 5.0]
        await coordinator.close()

    asyncio.run(scene())
