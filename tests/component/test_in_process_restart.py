"""In-process restart in a real local cluster: who stays alive, who is started anew, and why.

Two nodes train the example's model with torch on gloo; faults are signals and exceptions.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from coordinator.demo.cluster import Cluster, Layout
from sidecar.workers.processes import process_state

pytestmark = [pytest.mark.component, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[2] / "examples" / "pytorch_ddp" / "train.py"
WITHIN_S = 120.0
SPEC = """\
name: demo
nprocPerNode: 1
replicaSpecs:
  - name: workers
    replicas: 2
runPolicy:
  jobMaxRetryCount: 20
  barrierDeadlineSeconds: 5
progressPolicy:
  stallTimeoutSeconds: 5
nodePolicy:
  leaseSeconds: 3
"""


@contextlib.contextmanager
def two_nodes(folder: Path):
    layout = Layout(
        root=folder,
        script=SCRIPT,
        steps=100_000,
        checkpoint_every=5,
        options=("--restart-in-process",),
    )
    workers = ("node-0", "node-1")
    with Cluster(layout=layout, workers=workers, spares=(), spec=SPEC) as cluster:
        await_step(cluster, 10)
        yield cluster


def await_that(what, condition):
    deadline = time.monotonic() + WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.05)
    return found


def await_step(cluster: Cluster, step: int) -> None:
    def reached():
        job = cluster.job()
        steady = job["phase"] == "running" and job["open_incident"] is None
        return steady and (job["step"] or 0) >= step and job["complete_checkpoints"]

    await_that(f"step {step}", reached)


def pids(cluster: Cluster) -> dict[str, int]:
    return {name: cluster.worker_pid(name) for name in cluster.workers}


def recovered(cluster: Cluster, number: int) -> dict:
    def closed():
        ids = cluster.incident_ids()
        found = cluster.incident(ids[number - 1]) if len(ids) >= number else None
        return found if found is not None and found["outcome"] != "open" else None

    incident = await_that(f"incident {number}", closed)
    assert incident["outcome"] == "recovered", incident["decision"]
    return incident


def test_the_survivor_trains_on_in_its_process_and_the_dead_rank_gets_a_new_one(tmp_path):
    """A thousand healthy processes that end for one dead one cost minutes of imports."""
    with two_nodes(tmp_path) as cluster:
        before = pids(cluster)
        os.kill(before["node-1"], signal.SIGKILL)
        incident = recovered(cluster, 1)
        after = pids(cluster)
        assert after["node-0"] == before["node-0"]
        assert after["node-1"] != before["node-1"]
        assert incident["decision"]["mode"] == "local_process_level_restart"
        assert "rank 1 gets a new process" in incident["decision"]["reason"]
        culprit = incident["finding"]["culprit"]
        assert (culprit["node"], culprit["rank"]) == ("node-1", 1)
        await_step(cluster, 20)
        # Again, with the process that has lived through a restart as the one that dies.
        os.kill(before["node-0"], signal.SIGKILL)
        incident = recovered(cluster, 2)
        assert "rank 0 gets a new process" in incident["decision"]["reason"]
        assert cluster.worker_pid("node-1") == after["node-1"]
        assert process_state(before["node-0"]) in ("X", "Z")
