"""Routing and inhibition, as a real Alertmanager does them."""

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(
        shutil.which("prometheus-alertmanager") is None, reason="Alertmanager is not installed"
    ),
]

CONFIG = Path(__file__).resolve().parents[2] / "alerts/alertmanager.yaml"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An Alertmanager of its own with the repository's configuration."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    folder = tmp_path_factory.mktemp("alertmanager")
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus-alertmanager",
                f"--config.file={CONFIG}",
                f"--storage.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: reachable(address), f"ready; {(folder / 'log').read_text()[-500:]}")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def until(done: Any, what: str) -> None:
    due = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < due, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.05)


def reachable(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(address: str, *alerts: dict[str, str]) -> None:
    body = json.dumps([{"labels": labels} for labels in alerts]).encode()
    request = urllib.request.Request(
        f"{address}/api/v2/alerts", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def states(address: str, cluster: str) -> dict[str, str]:
    """Name and subject of every alert of a cluster -> its state."""
    query = f"{address}/api/v2/alerts?filter=cluster%3D%22{cluster}%22"
    with urllib.request.urlopen(query, timeout=10) as answer:
        found = json.load(answer)
    return {
        " ".join(
            it["labels"].get(name, "") for name in ("alertname", "training_job", "node", "gpu")
        ).strip(): it["status"]["state"]
        for it in found
    }


def alert(name: str, severity: str, component: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, "severity": severity, "component": component, **labels}


CASES: dict[str, tuple[list[dict[str, str]], dict[str, str]]] = {
    "an open fault explains the same job and no other": (
        [
            alert("OutriderJobFaultOpen", "critical", "training", training_job="j", node="n1"),
            alert("OutriderJobHung", "critical", "training", training_job="j"),
            alert("OutriderRankStalled", "warning", "training", training_job="j", node="n2"),
            alert("OutriderJobHung", "critical", "training", training_job="k"),
        ],
        {
            "OutriderJobFaultOpen j n1": "active",
            "OutriderJobHung j": "suppressed",
            "OutriderRankStalled j n2": "suppressed",
            "OutriderJobHung k": "active",
        },
    ),
    "what is critical about a device covers the same device only": (
        [
            alert("OutriderGpuXidFatal", "critical", "gpu", training_job="j", node="n1", gpu="3"),
            alert("OutriderGpuNvlinkErrors", "warning", "gpu", node="n1", gpu="3"),
            alert("OutriderGpuNvlinkErrors", "warning", "gpu", node="n1", gpu="4"),
            alert("OutriderGpuNvlinkErrors", "warning", "gpu", node="n2", gpu="3"),
            alert("OutriderKernelLogUnavailable", "warning", "sidecar", node="n1"),
        ],
        {
            "OutriderGpuXidFatal j n1 3": "active",
            "OutriderGpuNvlinkErrors  n1 3": "suppressed",
            "OutriderGpuNvlinkErrors  n1 4": "active",
            "OutriderGpuNvlinkErrors  n2 3": "active",
            "OutriderKernelLogUnavailable  n1": "active",
        },
    ),
    "a page about a job mutes no ticket about a job": (
        [
            alert("OutriderRecoveryStuck", "critical", "coordinator", training_job="j"),
            alert("OutriderRestartBudgetLow", "warning", "coordinator", training_job="j"),
            alert("OutriderRestartBudgetLow", "warning", "coordinator", training_job="k"),
        ],
        {
            "OutriderRecoveryStuck j": "active",
            "OutriderRestartBudgetLow j": "active",
            "OutriderRestartBudgetLow k": "active",
        },
    ),
    "a job that was given up explains itself": (
        [
            alert("OutriderJobFailed", "critical", "coordinator", training_job="j"),
            alert("OutriderRestartLoop", "warning", "coordinator", training_job="j"),
            alert("OutriderRestartLoop", "warning", "coordinator", training_job="k"),
        ],
        {
            "OutriderJobFailed j": "active",
            "OutriderRestartLoop j": "suppressed",
            "OutriderRestartLoop k": "active",
        },
    ),
    "an outage of many sidecars is not told once for each": (
        [
            alert("OutriderManySidecarsDown", "critical", "sidecar"),
            alert("OutriderSidecarDown", "warning", "sidecar", node="n1"),
            alert("OutriderPartitionSuspected", "critical", "coordinator", node="n2"),
            alert("OutriderAgentNotSeen", "warning", "coordinator", node="n2"),
            alert("OutriderAgentNotSeen", "warning", "coordinator", node="n3"),
        ],
        {
            "OutriderManySidecarsDown": "active",
            "OutriderSidecarDown  n1": "suppressed",
            "OutriderPartitionSuspected  n2": "active",
            "OutriderAgentNotSeen  n2": "suppressed",
            "OutriderAgentNotSeen  n3": "active",
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_cause_is_told_once_and_no_other_is_hidden(url: str, name: str) -> None:
    """A page that is muted by another job's page is a night nobody wakes up in."""
    cluster = f"c{list(CASES).index(name)}"
    alerts, expected = CASES[name]
    post(url, *({**labels, "cluster": cluster} for labels in alerts))
    until(lambda: states(url, cluster) == expected, str(expected))
    post(url, *({**labels, "cluster": f"{cluster}-other"} for labels in alerts[1:]))
    alone = {key for key in expected if key != next(iter(expected))}
    until(lambda: set(states(url, f"{cluster}-other")) == alone, "told without the first")
    others = states(url, f"{cluster}-other")
    muted = {key for key, state in others.items() if state != "active"}
    # These two have another cause among those that are left.
    assert muted <= {"OutriderRankStalled j n2", "OutriderAgentNotSeen  n2"}, "by another cluster"


@pytest.mark.parametrize(
    ("severity", "receiver"), [("critical", "page"), ("warning", "ticket"), ("info", "quiet")]
)
def test_urgency_decides_who_is_told(severity: str, receiver: str) -> None:
    """A page that lands in a list of tickets is read in the morning."""
    check = subprocess.run(
        ["amtool", "check-config", str(CONFIG)], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr
    routed = subprocess.run(
        ["amtool", "config", "routes", "test", f"--config.file={CONFIG}", f"severity={severity}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert routed.stdout.strip() == receiver
