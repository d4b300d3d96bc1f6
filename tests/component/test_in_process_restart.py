"""In-process restart in a real local cluster: who stays alive, who is started anew, and why.

Two nodes train a small DDP model on gloo; faults are signals, exceptions, and a script that clings.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from coordinator.demo.cluster import Cluster, Layout
from tests.component.waiting import await_that

pytestmark = [pytest.mark.component, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("restart_job.py")
# Who waits for a vfork child is in state D, and only SIGKILL ends it.
ASLEEP_C = """
#include <unistd.h>
void fall_asleep(void) {
  if (vfork() == 0) { for (;;) pause(); }
}
"""
POLICY = """\
runPolicy:
  jobMaxRetryCount: 100
  barrierDeadlineSeconds: 12
progressPolicy:
  stallTimeoutSeconds: 5
nodePolicy:
  leaseSeconds: 3
"""
NODES = ("node-0", "node-1")


class Job:
    """The cluster, and what its tests ask of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def steady(self) -> dict[str, int]:
        """Wait for steps and a newer checkpoint without an incident; return node -> pid."""
        newest = self._newest()

        def trains():
            job = self.cluster.job()
            healthy = job["phase"] == "running" and job["open_incident"] is None
            return healthy and self._newest() > newest

        await_that("a newer checkpoint", trains)
        return {name: self.cluster.worker_pid(name) for name in NODES}

    def break_rank(self, rank: int, how: str) -> None:
        """Let a rank misbehave at its next step."""
        fresh = self.cluster.layout.root / "fresh"
        fresh.write_text(how)
        fresh.replace(self.cluster.layout.root / f"break-{rank}")

    def after(self, incidents: int) -> dict:
        """Wait until the next incident is over; return it."""

        def closed():
            ids = self.cluster.incident_ids()
            found = self.cluster.incident(ids[-1]) if len(ids) > incidents else None
            return found if found is not None and found["outcome"] != "open" else None

        incident = await_that("the end of the incident", closed)
        assert incident["outcome"] == "recovered", incident["decision"]
        return incident

    def output(self, node: str) -> str:
        """Return what the node's workers printed in all generations, oldest first."""
        files = sorted(
            self.cluster.layout.node(node).glob("logs/**/stdout.log"),
            key=lambda path: path.stat().st_mtime_ns,
        )
        return "".join(path.read_text() for path in files)

    def _newest(self) -> int:
        return max((it["step"] for it in self.cluster.job()["complete_checkpoints"]), default=0)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Each test begins with a job that trains and leaves one behind."""
    layout = Layout(
        root=tmp_path_factory.mktemp("job"), script=SCRIPT, steps=1, checkpoint_every=10
    )
    with Cluster(layout=layout, workers=NODES, spares=(), policy=POLICY) as cluster:
        yield Job(cluster)


def broken(job: Job, act) -> tuple[dict, dict, dict]:
    """Return incident, pids before and pids after."""
    before = job.steady()
    known = len(job.cluster.incident_ids())
    act(before)
    incident = job.after(known)
    return incident, before, {name: job.cluster.worker_pid(name) for name in NODES}


def test_after_an_exception_every_rank_trains_on_in_its_own_process(job):
    """A batch that one rank cannot use would cost everybody the imports and the model's load."""
    incident, before, after = broken(job, lambda _: job.break_rank(1, "raise"))
    assert after == before
    assert incident["decision"]["mode"] == "in_process_restart"
    culprit = incident["finding"]["culprit"]
    assert (culprit["node"], culprit["rank"]) == ("node-1", 1)
    assert "ValueError: rank 1 found a value it cannot use" in incident["finding"]["why"]
    assert "run 2 of this process, rank 0 of 2" in job.output("node-0")


def test_the_survivor_stays_and_a_dead_rank_gets_a_new_process(job):
    """A thousand healthy processes that end for one dead one cost minutes of imports."""
    incident, before, after = broken(job, lambda pids: os.kill(pids["node-1"], signal.SIGKILL))
    assert after["node-0"] == before["node-0"]
    assert after["node-1"] != before["node-1"]
    assert incident["decision"]["mode"] == "local_process_level_restart"
    assert "rank 1 gets a new process" in incident["decision"]["reason"]


def test_the_rank_that_hosts_the_store_may_be_the_dead_one(job):
    """Rank 0 takes the rendezvous with it; the survivors must not wait for it."""
    incident, before, after = broken(job, lambda pids: os.kill(pids["node-0"], signal.SIGKILL))
    assert after["node-1"] == before["node-1"]
    assert "rank 0 gets a new process" in incident["decision"]["reason"]


def test_a_stopped_rank_is_killed_at_once_and_started_anew(job):
    """It hears no polite signal and no call: any grace is waited for nothing."""
    incident, before, after = broken(job, lambda pids: os.kill(pids["node-1"], signal.SIGSTOP))
    assert after["node-0"] == before["node-0"]
    assert after["node-1"] != before["node-1"]
    assert incident["decision"]["mode"] == "local_process_level_restart"
    said = (job.cluster.layout.root / "node-1.log").read_text()
    assert "rank 1 is stopped and hears nothing: it gets a new process" in said


def test_a_rank_that_sleeps_in_a_call_is_brought_back(job):
    """Waiting for a call to end on its own is what in-process restart is to spare."""
    incident, before, after = broken(job, lambda _: job.break_rank(0, "sleep"))
    assert after == before, (job.cluster.layout.root / "node-0.log").read_text()
    assert incident["decision"]["mode"] == "in_process_restart"


def test_a_script_that_swallows_the_call_back_misses_the_barrier(job):
    """One `except BaseException` would hold a thousand ranks at the barrier."""
    incident, before, after = broken(job, lambda _: job.break_rank(1, "swallow"))
    assert after["node-0"] == before["node-0"]
    assert after["node-1"] != before["node-1"]
    assert "rank 1 gets a new process" in incident["decision"]["reason"]
    said = (job.cluster.layout.root / "node-1.log").read_text()
    assert "rank 1 is not back at the barrier within 12 s: it gets a new process" in said


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")
def test_a_rank_in_an_uninterruptible_sleep_is_killed_without_waiting_for_the_barrier(job):
    """State D, as behind a dead file server: it cannot come back, and waiting is for nothing."""
    library = job.cluster.layout.root / "asleep.so"
    source = library.with_suffix(".c")
    source.write_text(ASLEEP_C)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    log = job.cluster.layout.root / "node-1.log"
    given_up = log.read_text().count("rank 1 is stopped and hears nothing: it gets a new process")
    incident, before, after = broken(job, lambda _: job.break_rank(1, f"asleep-{library}"))
    assert after["node-0"] == before["node-0"]
    assert after["node-1"] != before["node-1"]
    assert incident["decision"]["mode"] == "local_process_level_restart"
    evidence = incident["evidence"]["1"]["process"]
    assert evidence["state"] == "D"
    said = log.read_text().count("rank 1 is stopped and hears nothing: it gets a new process")
    assert said == given_up + 1


def test_a_rank_that_asks_for_a_process_restart_gets_one_for_all(job):
    """The script may know that its memory cannot be trusted; the most severe request wins."""
    how = "restart-process_level_restart"
    incident, before, after = broken(job, lambda _: job.break_rank(0, how))
    assert set(after.values()).isdisjoint(before.values())
    assert incident["decision"]["mode"] == "process_level_restart"


def test_a_node_local_restart_touches_the_other_nodes_processes_not(job):
    """A device that one process left in disorder is no reason to start the whole job anew."""
    how = "restart-local_process_level_restart"
    incident, before, after = broken(job, lambda _: job.break_rank(1, how))
    assert after["node-0"] == before["node-0"]
    assert after["node-1"] != before["node-1"]
    assert incident["decision"]["mode"] == "local_process_level_restart"


def test_a_job_restart_ends_the_warm_workers_too(job):
    """What a job restart is for may sit in a process that was imported long ago."""
    how = "restart-job_level_restart"
    incident, before, after = broken(job, lambda _: job.break_rank(0, how))
    assert set(after.values()).isdisjoint(before.values())
    assert incident["decision"]["mode"] == "job_level_restart"


@pytest.mark.parametrize("dead", [0, 1])
def test_a_survivor_that_waits_for_the_store_is_brought_back(tmp_path, dead):
    """Torch's store hears no call back while it connects: the survivor was killed for that."""
    layout = Layout(root=tmp_path, script=SCRIPT, steps=1, checkpoint_every=10)
    (tmp_path / f"early-{dead}").touch()
    with Cluster(layout=layout, workers=NODES, spares=(), policy=POLICY) as cluster:
        incident = Job(cluster).after(0)
    survivor = NODES[1 - dead]
    assert incident["decision"]["mode"] == "local_process_level_restart"
    assert f"rank {dead} gets a new process" in incident["decision"]["reason"]
    assert "run 2 of this process" in Job(cluster).output(survivor)
    assert "not back at the barrier" not in (tmp_path / f"{survivor}.log").read_text()


def test_what_no_level_cures_goes_through_all_of_them_and_ends_with_a_reason(tmp_path):
    """A restart that cannot help, repeated at one level, burns a night; ended at once, a job."""
    layout = Layout(root=tmp_path, script=SCRIPT, steps=1, checkpoint_every=10)
    policy = POLICY.replace(
        "runPolicy:\n", "runPolicy:\n  restartPolicy: {maxFullJobRestarts: 1}\n"
    )
    with Cluster(layout=layout, workers=NODES, spares=(), policy=policy) as cluster:
        job = Job(cluster)
        job.steady()
        (tmp_path / "always-1").touch()

        def over():
            found = [cluster.incident(it) for it in cluster.incident_ids()]
            return found if found and found[-1]["outcome"] == "failed" else None

        incidents = await_that("the end of the job", over)
    decisions = [incident["decision"] for incident in incidents]
    modes = ["in_process_restart", "process_level_restart", "job_level_restart", None]
    assert [decision["mode"] for decision in decisions] == modes
    assert "in_process_restart did not cure the same failure" in decisions[1]["reason"]
    assert "all 1 job restarts are used up (maxFullJobRestarts)" in decisions[3]["reason"]
    assert [incident["outcome"] for incident in incidents[:3]] == ["superseded"] * 3
