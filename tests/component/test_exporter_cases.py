"""A node's metric page while workers use the same client library and die: recorded cases."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.component

PATIENCE_S = 60.0
REPOSITORY = Path(__file__).parents[2]
START = {
    "rank": 0,
    "nnodes": 1,
    "faultCount": 0,
    "master_addr": "127.0.0.1",
    "master_port": "29500",
    "rankIps": [{"rank": 0, "ip": "127.0.0.1"}],
    "ipVersion": "1",
}
WORKER = """
import time
from prometheus_client import Gauge
Gauge("outrider_rank_step_of_mine", "x", multiprocess_mode="all").set(7)
print("ready", flush=True)
time.sleep(600)
"""


class Sidecar:
    """A sidecar as its own process, with a client for it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        script, config = folder / "train.py", folder / "node.yaml"
        script.write_text(WORKER)
        fields = {
            "nodeName": "n0",
            "job": f"exporter-{os.getpid()}",
            "coordinator": "http://127.0.0.1:1",
            "command": [str(script)],
            "host": "127.0.0.1",
            "httpPort": self.port,
            "nprocPerNode": 2,
            "logDir": str(folder / "logs"),
            "runDir": str(folder / "run"),
            "kernelLog": str(folder / "kernel.log"),
            "warmWorkers": False,
        }
        config.write_text(yaml.safe_dump(fields))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coordinator.cli", "sidecar", "--config", str(config)],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stderr=subprocess.DEVNULL,
        )

    def ask(self, path: str, body: object = None) -> str | None:
        """Return an answer of the API, None while there is none."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            return None

    def status(self, state: str) -> Any:
        """Return the status once it is ``state``."""

        def look() -> Any:
            said = json.loads(self.ask("/status") or "{}")
            return said if said.get("status") == state else None

        return until(look)

    def ranks_shown(self) -> set[str]:
        """Return the per-rank series of the metric page."""
        page = self.ask("/metrics") or ""
        return {line.partition("{")[0] for line in page.splitlines() if 'rank="' in line}


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return found


def test_c63_a_killed_workers_gauge_goes_with_it_and_the_jobs_own_files_are_left_alone(tmp_path):
    """Dead processes would stay on the page as healthy ones, and their files would fill a disk."""
    shared = tmp_path / "multiprocess"
    shared.mkdir()
    sidecar = Sidecar(tmp_path, {"PROMETHEUS_MULTIPROC_DIR": str(shared)})
    try:
        sidecar.status("ready")
        assert sidecar.ask("/start", START) is not None
        ranks = sidecar.status("running")["outrider"]["ranks"]
        pids = {rank["pid"] for rank in ranks}
        until(lambda: len(list(shared.iterdir())) == len(pids))
        assert "outrider_rank_stalled" in sidecar.ranks_shown()
        page = sidecar.ask("/metrics") or ""
        assert "of_mine" not in page  # the job's own numbers are not the node's
        assert not any(f'pid="{pid}"' in page for pid in pids)
        os.kill(ranks[0]["pid"], signal.SIGKILL)
        sidecar.status("faulted")
        assert sidecar.ask("/stop", {"generation": 1}) is not None
        sidecar.status("ready")
        assert sidecar.ranks_shown() == set()
        # The sidecar itself keeps no file there, so there is none that could outlive anybody.
        names = {path.name for path in shared.iterdir()}
        assert names == {f"gauge_all_{pid}.db" for pid in pids}
    finally:
        sidecar.process.terminate()
        sidecar.process.wait()
