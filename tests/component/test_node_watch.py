"""A whole sidecar on a node with eight devices: its own process, its API, NVIDIA's bindings.

The devices are answers of a scripted library; everything that asks is real.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from sidecar.workers.processes import GONE, process_state
from tests.fakenvml.build import FakeNvml, compiler

pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(compiler() is None, reason="no C compiler to build the library with"),
]

T = TypeVar("T")

PATIENCE_S = 90.0
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
XID = "6,1,{},-;NVRM: Xid (PCI:{}): 79, pid=1, name=python, GPU has fallen off the bus.\n"
QUICK = {"pollIntervalS": 0.5, "debounceS": 0.1, "clearAfterS": 0.5}
LABELS = '{{"labels": {{"sagemaker.amazonaws.com/node-health-status": "{}"}}}}'


def until(look: Callable[[], T | None], what: str) -> T:
    """Return the first answer that is not None."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"never seen: {what}"
        time.sleep(0.05)
    return found


class Node:
    """A sidecar that runs two workers."""

    def __init__(
        self, folder: Path, fake: FakeNvml, health: object = None, **environment: str
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.base = f"http://127.0.0.1:{probe.getsockname()[1]}"
        script = folder / "train.py"
        script.write_text("import time; time.sleep(3600)")
        self.kernel_log = folder / "kernel.log"
        self.kernel_log.touch()
        config = folder / "node.yaml"
        fields = {
            "nodeName": "n0",
            "job": f"watch-{os.getpid()}",
            "coordinator": "http://127.0.0.1:1",
            "command": [str(script)],
            "host": "127.0.0.1",
            "httpPort": int(self.base.rpartition(":")[2]),
            "nprocPerNode": 2,
            "logDir": str(folder / "logs"),
            "runDir": str(folder / "run"),
            "kernelLog": str(self.kernel_log),
            "warmWorkers": False,
        }
        if health is not None:
            fields["health"] = health
        config.write_text(yaml.safe_dump(fields))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "coordinator.cli", "sidecar", "--config", str(config)],
            cwd=REPOSITORY,
            env={**os.environ, **fake.environment, **environment},
            stderr=(folder / "errors").open("wb"),
        )

    def ask(self, path: str, body: object = None) -> Any:
        """Return an answer of the API, None while there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                text = answer.read().decode()
        except OSError:
            return None
        return json.loads(text) if text.startswith("{") else text

    def status(self, state: str) -> Any:
        """Return the status once it is ``state``."""

        def look() -> Any:
            said = self.ask("/status")
            return said if said is not None and said["status"] == state else None

        return until(look, f"status {state}")

    def series(self, name: str) -> dict[str, float]:
        """Return the samples of one metric by their labels."""
        page = self.ask("/metrics") or ""
        lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def helpers(self) -> list[int]:
        """Return the processes below the sidecar that talk to the library."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = {int(pid) for file in children for pid in file.read_text().split()}
        return [pid for pid in pids if b"nvml_helper" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def run(self) -> None:
        """Bring the workers up and wait until the devices are watched."""
        self.status("ready")
        assert self.ask("/start", START) is not None
        self.status("running")
        until(lambda: self.series("outrider_gpu_temperature_celsius") or None, "the devices")


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path)


@pytest.fixture
def node(tmp_path: Path, fake: FakeNvml) -> Iterator[Callable[..., Node]]:
    """Start sidecars that are ended afterwards."""
    nodes: list[Node] = []

    def begin(health: object = None, **environment: str) -> Node:
        nodes.append(Node(tmp_path, fake, health, **environment))
        return nodes[-1]

    yield begin
    for one in nodes:
        one.process.kill()
        one.process.wait()


def test_a_device_that_loses_data_stops_its_node_and_names_its_rank(
    node: Callable[..., Node], fake: FakeNvml
) -> None:
    """Training goes on with wrong numbers, or a rank is blamed that computed elsewhere."""
    running = node(CUDA_VISIBLE_DEVICES="6,5", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    running.run()
    helpers = running.helpers()
    assert len(helpers) == 1
    fake.set(gpu5_ecc_unc_vol=3)
    status = running.status("faulted")
    (fault,) = status["outrider"]["faults"]
    assert (fault["kind"], fault["gpu"], fault["rank"], fault["local_rank"]) == (
        "gpu_fatal",
        5,
        1,
        1,
    )
    assert fault["reason"] == status["reason"] == "EccUncorrectableVolatile"
    severity = running.series("outrider_gpu_health_severity")
    assert sorted(severity.values()) == [0] * 7 + [3]
    running.ask("/stop", {})
    running.status("ready")
    assert running.helpers() == helpers, "a stop ends workers, not the watch"
    running.process.send_signal(signal.SIGTERM)
    running.process.wait(PATIENCE_S)
    until(lambda: all(process_state(pid) in GONE for pid in helpers) or None, "the helper's end")


def test_a_fault_that_the_kernel_and_the_library_tell_is_one_fault(
    node: Callable[..., Node], fake: FakeNvml
) -> None:
    """One broken device would spend two restarts of the budget."""
    running = node()
    running.run()
    pci = next(
        label.partition('pci_bus_id="')[2].partition('"')[0]
        for label in running.series("outrider_gpu_info")
        if 'gpu="1"' in label
    )
    with running.kernel_log.open("a") as file:
        file.write(XID.format(int(time.monotonic() * 1e6), pci))
    fake.raise_xid(1, 79)
    running.status("faulted")

    def told_twice() -> bool | None:
        counted = running.series("outrider_gpu_xid_errors_total")
        kernel = any(value for label, value in counted.items() if 'gpu="1"' in label)
        errors = (running.kernel_log.parent / "errors").read_text()
        return True if kernel and errors.count("GPU 1") and "79" in errors else None

    until(told_twice, "both of them telling")
    (fault,) = running.status("faulted")["outrider"]["faults"]
    assert (fault["gpu"], fault["rank"], fault["reason"]) == (1, 1, "Xid79")


def test_a_library_that_fails_is_not_known_and_not_well(
    node: Callable[..., Node], fake: FakeNvml
) -> None:
    """A driver that broke at boot would look like a node without devices."""
    fake.set(node_init="error:9")
    blind = node()
    blind.status("ready")
    severity = until(lambda: blind.series("outrider_node_health_severity") or None, "a scrape")
    assert list(severity.values()) == [1]
    assert blind.series("outrider_gpu_health_severity") == {}


def test_what_another_agent_writes_stops_the_node_and_is_taken_back(
    node: Callable[..., Node], tmp_path: Path
) -> None:
    """A node that its provider is about to take away would train until it is gone."""
    words = tmp_path / "agent.jsonl"
    words.touch()
    running = node(health={"files": [str(words)], "thresholds": QUICK})
    running.run()
    with words.open("a") as file:
        file.write(LABELS.format("Unschedulable") + "\n")
    (fault,) = running.status("faulted")["outrider"]["faults"]
    assert (fault["kind"], fault["scope"], fault["reason"]) == ("gpu_fatal", "node", "External")
    assert "node-health-status is Unschedulable" in fault["message"]
    running.ask("/stop", {})
    assert running.status("ready")["outrider"]["faults"]
    with words.open("a") as file:
        file.write(LABELS.format("Schedulable") + "\n")
    until(lambda: True if not running.status("ready")["outrider"]["faults"] else None, "its end")


def test_the_limits_of_the_nodes_file_are_those_that_judge(
    node: Callable[..., Node], fake: FakeNvml
) -> None:
    """A site with hot racks could not say so, and its nodes would be stopped for nothing."""
    fake.set(gpu3_temperature=70)
    running = node(health={"thresholds": {**QUICK, "temperatureWarnC": 60}})
    running.run()

    def warned() -> list[str] | None:
        found = running.series("outrider_gpu_health_severity")
        return [label for label, value in found.items() if value == 2] or None

    (label,) = until(warned, "a warning of 70 degrees")
    assert 'gpu="3"' in label
