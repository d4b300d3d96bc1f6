"""The workers' socket with real Unix connections and real peer credentials."""

import asyncio
import json
import os
import socket
import stat
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from sidecar.events import WorkerSpoke
from sidecar.workers.ipc_server import (
    MESSAGES_BURST_MAX,
    SocketPathError,
    WorkerServer,
)
from worker_shim.client import Client as WorkerClient
from worker_shim.framing import FRAME_BYTES_MAX, Decoder, encode
from worker_shim.messages import (
    Ack,
    CheckpointSaved,
    Envelope,
    Heartbeat,
    Init,
    JobFault,
    RestartMode,
    worker_frame,
)
from worker_shim.session import Outbox

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
ENVELOPE = Envelope(client_id="c", seq=7, generation=3)


@dataclass(frozen=True)
class Worker:
    generation: int = 3
    local_rank: int = 1
    born: int = 3


class Served:
    """A running server that takes this process for local rank 1 of generation 3."""

    def __init__(self, path: Path, pid: int | None = None) -> None:
        self.spoken: list[WorkerSpoke] = []
        self.pid = os.getpid() if pid is None else pid
        self.server = WorkerServer(
            path, lambda pid: Worker() if pid == self.pid else None, self._put
        )

    def _put(self, event: WorkerSpoke) -> None:
        self.spoken.append(event)
        self.server.send(event.connection, Ack(reply_to=event.envelope.seq))

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()

    async def connect(self) -> "Client":
        return Client(*await asyncio.open_unix_connection(str(self.server.path)))


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.decoder = reader, writer, Decoder()

    async def ask(self, data: bytes) -> dict | None:
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> dict | None:
        """Return the next reply, None when the server closed the connection."""
        while True:
            data = await asyncio.wait_for(self.reader.read(65536), PATIENCE_S)
            if not data:
                return None
            if frames := self.decoder.feed(data):
                (frame,) = frames
                return frame


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def said(message: object, **envelope: object) -> bytes:
    fields = {"client_id": "c", "seq": 7, "generation": 3, **envelope}
    return encode(worker_frame(message, Envelope(**fields)))


def test_a_workers_message_reaches_the_core_and_its_answer_comes_back(tmp_path):
    """Nothing that a worker knows would reach the job."""

    async def scenario() -> None:
        async with Served(tmp_path / "s") as served:
            client = await served.connect()
            message = CheckpointSaved(local_rank=1, prefix="model", step=40, path="/c/40")
            assert await client.ask(said(message)) == {"type": "ack", "reply_to": 7}
            assert [(e.envelope, e.message) for e in served.spoken] == [(ENVELOPE, message)]
            fault = JobFault(local_rank=1, reason="r", restart_mode=RestartMode.JOB)
            await client.ask(said(fault))
            assert served.spoken[1].message == fault
            assert served.server.messages == {"ckpt_info_update": 1, "job_fault": 1}

    asyncio.run(scenario())


def test_a_client_of_the_hyperpod_agent_is_understood(tmp_path):
    """A script that reports checkpoints to that agent would have to be changed."""

    async def scenario() -> None:
        async with Served(tmp_path / "s") as served:
            client = await served.connect()
            body = {"type": "init", "client_id": "uuid", "local_rank": 1}
            assert (await client.ask(frame(json.dumps(body).encode())))["type"] == "ack"
            assert served.spoken[0].message == Init(local_rank=1, pid=0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(b""), "empty"),
        (frame(b"\xff\xfe"), "not UTF-8"),
        (frame(b"[1, 2]"), "not an object"),
        (frame(b"{nonsense"), "not JSON"),
        pytest.param(frame(b"\xff"), "not UTF-8", id="C74-one-byte"),
        pytest.param(frame(b'{"loss": NaN}'), "not finite", id="C74-nan"),
        pytest.param(frame(b'{"step": 1e999}'), "not finite", id="C74-huge"),
        pytest.param(frame(b'{"step": 1, "step": 2}'), "stands twice", id="C74-twice"),
        pytest.param(frame(b"[" * 100_000), "not JSON: RecursionError", id="C74-nested"),
        pytest.param(
            frame(b'{"a":' * 900 + b"1" + b"}" * 900), "Recursion limit", id="C74-nested-less"
        ),
        pytest.param(
            frame(
                b'{"type": "job_fault", "client_id": "c", "seq": 7, "local_rank": 1,'
                b' "reason": "\\ud800"}'
            ),
            "surrogates not allowed",
            id="C74-half-a-character",
        ),
        pytest.param(
            frame(
                b'{"type": "ckpt_info_update", "client_id": "c", "seq": 7, "local_rank": 1,'
                b' "prefix": "p", "path": "/c", "step": 1180591620717411303424}'
            ),
            "exceeds 64-bit",
            id="C74-wide",
        ),
        (frame(b'{"type": "no_such_thing"}'), "unknown type"),
        (frame(b'{"type": ["init"]}'), "unknown type"),
        (frame(b'{"type": "heartbeat", "client_id": "c"}'), "local_rank"),
        (frame(b'{"type": "heartbeat", "client_id": "c", "local_rank": "1"}'), "local_rank"),
        (
            frame(
                b'{"type": "job_fault", "client_id": "c", "local_rank": 1, "reason": "r",'
                b' "restart_mode": "magic"}'
            ),
            "restart_mode",
        ),
        (said(Heartbeat(local_rank=0)), "local rank 1 and may not speak for local rank 0"),
        (said(Heartbeat(local_rank=1), generation=2), "belongs to generation 3"),
    ],
)
def test_what_cannot_be_accepted_is_answered_counted_and_stops_nothing(tmp_path, data, words):
    """One bad frame would silence a node's checkpoints for the rest of the job."""

    async def scenario() -> None:
        async with Served(tmp_path / "s") as served:
            client = await served.connect()
            answer = await client.ask(data)
            assert answer["type"] == "error"
            assert words in answer["reason"]
            assert served.server.errors.total() == 1
            assert served.spoken == []
            assert (await client.ask(said(Heartbeat(local_rank=1))))["type"] == "ack"

    asyncio.run(scenario())


def test_a_frame_above_the_limit_ends_its_connection_and_no_other(tmp_path):
    """A runaway client could fill the sidecar's memory, or take the socket down for all."""

    async def scenario() -> None:
        async with Served(tmp_path / "s") as served:
            bad, good = await served.connect(), await served.connect()
            answer = await bad.ask(struct.pack(">I", FRAME_BYTES_MAX + 1))
            assert "above the limit" in answer["reason"]
            assert await bad.answer() is None
            assert (await good.ask(said(Heartbeat(local_rank=1))))["type"] == "ack"

    asyncio.run(scenario())


def test_c72_a_frame_that_stops_half_way_is_waited_for_and_its_rest_completes_it(tmp_path):
    """Whatever is read as the next length is garbage, and so is every one after it."""

    async def scenario() -> None:
        async with Served(tmp_path / "s") as served:
            slow, other = await served.connect(), await served.connect()
            whole = said(JobFault(local_rank=1, reason="r" * 200))
            slow.writer.write(whole[:44])
            for _ in range(5):  # the slow one holds up nobody
                assert (await other.ask(said(Heartbeat(local_rank=1))))["type"] == "ack"
                await asyncio.sleep(0.05)
            assert served.server.messages == {"heartbeat": 5}
            assert await slow.ask(whole[44:]) == {"type": "ack", "reply_to": 7}
            assert await slow.ask(said(Heartbeat(local_rank=1), seq=8)) == {
                "type": "ack",
                "reply_to": 8,
            }
            assert served.server.messages["job_fault"] == 1
            assert served.server.errors.total() == 0

    asyncio.run(scenario())


def test_a_process_that_is_no_worker_may_not_speak(tmp_path):
    """Anybody on the node could fake a fault and stop the job."""

    async def scenario() -> None:
        async with Served(tmp_path / "s", pid=1) as served:
            client = await served.connect()
            answer = await client.answer()
            assert "is not a worker" in answer["reason"]
            assert await client.answer() is None
            assert served.spoken == []

    asyncio.run(scenario())


def test_a_chatterbox_is_slowed_down_and_every_message_still_counts(tmp_path):
    """A loop in one rank would crowd out the other ranks' faults."""

    async def scenario() -> None:
        async with Served(tmp_path / "s") as served:
            client = await served.connect()
            count = MESSAGES_BURST_MAX + 40
            client.writer.write(said(Heartbeat(local_rank=1)) * count)
            while len(served.spoken) < MESSAGES_BURST_MAX:  # noqa: ASYNC110 - the world changes
                await asyncio.sleep(0)
            assert len(served.spoken) < count
            async with asyncio.timeout(PATIENCE_S):
                while len(served.spoken) < count:  # noqa: ASYNC110 - same
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_client_that_dies_in_the_middle_of_a_frame_disturbs_nobody(tmp_path):
    """A SIGKILLed rank would take the node's socket with it."""

    async def scenario() -> None:
        async with Served(tmp_path / "s") as served:
            client = await served.connect()
            client.writer.write(said(Heartbeat(local_rank=1))[:9])
            client.writer.transport.abort()
            other = await served.connect()
            assert (await other.ask(said(Heartbeat(local_rank=1))))["type"] == "ack"
            assert served.server.send(999, Ack(reply_to=1)) is False

    asyncio.run(scenario())


def test_only_the_owner_may_open_the_socket_and_it_is_removed_afterwards(tmp_path):
    """Another user of the machine could speak, or a dead path would be left behind."""

    async def scenario() -> Path:
        async with Served(tmp_path / "s") as served:
            mode = served.server.path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
        return served.server.path

    assert not asyncio.run(scenario()).exists()


def test_a_path_that_the_system_cannot_hold_is_refused_with_the_way_out(tmp_path):
    """The first worker would fail instead, with "AF_UNIX path too long"."""
    with pytest.raises(SocketPathError, match="system allows 107; choose a shorter runDir"):
        WorkerServer(tmp_path / ("x" * 100), lambda _: None, lambda _: None)


def test_c69_the_socket_of_a_killed_sidecar_is_taken_over_and_that_of_a_live_one_is_not(tmp_path):
    """A node could not restart its sidecar, or two would fight for one set of workers."""
    path = tmp_path / "s"
    script = f"import socket; socket.socket(socket.AF_UNIX).bind({str(path)!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert path.exists()

    async def scenario() -> None:
        async with Served(path):
            with pytest.raises(SocketPathError, match="another sidecar listens"):
                await Served(path).server.start()
            assert path.exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_c69_what_is_no_socket_is_never_removed(tmp_path, kind):
    """A run directory that was chosen wrongly would cost somebody a file."""
    path, target = tmp_path / "s", tmp_path / "kept"
    target.write_text("data")
    match kind:
        case "file":
            path.write_text("data")
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(target)

    async def scenario() -> None:
        with pytest.raises(SocketPathError, match="is no socket; move it away, or choose another"):
            await Served(path).server.start()

    before = path.lstat()
    asyncio.run(scenario())
    assert path.lstat() == before
    assert target.read_text() == "data"


def test_c69_a_socket_that_took_this_ones_place_outlives_it(tmp_path):
    """A sidecar that ends late would cut its successor off from all its workers."""
    path = tmp_path / "s"

    async def scenario() -> None:
        first, second = Served(path), Served(path)
        await first.server.start()
        path.unlink()  # a clean-up of old files
        async with second:
            await first.server.close()
            client = await second.connect()
            assert (await client.ask(said(Heartbeat(local_rank=1))))["type"] == "ack"

    asyncio.run(scenario())
    assert not path.exists()


@pytest.mark.parametrize("size", [108, 130, 4000])
def test_c67_a_worker_whose_sockets_path_is_too_long_says_so_and_trains_on(size, tmp_path):
    """A path cut to what fits would lead to another job's sidecar."""
    path = tmp_path / "pods" / ("x" * size)
    short = tmp_path / "pods" / ("x" * (107 - len(str(tmp_path / "pods" / "x")) + 1))
    outbox = Outbox(client_id="c", generation=3, local_rank=1, pid=os.getpid())

    async def scenario() -> None:
        short.parent.mkdir()
        async with Served(short) as served:
            assert len(os.fsencode(short)) == 107
            client = WorkerClient(str(path), outbox, lambda _: 1.0)
            client.start()
            reason = await asyncio.to_thread(client.first_contact, PATIENCE_S)
            client.close(0.1)
            client.release()
            assert reason == "AF_UNIX path too long"
            assert served.spoken == []
            assert await (await served.connect()).ask(said(Heartbeat(local_rank=1)))

    asyncio.run(scenario())


def test_blocking_clients_get_their_answers_too(tmp_path):
    """The worker's library is not asynchronous."""

    async def scenario() -> None:
        async with Served(tmp_path / "s") as served:

            def talk() -> bytes:
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(PATIENCE_S)
                    client.connect(str(served.server.path))
                    client.sendall(said(Heartbeat(local_rank=1)))
                    return client.recv(4096)

            assert b'"ack"' in await asyncio.to_thread(talk)

    asyncio.run(scenario())
