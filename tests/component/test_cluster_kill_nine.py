"""kill -9 of each kind of process in a real local cluster leads to its documented outcome.

The outcomes are those of docs/failure-modes.md.  Two nodes and a spare train the example's model
with torch on gloo; processes die by real signals.
"""

import contextlib
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from coordinator.demo.cluster import Cluster, Layout
from sidecar.workers.processes import process_state
from tests.component.waiting import await_that

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[2] / "examples" / "pytorch_ddp" / "train.py"
POLICY = """\
progressPolicy:
  stallTimeoutSeconds: 10
nodePolicy:
  leaseSeconds: 3
"""


@contextlib.contextmanager
def two_nodes_and_a_spare(folder: Path):
    layout = Layout(root=folder, script=SCRIPT, steps=100_000, checkpoint_every=5)
    cluster = Cluster(
        layout=layout, workers=("node-0", "node-1"), spares=("node-2",), policy=POLICY
    )
    with cluster:
        await_step(cluster, 10)
        yield cluster


def await_step(cluster: Cluster, step: int) -> dict:
    def reached():
        job = cluster.job()
        ok = job["phase"] == "running" and job["open_incident"] is None
        return job if ok and (job["step"] or 0) >= step else None

    return await_that(f"step {step}", reached)


def running(cluster: Cluster) -> list[str]:
    nodes = cluster.nodes().items()
    return [name for name, node in nodes if any(rank["pid"] for rank in node["ranks"])]


def alive(pid: int) -> bool:
    """An ended process that nobody has waited for yet is no worker any more."""
    return process_state(pid) not in ("X", "Z")


def closed_incident(cluster: Cluster, number: int) -> dict:
    def closed():
        ids = cluster.incident_ids()
        if len(ids) < number:
            return None
        incident = cluster.incident(ids[number - 1])
        return incident if incident["outcome"] != "open" else None

    return await_that(f"incident {number}", closed)


def test_a_killed_worker_is_named_and_the_job_resumes_on_the_same_nodes(tmp_path):
    """The commonest fault of all must not cost a person's sleep."""
    with two_nodes_and_a_spare(tmp_path) as cluster:
        os.kill(cluster.worker_pid("node-1"), signal.SIGKILL)
        incident = closed_incident(cluster, 1)
        assert incident["outcome"] == "recovered"
        culprit = incident["finding"]["culprit"]
        assert (culprit["node"], culprit["rank"]) == ("node-1", 1)
        assert "SIGKILL" in incident["finding"]["why"]
        job = await_step(cluster, 1)
        assert job["world"] == ["node-0", "node-1"]
        assert job["generation"] == 2


def test_a_killed_coordinator_stops_no_training_and_handles_the_next_fault(tmp_path):
    """A control plane that takes the job down with it is worse than none."""
    with two_nodes_and_a_spare(tmp_path) as cluster:
        port = urlsplit(cluster.client.url).port
        pids = [cluster.worker_pid(node) for node in ("node-0", "node-1")]
        log = next((tmp_path / "node-0" / "logs").glob("**/stdout.log"))
        cluster.kill("coordinator")
        size = log.stat().st_size
        await_that("steps without a coordinator", lambda: log.stat().st_size > size + 500)
        cluster.start_coordinator(port)
        job = await_step(cluster, 15)
        assert job["generation"] == 1
        await_that("both nodes' calls", lambda: len(running(cluster)) == 2)
        assert [cluster.worker_pid(node) for node in ("node-0", "node-1")] == pids
        os.kill(pids[1], signal.SIGKILL)
        incident = closed_incident(cluster, 1)
        assert incident["outcome"] == "recovered"
        assert incident["finding"]["culprit"]["node"] == "node-1"


def test_a_fault_while_the_coordinator_is_down_is_handled_after_it(tmp_path):
    """Two things break on the same night; the second must not be forgotten."""
    with two_nodes_and_a_spare(tmp_path) as cluster:
        port = urlsplit(cluster.client.url).port
        victim = cluster.worker_pid("node-0")
        cluster.kill("coordinator")
        os.kill(victim, signal.SIGKILL)
        await_that("the worker's end", lambda: not alive(victim))
        cluster.start_coordinator(port)
        incident = closed_incident(cluster, 1)
        assert incident["outcome"] == "recovered"
        assert incident["finding"]["culprit"]["node"] == "node-0"


def test_a_killed_sidecar_takes_its_worker_along_and_the_spare_takes_its_ranks(tmp_path):
    """A worker without its sidecar would run on unwatched, under a generation that is over."""
    with two_nodes_and_a_spare(tmp_path) as cluster:
        worker = cluster.worker_pid("node-1")
        cluster.kill("node-1")
        await_that("the worker's end", lambda: not alive(worker))
        incident = closed_incident(cluster, 1)
        assert incident["outcome"] == "recovered"
        assert incident["finding"]["culprit"]["node"] == "node-1"
        job = await_step(cluster, 1)
        assert job["world"] == ["node-0", "node-2"]
