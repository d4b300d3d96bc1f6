"""Observers beside real processes: who is named, and what an observer's end does to training."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scout.observer.config import derived_ports
from tests.unit.scout.report_schema import read_report

pytestmark = pytest.mark.component
ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0

RANK_SCRIPT = """
import json, os, sys, time
from pathlib import Path
from scout.observer import start_observer
from scout.page_layout import GroupWords
from scout.progress import PageWriter

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
with (folder / f"started-{rank}").open("a") as file:
    file.write("x")
observer = start_observer(**json.loads(sys.argv[2]))
page = PageWriter.open(
    os.environ["OUTRIDER_PROGRESS_PAGE"], int(os.environ["OUTRIDER_PROGRESS_TOKEN"])
)
world = int(os.environ["WORLD_SIZE"])
count = 0
while True:
    stall = (folder / "stall").exists()
    is_culprit = stall and (folder / "stall").read_text() == str(rank)
    inside = stall and not is_culprit
    if not stall:
        count += 1
        page.publish(count)
    words = GroupWords(group=1, name="world", ranks=tuple(range(world)), seq=100 + inside,
                       fingerprint=None, operation=2, inside=inside)
    page.beat(time.monotonic_ns(), 100 + inside, [words])
    (folder / f"status-{rank}").write_text(json.dumps(observer.status()))
    (folder / f"pids-{rank}").write_text(json.dumps(
        [os.getpid(), observer._process.pid if observer._process else None]))
    time.sleep(0.05)
"""


class Job:
    """Ranks that publish like training does, each with its observer."""

    def __init__(self, folder: Path, size: int, options: dict) -> None:
        self.folder, self.size = folder, size
        script = folder / "rank.py"
        script.write_text(RANK_SCRIPT)
        options = {"stall_timeout_s": 1.0, "silent_after_s": 2.0} | options
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(folder), json.dumps(options)],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "TORCHELASTIC_RUN_ID": folder.name,
                },
                stderr=(folder / f"log-{rank}").open("wb"),
            )
            for rank in range(size)
        ]

    def status(self, rank: int) -> dict:
        try:
            return json.loads((self.folder / f"status-{rank}").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {"state": "none", "reason": "", "report": None}

    def observer(self, rank: int) -> int:
        return json.loads((self.folder / f"pids-{rank}").read_text())[1]

    def named(self, rank: int) -> list[int] | None:
        report = self.status(rank)["report"]
        return None if report is None else [it["rank"] for it in report["ranks"]]

    def stall(self, rank: int) -> None:
        partial = self.folder / "stall.partial"
        partial.write_text(str(rank))
        partial.replace(self.folder / "stall")

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()


def until(condition, what="it"):
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what} in vain"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    """Return what starts a job, and end every job at the end."""
    jobs = []

    def make(size=3, **options):
        jobs.append(Job(tmp_path, size, options))
        job = jobs[-1]
        everybody = range(size)
        until(
            lambda: all(job.status(r)["state"] == "watching" for r in everybody),
            "every observer to watch",
        )
        return job

    yield make
    for job in jobs:
        job.end()


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("how", ["derived port", "given port", "folder"])
def test_every_observer_names_the_rank_that_stalls(start, tmp_path, how):
    """Observers that disagree, or that hear nothing of one another, help nobody."""
    options = {
        "derived port": {},
        "given port": {"address": "127.0.0.1", "port": free_port()},
        "folder": {"state_dir": str(tmp_path / "state")},
    }[how]
    job = start(**options)
    job.stall(1)
    until(lambda: all(job.named(rank) == [1] for rank in range(3)), "rank 1 to be named")
    report = job.status(0)["report"]
    read_report(json.dumps(report))  # as a file that somebody else acts on
    assert report["schema_version"] == 1
    assert (report["run"], report["generation"]) == (tmp_path.name, 0)
    assert (report["basis"], report["confidence"]) == ("causal", "high")
    assert report["ranks"][0]["host"] == socket.gethostname()
    assert report["id"] == job.status(2)["report"]["id"]
    assert any(item["ranks"] == [1] for item in report["evidence"])


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_by_every_survivor(start, victim):
    """The dead cannot speak, and a survivor that blames itself sends the wrong node home."""
    job = start()
    job.ranks[victim].send_signal(signal.SIGKILL)
    job.stall(victim)  # the others wait for it
    survivors = [rank for rank in range(3) if rank != victim]
    until(lambda: all(job.named(rank) == [victim] for rank in survivors), "the dead to be named")
    assert [job.named(rank) for rank in survivors] == [[victim], [victim]]
    for rank in survivors:
        assert read_report(json.dumps(job.status(rank)["report"])).reporter == rank


def test_a_dead_observer_neither_stops_the_others_nor_is_named(start):
    """Whoever watches must not be a new way for training to fail."""
    job = start()
    os.kill(job.observer(0), signal.SIGKILL)
    until(lambda: job.status(0)["state"] == "degraded", "the loss to be noticed")
    assert all(process.poll() is None for process in job.ranks)
    time.sleep(2.5)  # longer than observers wait for a word
    assert [job.named(rank) for rank in (1, 2)] == [None, None]


def test_after_the_hosts_observer_died_the_others_still_find_each_other(start):
    """The first rank's observer would be a single point of failure."""
    job = start()
    os.kill(job.observer(0), signal.SIGKILL)
    until(lambda: job.status(0)["state"] == "degraded")
    until(lambda: job.status(1)["state"] == "waiting" == job.status(2)["state"], "a new host")
    reason = job.status(2)["reason"]
    assert reason == "no answer from ranks 0"


def test_an_observer_ends_with_its_training_process(start):
    """Processes left behind hold ports and pages of runs that are long over."""
    job = start()
    observers = [job.observer(rank) for rank in range(3)]
    assert not any(gone(pid) for pid in observers)
    job.end()
    until(lambda: all(gone(pid) for pid in observers), "the observers to end")
    assert all(gone(pid) for pid in observers)


def test_an_observer_s_metrics_go_with_its_rank_and_stay_with_its_own_death(start, tmp_path):
    """A file left of every job that ended would be an alert for ever; none at all, never one."""
    state = tmp_path / "state"
    job = start(state_dir=str(state))

    def ranks():
        return {int(it.stem.rsplit("-", 1)[1]) for it in state.glob("outrider-observer-*.prom")}

    until(lambda: ranks() == {0, 1, 2}, "every observer's metrics")
    os.kill(job.observer(1), signal.SIGKILL)
    job.ranks[2].kill()
    until(lambda: ranks() == {0, 1}, "the metrics of the ended rank to go")
    assert ranks() == {0, 1}


def test_a_script_without_a_main_guard_runs_once(start, tmp_path):
    """An observer that imports the script would start training a second time."""
    start()
    assert [(tmp_path / f"started-{rank}").read_text() for rank in range(3)] == ["x"] * 3


def test_a_port_that_is_taken_degrades_the_observer_and_not_the_training(tmp_path):
    """A stranger on a port would end a job of a thousand GPUs."""
    ports = derived_ports(tmp_path.name, 0)
    held = []
    for port in ports:
        listener = socket.socket()
        listener.bind(("", port))
        listener.listen()
        held.append(listener)
    job = Job(tmp_path, 1, {})
    try:
        until(lambda: job.status(0)["state"] == "degraded", "the trouble to be told")
        assert "cannot listen" in job.status(0)["reason"]
        assert job.ranks[0].poll() is None
        for listener in held:
            listener.close()
        until(lambda: job.status(0)["state"] == "watching", "the observer to recover")
    finally:
        job.end()


def test_an_impossible_start_is_told_and_training_goes_on(tmp_path):
    """A mistake in how it is called would be an exception in training."""
    job = Job(tmp_path, 1, {"no_such_threshold": 1.0})
    try:
        until(lambda: job.ranks[0].poll() is not None or job.status(0)["state"] == "degraded")
        # The script itself needs the page that was not made; the observer's start did not raise.
        log = (tmp_path / "log-0").read_text()
        assert "hangs are not observed" in log
        assert "start_observer" not in log
    finally:
        job.end()
