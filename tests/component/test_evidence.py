"""A last look at real processes: stopped, asleep, ended, and with py-spy in every bad shape."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.events import EvidenceTaken, TakeInspection
from sidecar.rank_evidence import RankEvidence
from sidecar.workers import evidence as module
from sidecar.workers.evidence import EvidenceCapture
from sidecar.workers.files import LogFiles
from sidecar.workers.processes import GONE, process_state
from sidecar.workers.worker import Worker

pytestmark = pytest.mark.component

WITHIN_S = 60.0
SCRIPT = """
import threading, time
def waits_for_data():
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=threading.Event().wait, name="prefetch", daemon=True).start()
waits_for_data()
"""


@contextmanager
def training(folder: Path, rank: int = 0) -> Iterator[Worker]:
    """Run a worker that sleeps in a function with a name."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        until(lambda: process_state(process.pid) == "S")
        yield a_worker(process.pid, folder, rank)
    finally:
        process.kill()
        process.wait()


def a_worker(pid: int, folder: Path, rank: int = 0) -> Worker:
    path = folder / f"rank-{rank}"
    return Worker(
        generation=1,
        local_rank=rank,
        rank=rank,
        pid=pid,
        files=LogFiles(stdout=path, stderr=path, error=path),
        process=None,
        pidfd=-1,
        environment={"RANK": str(rank)},
        flight_record=folder / f"page-{rank}.flight.json",
        mark="a-mark",
        born=1,
    )


async def look(
    *workers: Worker,
    py_spy: str | None = None,
    budget_s: float = WITHIN_S,
    ranks: tuple[int, ...] = (),
) -> dict[str, RankEvidence]:
    """Return what one look finds."""
    heard: asyncio.Queue[EvidenceTaken] = asyncio.Queue()
    capture = EvidenceCapture(heard.put_nowait, py_spy)
    asked = TakeInspection(round_id=3, evidence_budget_s=budget_s)
    try:
        assert capture.begin(asked, workers, {*ranks, *(it.rank for it in workers)})
        async with asyncio.timeout(WITHIN_S):
            taken = await heard.get()
        assert capture.pids == frozenset()
    finally:
        await capture.close()
    assert taken.round_id == 3
    return dict(taken.evidence)


def until(what: Callable[[], bool]) -> None:
    due = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < due
        time.sleep(0.01)


def a_program(folder: Path, body: str) -> str:
    """Return an executable that stands in for py-spy."""
    path = folder / "py-spy"
    path.write_text(f"#!{sys.executable}\n{body}\n", encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def test_a_sleeping_rank_shows_where_it_sleeps(tmp_path):
    """The stack is what tells a stalled loader from a stalled collective."""
    with training(tmp_path) as worker:
        seen = asyncio.run(look(worker))["0"]
    main, other = seen.threads
    assert main.main
    assert [frame.partition(" ")[0] for frame in main.frames] == ["waits_for_data", "<module>"]
    assert other.name == "prefetch"
    assert seen.environment == {"RANK": "0"}
    assert seen.process is not None
    assert (seen.process.state, seen.process.threads, seen.missing) == ("S", 2, ())
    assert (seen.process.resident_bytes or 0) > 1 << 20
    assert (seen.process.open_files or 0) >= 3


def test_a_stopped_rank_is_seen_and_stays_stopped(tmp_path):
    """A look that wakes the culprit, or hangs with it, is worse than none."""
    with training(tmp_path) as worker:
        os.kill(worker.pid, signal.SIGSTOP)
        until(lambda: process_state(worker.pid) == "T")
        seen = asyncio.run(look(worker))["0"]
        assert process_state(worker.pid) == "T"
    assert seen.threads[0].frames[0].startswith("waits_for_data ")
    assert seen.process is not None
    assert seen.process.state == "T"


def test_every_rank_of_a_node_is_looked_at_and_a_dead_one_says_so(tmp_path):
    """A rank that is silently absent looks like one that nobody asked."""
    with training(tmp_path, 0) as one, training(tmp_path, 1) as two:
        seen = asyncio.run(look(one, two, ranks=(2,)))
    assert {rank: bool(item.threads) for rank, item in seen.items()} == {
        "0": True,
        "1": True,
        "2": False,
    }
    assert seen["2"].missing == ("its process has ended",)


def test_a_process_that_ended_in_the_meantime_costs_nobody_else_the_look(tmp_path):
    """Ranks die while they are looked at; that is why they are."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with training(tmp_path, 1) as alive:
        seen = asyncio.run(look(a_worker(ended.pid, tmp_path, 0), alive))
    assert seen["0"].process is None
    assert seen["0"].missing[0] == "its process has ended"
    assert seen["1"].threads


def test_without_py_spy_the_rest_is_there_with_the_reason(tmp_path, monkeypatch):
    """An image without one tool must not cost all evidence."""
    monkeypatch.setattr(module, "_installed", lambda: None)
    with training(tmp_path) as worker:
        absent = asyncio.run(look(worker))["0"]
        moved = asyncio.run(look(worker, py_spy="/nowhere/py-spy"))["0"]
    for seen in (absent, moved):
        assert seen.threads == ()
        assert seen.process is not None
        assert seen.environment == {"RANK": "0"}
    assert absent.missing == ("no stacks, py-spy is not installed; pip install py-spy",)
    assert moved.missing == ("no stacks, /nowhere/py-spy cannot be run: No such file or directory",)


def test_a_refused_look_says_why(tmp_path):
    """Where ptrace is not allowed a person has to know that it is."""
    body = "import sys; sys.exit('Error: Failed to open\\n    0: Permission denied (os error 13)')"
    with training(tmp_path) as worker:
        seen = asyncio.run(look(worker, py_spy=a_program(tmp_path, body)))["0"]
    assert seen.process is not None
    assert "CAP_SYS_PTRACE" in seen.missing[0]


def test_a_look_that_hangs_ends_with_its_budget_and_leaves_no_process(tmp_path):
    """The whole job waits for this look; a stuck tool must not hold up the restart."""
    pid_file = tmp_path / "pid"
    body = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = a_program(tmp_path, body)
    with training(tmp_path) as worker:
        seen = asyncio.run(look(worker, py_spy=program, budget_s=1.0))["0"]
    assert seen.threads == ()
    assert seen.process is not None
    assert seen.missing == ("the look took longer than its 1 s",)
    if pid_file.exists():  # a busy machine may not have come so far
        pid = int(pid_file.read_text(encoding="utf-8") or 0)
        until(lambda: process_state(pid) in (GONE, "Z"))


def test_what_torch_recorded_is_taken_where_the_worker_left_it(tmp_path):
    """The last collective of each rank is what a desync is read from."""
    entry = {"process_group": ["0", "pg"], "collective_seq_id": 5, "profiling_name": "all_reduce"}
    with training(tmp_path) as worker:
        worker.flight_record.write_text(json.dumps({"entries": [entry]}), encoding="utf-8")
        whole = asyncio.run(look(worker))["0"]
        worker.flight_record.write_text("{", encoding="utf-8")
        torn = asyncio.run(look(worker))["0"]
    assert whole.flight_record == ("group 0 #5 all_reduce ? None",)
    assert torn.flight_record == ()
    assert torn.missing[0].startswith("the Flight Recorder's file cannot be read")
    assert torn.threads


def test_only_the_newest_look_answers(tmp_path):
    """An answer to a round that is over would be taken for the present one's."""

    async def twice(worker: Worker) -> list[int]:
        heard: asyncio.Queue[EvidenceTaken] = asyncio.Queue()
        capture = EvidenceCapture(heard.put_nowait)
        for round_id in (1, 2):
            asked = TakeInspection(round_id=round_id, evidence_budget_s=WITHIN_S)
            assert capture.begin(asked, (worker,), (0,))
        async with asyncio.timeout(WITHIN_S):
            answers = [(await heard.get()).round_id]
        await capture.close()
        return answers + [heard.get_nowait().round_id for _ in range(heard.qsize())]

    with training(tmp_path) as worker:
        assert asyncio.run(twice(worker)) == [2]


def test_nobody_is_looked_at_without_a_budget_or_a_rank(tmp_path):
    """A promise of evidence that never comes makes the coordinator wait for it."""

    async def begun() -> list[bool]:
        capture = EvidenceCapture(lambda _: None)
        worker = a_worker(os.getpid(), tmp_path)
        return [
            capture.begin(TakeInspection(round_id=1), (worker,), (0,)),
            capture.begin(TakeInspection(round_id=1, evidence_budget_s=1.0), (), ()),
        ]

    assert asyncio.run(begun()) == [False, False]
