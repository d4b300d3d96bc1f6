"""A whole sidecar over its real HTTP API: an HTTP client written for the HyperPod agent."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sidecar.config import GpuAddress, NodeConfig
from sidecar.daemon import SidecarError, run_sidecar
from sidecar.workers.processes import GONE, process_state

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
JOB = f"job-{os.getpid()}"
REPOSITORY = Path(__file__).parents[2]
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
START = {
    "rank": 0,
    "nnodes": 1,
    "faultCount": 0,
    "master_addr": "127.0.0.1",
    "master_port": "29500",
    "rankIps": [{"rank": 0, "ip": "127.0.0.1"}],
    "ipVersion": "7",
}


class Node:
    """A running sidecar and a client for it."""

    def __init__(self, base: str, session: aiohttp.ClientSession) -> None:
        self._base, self._session = base, session
        self.port = int(base.rpartition(":")[2])

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        if body is not None:
            options["json"] = body
        async with self._session.post(self._base + path, **options) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self._session.get(self._base + path, **options) as answer:
            return answer.status, await answer.json()

    async def text(self, path: str) -> str:
        async with self._session.get(self._base + path) as answer:
            assert answer.status == 200
            return await answer.text()

    async def until(self, state: str) -> dict:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                _, status = await self.get("/status")
                if status["status"] == state:
                    return status
                await asyncio.sleep(0.01)


def config_of(tmp_path: Path, script: str, **changes: Any) -> NodeConfig:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fields = {
        "node_name": "n0",
        "job": JOB,
        "coordinator": "http://127.0.0.1:1",
        "command": (str(path),),
        "host": "127.0.0.1",
        "http_port": port,
        "log_dir": str(tmp_path / "logs"),
        "run_dir": str(tmp_path / "run"),
        "kernel_log": str(tmp_path / "kernel.log"),
    }
    return NodeConfig(**{**fields, **changes})


def pages() -> list[Path]:
    """Return the progress pages of this test process's job that are in shared memory."""
    return list(Path("/dev/shm").glob(f"outrider-{JOB}-n0-*"))


@contextlib.asynccontextmanager
async def serving(config: NodeConfig) -> AsyncIterator[tuple[Node, "asyncio.Task[int]"]]:
    stop = asyncio.Event()
    running = asyncio.create_task(run_sidecar(config, stop))
    base = f"http://127.0.0.1:{config.http_port}"
    async with aiohttp.ClientSession() as session:
        node = Node(base, session)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(aiohttp.ClientConnectionError):
                        if (await node.get("/healthz"))[0] == 200:
                            break
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.01)
            yield node, running
        finally:
            stop.set()
            await asyncio.wait_for(running, PATIENCE_S)


async def bytes_to(port: int, line: bytes, *headers: bytes, body: bytes = b"") -> list[bytes]:
    """Return head and body of the answer to a request that no client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [line + b" HTTP/1.1", b"Host: localhost", b"Connection: close", *headers]
    writer.write(b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body]))
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    return answer.split(b"\r\n\r\n", 1)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers import the shim without an installation."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def run(config: NodeConfig, scenario: Callable) -> None:
    async def main() -> None:
        async with serving(config) as (node, running):
            await scenario(node, running)

    asyncio.run(main())


def test_a_hyperpod_client_starts_stops_and_starts_again(tmp_path):
    """An operator that works with that agent could not drive this one."""

    async def scenario(node: Node, _: object) -> None:
        status = await node.until("ready")
        assert status["restartMode"] == "process_level_restart"
        assert status["spare"] == "False"
        assert status["agent_version"]
        code, _ = await node.post("/start", START)
        assert code == 200
        status = await node.until("running")
        assert status["assigned_rank"] == "0"
        assert status["ipversion"] == "7"
        assert set(status["transitions"]) == {"init", "ready", "running"}
        assert status["outrider"]["generation"] == 1
        pid = status["outrider"]["ranks"][0]["pid"]
        assert (await node.post("/update", START))[0] == 200
        assert (await node.post("/stop"))[0] == 200
        await node.until("ready")
        assert process_state(pid) == GONE
        assert (await node.post("/start", START))[0] == 200
        assert (await node.until("running"))["outrider"]["generation"] == 2

    run(config_of(tmp_path, SLEEP), scenario)


def test_a_crash_is_told_with_its_cause_and_its_last_words(tmp_path):
    """The person on call would learn that something failed, and not what."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        status = await node.until("faulted")
        assert status["reason"] == "WorkerCrash"
        assert "exit code 3" in status["message"]
        (fault,) = status["outrider"]["faults"]
        assert fault["exit"]["code"] == 3
        assert fault["evidence"] == ["what went wrong"]
        assert (await node.post("/stop", {"restart_mode": "plr"}))[0] == 200
        await node.until("ready")

    script = "import sys; print('what went wrong', file=sys.stderr); sys.exit(3)"
    run(config_of(tmp_path, script), scenario)


BLOCK = """
    import time
    import worker_shim
    worker_shim.attach()

    @worker_shim.restartable
    def train():
        while True:
            time.sleep(0.05)

    train()
    """


async def inside(node: Node) -> int:
    """Wait until the worker runs its block; return its pid."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, status = await node.get("/status")
            ranks = status["outrider"]["ranks"]
            if status["status"] == "running" and ranks and ranks[0]["restartable"]:
                assert status["restartMode"] == "in_process_restart"
                return ranks[0]["pid"]
            await asyncio.sleep(0.01)


PLAIN_CLIENT = """
    import json, os, socket, struct, sys, time

    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["OUTRIDER_WORKER_SOCKET"])
    head = {"client_id": "c", "local_rank": 0}

    def say(kind, **fields):
        data = json.dumps({"type": kind, **head, **fields}).encode()
        link.sendall(struct.pack(">I", len(data)) + data)

    def hear():
        size = struct.unpack(">I", link.recv(4, socket.MSG_WAITALL))[0]
        return json.loads(link.recv(size, socket.MSG_WAITALL))

    def until(kind):
        while (heard := hear())["type"] != kind:
            print(json.dumps(heard), flush=True)
        print(json.dumps(heard), flush=True)
        return heard

    say("init")
    while True:
        say("job_data", rank=0, data="my address")
        say("at_rcb_barrier")
        until("job_start")
        say("past_rcb_barrier")
        until("job_fault")
    """


def _output(tmp_path: Path) -> str:
    return "".join(it.read_text() for it in sorted(tmp_path.rglob("stdout.log")))


async def heard_by(tmp_path: Path, kind: str, count: int) -> list[dict[str, Any]]:
    """Wait until the plain client printed so many messages of a kind; return them."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            text = _output(tmp_path)
            lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            found = [line for line in lines if line["type"] == kind]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.02)


def test_a_client_of_the_other_protocol_is_told_its_new_place_while_it_waits(tmp_path):
    """Both ends speak only the HyperPod agent's words: an HTTP operator and a plain worker."""
    folder = tmp_path / "config"
    written = folder / "pod_resourceconfig.json"

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        await heard_by(tmp_path, "job_start", 1)
        await inside(node)
        await node.post("/stop")
        status = await node.until("ready")
        assert status["worker_data"] == {"0": "my address"}
        moved = {
            **START,
            "nnodes": 2,
            "rank": 1,
            "master_addr": "10.0.0.9",
            "ipVersion": "8",
            "rankIps": [{"rank": 0, "ip": "10.0.0.9"}, {"rank": 1, "ip": "127.0.0.1"}],
            "worker_data": {"0": "theirs"},
        }
        code, status = await node.post("/update", moved)
        assert (code, status["ipversion"], status["status"]) == (200, "8", "ready")
        table = json.loads(written.read_text())
        assert table["ips"] == ["10.0.0.9", "127.0.0.1"]
        assert (table["current_pod_ip"], table["ips_timestamp"]) == ("127.0.0.1", "8")
        (told,) = await heard_by(tmp_path, "job_rank_info", 1)
        assert (told["worker_envs"]["RANK"], told["worker_envs"]["WORLD_SIZE"]) == ("1", "2")
        assert told["aggregate_worker_data"]["aggregate_worker_data"] == {"0": "theirs"}
        code, _ = await node.post("/start", {**moved, "rankIps": []})
        assert code == 200
        started = (await heard_by(tmp_path, "job_start", 2))[-1]
        assert started["worker_envs"]["MASTER_ADDR"] == "10.0.0.9"
        assert started["aggregate_worker_data"]["rank_ips"] == ["10.0.0.9", "127.0.0.1"]
        late = {**moved, "base_topology_version": 1, "topology_version": 9}
        assert (await node.post("/update", late))[0] == 409

    run(config_of(tmp_path, PLAIN_CLIENT, resource_config_dir=str(folder)), scenario)


def test_a_worker_that_dies_at_the_barrier_gets_a_new_process_at_the_next_start(tmp_path):
    """The start would wait for ever for a process that is gone, or be given to its number."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        first = await inside(node)
        await node.post("/stop")
        status = await node.until("ready")
        assert status["outrider"]["ranks"][0]["at_barrier"]
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while status["status"] != "ready" or status["outrider"]["ranks"]:
                _, status = await node.get("/status")
                await asyncio.sleep(0.01)
        assert status["restartMode"] == "process_level_restart"
        assert (await node.post("/start", START))[0] == 200
        second = await inside(node)
        assert second != first
        assert process_state(first) in GONE
        assert process_state(second) not in GONE

    run(config_of(tmp_path, BLOCK), scenario)


def test_a_stop_without_a_mode_keeps_workers_that_have_a_barrier(tmp_path):
    """A client of the HyperPod agent names no mode in-process: its workers would all be killed."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        first = await inside(node)
        assert (await node.post("/stop"))[0] == 200
        await node.until("ready")
        assert process_state(first) not in GONE
        await node.post("/start", START)
        assert await inside(node) == first
        assert (await node.post("/stop", {"restart_mode": "plr"}))[0] == 200
        await node.until("ready")
        assert process_state(first) in GONE

    run(config_of(tmp_path, BLOCK), scenario)


def test_a_stop_without_a_mode_ends_workers_that_have_none(tmp_path):
    """They would run on beside those of the next start."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        status = await node.until("running")
        while not (ranks := status["outrider"]["ranks"]):
            _, status = await node.get("/status")
        assert (await node.post("/stop"))[0] == 200
        await node.until("ready")
        assert process_state(ranks[0]["pid"]) in GONE

    run(config_of(tmp_path, SLEEP), scenario)


def test_a_job_that_ends_well_is_completed_and_its_checkpoint_is_shown(tmp_path):
    """A finished job would be restarted, from the beginning."""
    script = """
        import worker_shim
        worker_shim.attach()
        worker_shim.checkpoint_saved(40, "/checkpoints/40", prefix="model")
        """

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        status = await node.until("completed")
        assert status["progress"] == {
            "model": {"progressCount": 40, "progressData": "/checkpoints/40"}
        }

    run(config_of(tmp_path, script), scenario)


def test_a_fault_in_the_output_and_in_the_kernel_log_is_seen(tmp_path):
    """A job that trains on garbage, or on a dying GPU, would go on."""
    script = """
        import time
        print("iter 12: loss nan, time 3.00ms", flush=True)
        time.sleep(600)
        """

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        status = await node.until("faulted")
        (fault,) = status["outrider"]["faults"]
        assert (fault["kind"], fault["step"]) == ("log_rule", 12)
        with (tmp_path / "kernel.log").open("a") as log:
            log.write("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
        faults = []
        async with asyncio.timeout(PATIENCE_S):
            while len(faults) < 2:
                _, status = await node.get("/status")
                faults = status["outrider"]["faults"]
        assert {(fault["kind"], fault["gpu"]) for fault in faults} == {
            ("log_rule", None),
            ("gpu_fatal", 0),
        }

    (tmp_path / "kernel.log").touch()
    gpus = (GpuAddress(index=0, pci="0000:3b:00"),)
    run(config_of(tmp_path, script, gpus=gpus), scenario)


def test_a_worker_that_the_kernel_killed_is_reported_with_its_killer(tmp_path):
    """A job that is too large for its nodes would be restarted on one after the other."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        running = await node.until("running")
        pid = running["outrider"]["ranks"][0]["pid"]
        with (tmp_path / "kernel.log").open("a") as log:
            log.write(f"Memory cgroup out of memory: Killed process {pid} (python) total-vm:9kB\n")
        os.kill(pid, signal.SIGKILL)
        status = await node.until("faulted")
        fault = status["outrider"]["faults"][-1]
        assert fault["reason"] == "OomKilled"
        assert fault["exit"] == {
            "code": None,
            "signal": 9,
            "core_dumped": False,
            "by": "the kernel's OOM killer",
        }
        assert "its container was used up" in fault["evidence"][0]
        text = await node.text("/metrics")
        assert 'outrider_kernel_log_records_total{kind="oom_kill",training_job="' in text
        assert 'outrider_gpu_xid_errors_total{gpu="0",training_job="' in text

    (tmp_path / "kernel.log").touch()
    gpus = (GpuAddress(index=0, pci="0000:3b:00"),)
    run(config_of(tmp_path, "import time; time.sleep(600)", gpus=gpus), scenario)


def test_an_illegal_transition_is_refused_and_changes_nothing(tmp_path):
    """A second start would run two generations on one GPU."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        before = await node.until("running")
        for stale in ({**START, "generation": 0}, {**START, "generation": 2}):
            code, body = await node.post("/start", stale)
            assert code == 409
            assert body["detail"]
        after = (await node.get("/status"))[1]
        assert after["outrider"]["ranks"][0]["pid"] == before["outrider"]["ranks"][0]["pid"]
        assert (await node.post("/stop", {"generation": 0}))[0] in (200, 409)
        assert (await node.get("/status"))[1]["status"] == "running"
        code, body = await node.post("/update", {**START, "generation": 0})
        assert code == 409

    run(config_of(tmp_path, SLEEP), scenario)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/start", {}, "rank"),
        ("/start", {**START, "rank": -5}, "rank"),
        ("/start", {**START, "rank": 1}, "rank"),
        ("/start", {**START, "nnodes": 0}, "nnodes"),
        ("/start", {**START, "faultCount": "none"}, "faultCount"),
        ("/start", {**START, "master_addr": ""}, "master_addr"),
        ("/start", {**START, "master_port": ""}, "master_port"),
        ("/start", {**START, "master_port": 70000}, "master_port"),
        ("/start", {**START, "nnodes": 2}, "rankIps"),
        ("/start", {**START, "rankIps": [{"rank": -1, "ip": "h"}]}, "rankIps[0].rank"),
        ("/start", {**START, "rankIps": [{"rank": 100_001, "ip": "h"}]}, "rankIps[0].rank"),
        (
            "/start",
            {**START, "log_monitoring_configuration": [{"name": "a", "logPattern": "("}]},
            "log_monitoring_configuration",
        ),
        (
            "/start",
            {**START, "progress": {"m": {"progressCount": "x", "progressData": "p"}}},
            "progress.m.progressCount",
        ),
        ("/start", [START], None),
        ("/update", {"rank": 0}, "nnodes"),
        ("/stop", {"restart_mode": "typo"}, "restart_mode"),
        ("/stop", {"timeout": -1}, "timeout"),
    ],
)
def test_a_bad_body_is_refused_with_the_field_that_is_wrong(tmp_path, path, body, field):
    """Half of a bad command would be obeyed, or the process would die of it."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        code, answer = await node.post(path, body)
        assert code == 422
        (problem,) = answer["detail"]
        assert ".".join(problem["loc"][1:]) == (field or "")
        assert problem["msg"]
        assert (await node.get("/status"))[1]["status"] == "ready"

    run(config_of(tmp_path, SLEEP), scenario)


def test_a_body_without_a_content_type_or_without_json_is_answered_not_fatal(tmp_path):
    """One careless request would cost an answer of 500, or the server."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        code, body = await node.post("/start", data=b"{nonsense")
        assert code == 422
        assert "not JSON" in body["detail"][0]["msg"]
        assert (await node.post("/start", data=b"\xff\xfe"))[0] == 422
        assert (await node.get("/nowhere"))[0] == 404
        assert (await node.get("/start"))[0] == 405

    run(config_of(tmp_path, SLEEP), scenario)


def test_requests_of_any_bytes_are_answered_and_no_traceback_is_logged(tmp_path, caplog):
    """A scanner's bytes would fill the node's log with what looks like bugs of its sidecar."""
    digits = b"1" + b"0" * 5000
    start = json.dumps(START).encode()
    packed = b"Content-Encoding: gzip"

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        for status, line, headers, body in (
            (400, b"POST /start", [packed], b"this was never packed"),
            (400, b"POST /stop", [packed], b"nor was this"),
            (400, b"POST /stop", [b"Content-Encoding: br"], b"{}"),
            (400, b"BREW /stop", [], b""),
            (400, b"\x00\x01\x02", [], b""),
            (400, b"GET /status", [b"no header"], b""),
            (400, b"GET /status", [b"A: " + b"b" * 70_000], b""),
            (422, b"POST /start", [], start.replace(b"29500", digits)),
            (422, b"POST /start", [], b"[" * 100_000),
        ):
            head, said = await bytes_to(node.port, line, *headers, body=body)
            assert int(head.split()[1]) == status, (line, headers, head)
            assert said
        assert (await node.get("/status"))[1]["status"] == "ready"

    run(config_of(tmp_path, SLEEP), scenario)
    told = [record for record in caplog.records if record.name == "outrider.http"]
    assert told
    assert not [record for record in caplog.records if record.exc_info]
    assert all(record.getMessage().isprintable() for record in told)


def test_nobody_without_the_token_gets_past_the_health_check(tmp_path):
    """Anybody on the network could stop the job."""
    (tmp_path / "token").write_text("s3cret\n")

    async def scenario(node: Node, _: object) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path in ("/stop", "/shutdown", "/start"):
                assert (await node.post(path, headers=headers))[0] == 401
            assert (await node.get("/status", headers=headers))[0] == 401
        assert (await node.get("/healthz"))[0] == 200
        right = {"Authorization": "Bearer s3cret"}
        assert (await node.get("/status", headers=right))[0] == 200
        assert (await node.post("/stop", headers=right))[0] == 200
        for given in (
            *(b"", b"Bearer", b"Bearer  s3cret", b"Bearer s3cret s3cret", b"Basic s3cret"),
            *(b"Bearer \xff\xfe\xe9", b"Bearer s3cre", b"Bearer " + b"s" * 7000),
        ):
            head, body = await bytes_to(node.port, b"POST /stop", b"Authorization: " + given)
            assert (b" 401 " in head, b"WWW-Authenticate: Bearer" in head) == (True, True), given
            assert "Authorization" in json.loads(body)["detail"]

    run(config_of(tmp_path, SLEEP, token_file=str(tmp_path / "token")), scenario)


def test_shutdown_ends_the_process_and_leaves_nothing_behind(tmp_path):
    """Processes, sockets and shared memory would pile up over a day of restarts."""
    config = config_of(tmp_path, SLEEP, nproc_per_node=2)
    pids: list[int] = []

    async def scenario(node: Node, running: "asyncio.Task[int]") -> None:
        await node.until("ready")
        await node.post("/start", START)
        status = await node.until("running")
        pids.extend(rank["pid"] for rank in status["outrider"]["ranks"])
        assert pages()
        await node.post("/shutdown")
        assert await asyncio.wait_for(running, PATIENCE_S) == 0

    run(config, scenario)
    assert len(pids) == 2
    assert all(process_state(pid) == GONE for pid in pids)
    assert not pages()
    assert not list((tmp_path / "run").iterdir())


def test_a_metric_page_is_clean_and_starts_every_counter_at_zero(tmp_path):
    """An alert on an increase would never fire for the first fault of a node."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        idle = await node.text("/metrics")
        await node.post("/start", START)
        await node.until("faulted")
        page = await node.text("/metrics")
        assert f'outrider_worker_exits_total{{reason="signal",training_job="{JOB}"}} 0.0' in idle
        assert f'outrider_worker_exits_total{{reason="error",training_job="{JOB}"}} 1.0' in page
        assert f'outrider_node_faults_total{{kind="crash",training_job="{JOB}"}} 1.0' in page
        states = [line for line in page.splitlines() if line.startswith("outrider_agent_state{")]
        assert len(states) == 7
        assert sum(float(line.split()[-1]) for line in states) == 1
        for text in (idle, page):
            assert "_created" not in text
            check = subprocess.run(  # noqa: ASYNC221 - milliseconds, and nobody else waits
                ["promtool", "check", "metrics"],
                input=text,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (check.returncode, check.stderr, check.stdout) == (0, "", "")

    run(config_of(tmp_path, "raise SystemExit(1)"), scenario)


def test_a_port_in_use_is_one_clear_sentence(tmp_path):
    """A traceback would be all that a person gets."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = config_of(tmp_path, SLEEP, http_port=taken.getsockname()[1])
        with pytest.raises(SidecarError, match=r"port \d+ on 127.0.0.1 is in use; choose another"):
            asyncio.run(run_sidecar(config, asyncio.Event()))
    assert not list((tmp_path / "run").iterdir())


def test_a_second_sidecar_in_one_folder_is_refused_and_harms_nobody(tmp_path, caplog):
    """It would delete the first one's pages while its workers write to them."""

    async def scenario(node: Node, _: object) -> None:
        await node.until("ready")
        await node.post("/start", START)
        await node.until("running")
        with pytest.raises(SidecarError, match="another sidecar listens on"):
            await run_sidecar(config_of(tmp_path, SLEEP), asyncio.Event())
        assert (await node.get("/status"))[1]["status"] == "running"
        assert pages()

    with caplog.at_level(logging.ERROR):
        run(config_of(tmp_path, SLEEP), scenario)
