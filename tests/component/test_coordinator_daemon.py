"""The coordinator as a process: real sockets, real signals, a real journal."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.api import (
    DOWNWARD,
    PROTOCOL_VERSION,
    UPLINK_PATH,
    AgentState,
    Downward,
    Hello,
    RankStatus,
    Shutdown,
    Start,
    StatusReport,
    Welcome,
)
from sidecar.codec import decode, encode
from sidecar.config import NodeConfig
from sidecar.daemon import run_sidecar

pytestmark = pytest.mark.component

DEADLINE_S = 60.0
OUTRIDER = [sys.executable, "-m", "coordinator.cli"]
FIRST_LINE = "outrider: coordinator listening on "


def coordinator(state_dir: Path, *options: str) -> list[str]:
    """Return the command that serves job ``job``; later options win over earlier ones."""
    job = ("--job", "job", "--nnodes", "1", "--port", "0", "--linger", "0.5")
    return [*OUTRIDER, "coordinator", *job, "--state-dir", str(state_dir), *options]


def finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end."""
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


class Process:
    """One coordinator process and how to talk to it."""

    def __init__(self, state_dir: Path, *options: str) -> None:
        self.state_dir = state_dir
        self.popen = subprocess.Popen(
            coordinator(state_dir, *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line.startswith(FIRST_LINE):
            pytest.fail(f"first line {line!r}, then {self.popen.communicate()[1]}")
        self.url = line.removeprefix(FIRST_LINE).strip()

    def get(self, path: str) -> Any:
        """Return the JSON at ``path``."""
        with urllib.request.urlopen(self.url + path, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    def shows(self, **expected: Any) -> None:
        """Wait until the job has these values."""
        deadline = time.monotonic() + DEADLINE_S
        while {name: (job := self.get("/v1/job"))[name] for name in expected} != expected:
            assert time.monotonic() < deadline, job
            time.sleep(0.02)

    def ended(self) -> tuple[int, str]:
        """Wait for the end; return exit status and standard error."""
        _, errors = self.popen.communicate(timeout=DEADLINE_S)
        return self.popen.returncode, errors


@contextmanager
def served(state_dir: Path, *options: str) -> Iterator[Process]:
    """Run a coordinator on a free port and end it afterwards."""
    process = Process(state_dir, *options)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


class Node:
    """A sidecar's side of the conversation, played by hand."""

    def __init__(self, link: aiohttp.ClientWebSocketResponse) -> None:
        self.link = link

    async def hello(self) -> None:
        """Present node ``a``."""
        await self.link.send_bytes(
            encode(
                Hello(
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
            )
        )
        assert isinstance(await self.hear(Welcome), Welcome)

    async def report(self, state: AgentState, generation: int, step: int | None = None) -> None:
        """Say what node ``a`` is."""
        running = state is AgentState.RUNNING
        await self.link.send_bytes(
            encode(
                StatusReport(
                    node="a",
                    incarnation="1",
                    state=state,
                    generation=generation,
                    stopped_generation=0,
                    topology_version=generation,
                    rendezvous_port=29500,
                    group_rank=0 if generation else None,
                    ranks=(RankStatus(rank=0, local_rank=0, pid=1, step=step),) if running else (),
                )
            )
        )

    async def hear(self, kind: type[Downward]) -> Any:
        """Return the next message of ``kind``."""
        while True:
            frame = await self.link.receive()
            assert frame.type is aiohttp.WSMsgType.TEXT, frame
            message = decode(frame.data, DOWNWARD)
            if isinstance(message, kind):
                return message


@contextmanager
def exclusive_port() -> Iterator[int]:
    """Hold a port that nobody else can listen on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def test_a_job_is_started_finished_and_reported_by_the_exit_status(tmp_path: Path) -> None:
    """A scheduler that reads the wrong status runs a finished job again."""

    async def scene(process: Process) -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.ws_connect(process.url + UPLINK_PATH) as link,
        ):
            node = Node(link)
            await node.hello()
            await node.report(AgentState.READY, 0)
            start = await node.hear(Start)
            assert (start.generation, start.group_rank, start.nnodes) == (1, 0, 1)
            await node.report(AgentState.RUNNING, 1, step=3)
            await node.report(AgentState.COMPLETED, 1)
            assert (await node.hear(Shutdown)).exit_code == 0
            job = await asyncio.to_thread(process.get, "/v1/job")
            assert (job["phase"], job["generation"]) == ("completed", 1)

    with served(tmp_path) as process:
        asyncio.run(scene(process))
        status, errors = process.ended()
    assert status == 0, errors
    assert "completed" in errors
    assert not (tmp_path / "coordinator.url").exists()


def test_a_killed_coordinator_goes_on_with_what_it_had_told(tmp_path: Path) -> None:
    """One that starts again from zero hands out a generation that still runs."""

    async def begin(process: Process) -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.ws_connect(process.url + UPLINK_PATH) as link,
        ):
            node = Node(link)
            await node.hello()
            await node.report(AgentState.READY, 0)
            assert (await node.hear(Start)).generation == 1
            await node.report(AgentState.RUNNING, 1, step=1)
            await asyncio.to_thread(process.shows, phase="running")
            os.kill(process.popen.pid, signal.SIGKILL)

    async def go_on(process: Process) -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            aiohttp.ClientSession() as session,
            session.ws_connect(process.url + UPLINK_PATH) as link,
        ):
            node = Node(link)
            await node.hello()
            await node.report(AgentState.RUNNING, 1, step=9)
            await asyncio.to_thread(
                process.shows, step=9, phase="running", generation=1, world=["a"]
            )
            assert process.get("/v1/incidents") == {"incidents": []}

    with served(tmp_path) as process:
        asyncio.run(begin(process))
        assert process.ended()[0] == -signal.SIGKILL
    with served(tmp_path) as process:
        asyncio.run(go_on(process))


def test_the_ledger_goes_on_over_a_restart_and_adds_up(tmp_path: Path) -> None:
    """A job of weeks whose coordinator moved once would begin to count anew."""

    def ledger(process: Process) -> dict[str, Any]:
        found: dict[str, Any] = process.get("/v1/ledger")
        booked = sum(found["accounts_s"].values())
        assert booked + found["held_s"] == pytest.approx(found["wall_s"], abs=1e-3)
        return found

    with served(tmp_path) as process:
        process.shows(phase="waiting_for_nodes")
        before = ledger(process)
        process.popen.send_signal(signal.SIGTERM)
        assert process.ended()[0] == 0
    with served(tmp_path) as process:
        process.shows(phase="waiting_for_nodes")
        after = ledger(process)
    assert after["begun_ns"] == before["begun_ns"]
    assert after["wall_s"] > before["wall_s"]
    assert after["accounts_s"]["waiting_for_node"] >= before["accounts_s"]["waiting_for_node"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_cleanly_and_leaves_the_journal(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Ctrl-C that hangs is followed by kill -9, and that by guessing."""
    with served(tmp_path) as process:
        assert (tmp_path / "coordinator.url").read_text() == process.url + "\n"
        process.popen.send_signal(number)
        ended, errors = process.ended()
    assert ended == status
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "journal.sqlite",
        "journal.sqlite.lock",
    ]


def test_the_job_is_stopped_by_a_person_through_the_command(tmp_path: Path) -> None:
    """The person at three in the morning has this command and nothing else."""
    with served(tmp_path) as process:
        target = ["--coordinator", process.url]
        order = finished([*OUTRIDER, "stop", *target, "--why", "budget"])
        assert (order.returncode, order.stderr) == (0, "")
        status, errors = process.ended()
    assert status == 0
    assert "the job stopped: " in errors
    assert "asked to stop: budget" in errors


def test_the_token_opens_and_its_absence_closes(tmp_path: Path) -> None:
    """A token that is not checked is worse than none, because people rely on it."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with served(tmp_path / "state", "--token-file", str(token)) as process:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            process.get("/v1/job")
        asked = [*OUTRIDER, "status", "--coordinator", process.url, "--json"]
        refused = finished(asked)
        assert refused.returncode == 2
        assert "give --token-file" in refused.stderr
        allowed = finished([*asked, "--token-file", str(token)])
        assert json.loads(allowed.stdout)["job"]["job"] == "job"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "give --token-file"),
        (["--host", "192.0.2.1", "--allow-insecure-bind"], "give an address of this machine"),
        (["--token-file", "/nonexistent"], "cannot be read"),
        (["--job-spec", "/nonexistent.yaml"], "cannot be read"),
        (["--nnodes", "0"], "neither N nor N:MAX"),
        (["--nnodes", "4:2"], "MAX is smaller"),
        (["--job", "a/b"], "name"),
        (["--bogus"], "--bogus"),
        (["--port", "99999"], "a port from 0"),
        (["--host", "a..b"], "has a part that is empty"),
        (["--host", "h" * 64, "--allow-insecure-bind"], "longer than 63 characters"),
        (["--host", ""], "--host '' is not a host's name"),
        (["--host", "\x01\u00e9"], "--host '\\x01\\xe9' is not a host's name"),
        (["--host", "nobody.invalid", "--allow-insecure-bind"], "Name or service not known"),
        (["--state-dir", ""], "--state-dir: the path is empty"),
        (["--offenders", ""], "--offenders: the path is empty"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(
    tmp_path: Path, options: list[str], words: str
) -> None:
    """A traceback tells a person nothing about what to change."""
    ended = finished(coordinator(tmp_path, *options))
    assert ended.returncode == 2
    assert ended.stderr.startswith("outrider: error: ")
    assert ended.stderr.count("\n") == 1
    assert words in ended.stderr


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    """The most common mistake of all."""
    with exclusive_port() as port:
        ended = finished(coordinator(tmp_path, "--port", str(port)))
    assert ended.returncode == 2
    assert f"port {port} on 127.0.0.1 is taken" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_second_coordinator_of_the_same_state_is_refused(tmp_path: Path) -> None:
    """Two that decide for one job give out the same ranks twice."""
    with served(tmp_path):
        ended = finished(coordinator(tmp_path))
    assert ended.returncode == 2
    assert "in use by another coordinator" in ended.stderr


def test_it_writes_nothing_but_its_state_directory(tmp_path: Path) -> None:
    """A read-only container is where it runs in production."""
    home = tmp_path / "home"
    home.mkdir()
    state = tmp_path / "state"
    process = subprocess.Popen(
        coordinator(state),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=home,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(Path.cwd())},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(FIRST_LINE)
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    process.stdout.close()
    assert list(home.iterdir()) == []


def test_a_job_that_nothing_has_stopped_has_no_last_incident(tmp_path: Path) -> None:
    """The first thing that people try must tell them that there is nothing to tell."""
    with served(tmp_path / "state") as process:
        asked = ("--coordinator", process.url)
        for form in ([], ["--json"], ["--markdown"]):
            told = finished([*OUTRIDER, "explain", "last", *asked, *form])
            assert (told.returncode, told.stdout) == (2, "")
            assert told.stderr.startswith("outrider: error: ")
            assert told.stderr.count("\n") == 1
            assert "incident" in told.stderr
        assert "nothing has stopped the job" in finished([*OUTRIDER, "incidents", *asked]).stdout
    kept = finished([*OUTRIDER, "explain", "--state-dir", str(tmp_path / "state")])
    assert (kept.returncode, kept.stderr) == (2, told.stderr)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"host": "a b"}, "the sidecar's host cannot be used: 'a b'"),
        ({"labels": {"rack": "\x1b[2J"}}, "the sidecar's labels cannot be used"),
        ({"node_name": "../n0"}, "the sidecar's node name cannot be used: '../n0'"),
    ],
)
def test_a_sidecar_that_presents_itself_oddly_is_told_why_and_ends(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    odd: dict[str, Any],
    words: str,
) -> None:
    """A sidecar of another version may let through what the coordinator cannot use."""
    script = tmp_path / "train.py"
    script.write_text("")

    async def scene(url: str) -> int:
        fields = {"node_name": "n0", "job": "job", "coordinator": url, "command": (str(script),)}
        places = {"host": "127.0.0.1", "http_port": 0, "run_dir": str(tmp_path / "run")}
        config = NodeConfig(**{**fields, **places, **odd}, warm_workers=False)
        async with asyncio.timeout(DEADLINE_S):  # `output` is given: nothing checks it before
            return await run_sidecar(config, asyncio.Event(), output=tmp_path / "out")

    with served(tmp_path / "state") as process:
        assert asyncio.run(scene(process.url)) == 1
        assert process.get("/v1/nodes") == {"nodes": []}
    refusals = [it.getMessage() for it in caplog.records if "refuses this" in it.getMessage()]
    assert len(refusals) == 1
    assert words in refusals[0]
    assert "start it with another --" in refusals[0]
    assert not [it for it in caplog.records if it.exc_info]
