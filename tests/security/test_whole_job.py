"""A whole job over TLS, and what a mad node costs the others."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from coordinator.cli.main import main
from sidecar.api import UPLINK_PATH, AgentState, StatusReport
from sidecar.codec import encode
from tests.security.test_doors import hello_of, served

pytestmark = pytest.mark.component
CLI = (sys.executable, "-m", "coordinator.cli")
DEADLINE_S = 120.0


def test_a_job_runs_to_its_end_with_certificates_everywhere(tmp_path: Path) -> None:
    """Each part alone speaks TLS, and the whole cannot be started."""
    certs, state = tmp_path / "certs", tmp_path / "state"
    assert main(["certs", "init", str(certs)]) == 0
    script = tmp_path / "train.py"
    script.write_text('print("trained \\x1b]0;owned\\x07")\n')
    environment = {name: text for name, text in os.environ.items() if "OUTRIDER" not in name}
    job = ("--job", "tls", "--nnodes", "1", "--port", "0", "--linger", "0")
    coordinator = subprocess.Popen(
        [*CLI, "coordinator", *job, "--state-dir", state, "--tls", certs / "coordinator"],
        env=environment,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (state / "coordinator.url").exists():
            assert coordinator.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        url = (state / "coordinator.url").read_text().strip()
        assert url.startswith("https://")
        places = ("--log-dir", tmp_path / "logs", "--kernel-log", tmp_path / "kernel.log")
        node = ("--node-name", "n0", "--host", "127.0.0.1", "--no-warm-workers", "--tee", "1")
        ran = subprocess.run(
            [*CLI, "run", "--coordinator", url, "--tls", certs / "sidecar", *places, *node, script],
            env=environment,
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == b"[rank 0] trained \n"
        assert coordinator.wait(DEADLINE_S) == 0
    finally:
        coordinator.kill()
        coordinator.wait()


def test_a_mad_node_is_read_slowly_and_the_others_as_before(tmp_path: Path) -> None:
    """Ten thousand messages a second of one node would keep everybody's recovery waiting."""
    report = StatusReport(
        node="mad",
        incarnation="mad-1",
        rendezvous_port=0,
        state=AgentState.READY,
        generation=0,
        stopped_generation=0,
        topology_version=0,
    )
    mad_frame = encode(report)

    async def scene() -> None:
        async with served(tmp_path) as url, aiohttp.ClientSession() as session:
            mad = await session.ws_connect(url + UPLINK_PATH)
            await mad.send_bytes(encode(hello_of("mad")))
            assert "welcome" in await mad.receive_str()

            async def shout() -> None:
                for _ in range(20_000):
                    await mad.send_bytes(mad_frame)

            shouting = asyncio.create_task(shout())
            await asyncio.sleep(0.5)
            async with session.ws_connect(url + UPLINK_PATH) as sane:
                await sane.send_bytes(encode(hello_of("sane")))
                assert "welcome" in await sane.receive_str()
            async with session.get(f"{url}/v1/nodes") as answer:
                assert {item["node"] for item in (await answer.json())["nodes"]} == {"mad", "sane"}
            assert not mad.closed, "it is held back, not thrown out"
            shouting.cancel()
            await asyncio.gather(shouting, return_exceptions=True)

    asyncio.run(scene())
