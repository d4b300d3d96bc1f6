"""Real jobs that hang in forty ways: the one who holds the others up is named, or nobody is.

Each scenario runs several real processes over gloo, watched as a node watches its workers and
judged as a coordinator judges.  All of them run at the same time: they mostly wait.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scout.clock import Instant, seconds
from scout.hang import judge
from scout.phases_learned import DeadlinePolicy
from scout.snapshot import is_stuck
from scout.verdict import Agree, Attributed, Inconclusive, Verdict
from sidecar.evidence_format import flight_lines
from sidecar.ranks import Worker, with_limits
from sidecar.workers.pages import ProgressPages
from tests.component.freezing import FreezingGroup, any_freezing_group

pytest.importorskip("torch")

pytestmark = pytest.mark.component
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 2.5
JUDGED_WITHIN_S = 60.0
QUIET_S = 8.0
"""How long a job in which nobody is to be named is watched."""
PAUSED_S = 2.0
"""How long somebody is overdue whom the others rightly wait for."""
AT_ONCE = 8
PIPELINES = (
    "stage_that_never_sends",
    "stage_whose_first_message_never_comes",
    "stage_that_forgot_a_send",
    "batched_messages",
)
"""Jobs of three ranks; the others have four."""

FROZEN = "frozen_with_its_control_group"

NAMED = {
    "stage_that_never_sends": 1,
    "stage_whose_first_message_never_comes": 0,
    "batched_messages": 2,
    "wrong_order_in_a_subgroup": 1,
    "tensor_peer_hides_the_culprit": 3,
    "barrier_on_one_rank_only": 0,
    "all_to_all": 2,
    "monitored_barrier": 2,
    "broadcast_without_its_root": 0,
    "gathered_objects": 1,
    "handle_that_nobody_waits_for": 1,
    "backward_without_torch_s_counts": 2,
    "stopped_in_ddp": 3,
    "loader_s_worker_hangs": 2,
    "interpreter_held": 1,
    "lock_of_another_thread": 2,
    "endless_loop": 0,
    "checkpoint_into_a_full_pipe": 1,
    "reads_a_file_that_never_comes": 2,
    "waits_for_a_server_that_is_silent": 0,
    "waits_for_its_own_child": 3,
    "queue_that_nobody_fills": 1,
    "two_locks_in_another_order": 0,
    "loader_in_the_process_hangs": 3,
    "checkpoint_read_from_an_empty_pipe": 1,
    "checkpoint_of_its_own_format": 2,
    "gathers_where_the_others_reduce": 3,
    "member_that_never_comes_to_its_subgroup": 2,
    "stopped_inside_a_collective": 0,
    "frozen_with_its_control_group": 1,
}
"""Scenario -> its culprit."""
NOBODY = {
    "two_groups_in_another_order": "in a circle",
    "stage_that_forgot_a_send": "rank 0 waits for rank 1, which waits for rank 0",
    "member_that_skips_its_subgroup": "in a circle",
}
"""Scenario -> why nobody is named."""
EITHER = {
    "gradients_not_shared_by_one": 1,
    "leaves_without_a_word": 3,
    "ends_with_its_script": 1,
    "killed_in_backward": 2,
}
"""Gloo itself may end these; whoever is named, it is nobody else."""
QUIET = {
    "one_rank_is_slower": "",
    "first_step_takes_long": "",
    "declared_evaluation": "rank 0, which is evaluating",
    "evaluation_without_a_word": "rank 0, which is evaluating for 0.",
    "compiler_takes_long": "",
    "compiles_again_as_declared": "rank 3, which is compiling",
    "checkpoint_as_declared": "rank 0, which is in checkpoint I/O",
    "uneven_steps": "",
}
"""No hang -> what the others wait for."""


def can_freeze() -> bool:
    group = any_freezing_group()
    if group is None:
        return False
    group.remove()
    return True


@dataclass
class Run:
    """One scenario under way."""

    name: str
    pages: ProgressPages
    flight_records: list[Path]
    folder: Path
    size: int
    pids: list[int]
    workers: dict[int, Worker]
    began: float = field(default_factory=time.monotonic)
    verdict: Verdict | None = None
    last: Verdict | None = None
    paused_at: float | None = None
    seen: tuple = ()
    group: FreezingGroup | None = None
    records: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Rank -> what torch's Flight Recorder held when the verdict came."""

    @property
    def is_over(self) -> bool:
        now = time.monotonic()
        if self.verdict is None and QUIET.get(self.name) == "":
            return now > self.began + QUIET_S
        if self.verdict is None and self.name in QUIET and self.paused_at is not None:
            return now > self.paused_at + PAUSED_S
        return self.verdict is not None or now > self.began + JUDGED_WITHIN_S

    def look(self) -> None:
        """Watch as a node does, and judge as a coordinator does when somebody is overdue."""
        to_freeze = self.folder / "to freeze"
        if self.name == FROZEN and self.group is None and to_freeze.exists():
            self.group = any_freezing_group()
            self.group.freeze(int(to_freeze.read_text()))
        now = Instant(time.monotonic_ns())
        policy = DeadlinePolicy(most_ns=seconds(LIMIT_S), least_ns=seconds(LIMIT_S))
        looked = self.pages.snapshots(now)
        for seen in looked:
            self.workers[seen.local_rank].observe(seen, policy, now)
        stands = [it.stalled or it.held for it in self.workers.values()]
        if self.verdict is not None or not any(stands):
            return
        self.seen = with_limits(looked, self.workers)
        self.paused_at = self.paused_at or time.monotonic()
        self.last = judge(self.seen, range(self.size), seconds(LIMIT_S))
        everybody = all(is_stuck(it, seconds(LIMIT_S)) for it in self.seen)
        if isinstance(self.last, Attributed) or (isinstance(self.last, Inconclusive) and everybody):
            self.verdict = self.last

    def end(self) -> None:
        for rank, file in enumerate(self.flight_records):
            if file.exists():
                self.records[rank] = flight_lines(file.read_bytes())
        if self.group is not None:
            self.group.thaw()
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        if self.group is not None:
            self.group.remove()
        self.pages.close()

    def told(self) -> str:
        logs = [(self.folder / f"log-{rank}") for rank in range(self.size)]
        said = [it.read_text()[-400:] for it in logs if it.exists()]
        return "\n".join([str(self.verdict or self.last), *map(str, self.seen), *said])


class Zygote:
    """The process that forks ranks."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("hang_scenarios.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TORCH_FR_BUFFER_SIZE": "200",
            },
        )
        self.process.stdout.readline()

    def start(self, name: str, folder: Path, size: int) -> Run:
        folder.mkdir()
        pages = ProgressPages(job="scenario", node="node", identity=str(folder))
        pages.claim()
        made = [pages.create(1, rank, rank) for rank in range(size)]
        body = {
            "scenario": name,
            "folder": str(folder),
            "pages": [[str(page.path), page.token] for page in made],
        }
        self.process.stdin.write(json.dumps(body) + "\n")
        self.process.stdin.flush()
        pids = json.loads(self.process.stdout.readline())
        for rank, pid in enumerate(pids):
            pages.bind(1, rank, pid)
        workers = {rank: Worker() for rank in range(size)}
        records = [page.flight_record for page in made]
        return Run(name, pages, records, folder, size, pids, workers)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run every scenario, a few at a time, and return how each of them ended."""
    home = tmp_path_factory.mktemp("scenarios")
    sizes = dict.fromkeys(PIPELINES, 3)
    waiting = [*NAMED, *NOBODY, *EITHER, *QUIET]
    if not can_freeze():
        waiting.remove(FROZEN)
    zygote, running, done = Zygote(), [], {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                name = waiting.pop(0)
                running.append(zygote.start(name, home / name, sizes.get(name, 4)))
            time.sleep(0.25)
            for run in list(running):
                run.look()
                if run.is_over:
                    running.remove(run)
                    run.end()
                    done[run.name] = run
        yield done
    finally:
        for run in running:
            run.end()
        zygote.process.stdin.close()
        zygote.process.stdout.close()
        zygote.process.wait()


@pytest.mark.parametrize("name", NAMED)
def test_the_one_who_holds_the_others_up_is_named(runs, name):
    """Anybody else is a healthy node, and the job hangs again on the sick one."""
    if name not in runs:
        pytest.skip("no control group can be made here")
    run = runs[name]
    assert isinstance(run.verdict, Attributed), run.told()
    assert run.verdict.ranks == (NAMED[name],), run.told()


def test_a_stall_leaves_what_torch_recorded_where_the_node_finds_it(runs):
    """By the time somebody asks, the process may be unable to answer."""
    run = runs["broadcast_without_its_root"]
    for rank in (1, 2, 3):
        assert "broadcast" in run.records[rank][-1], run.records
        assert run.records[rank][-1].startswith("group 0 #19 ")
    assert "broadcast" not in run.records[0][-1]
    assert runs["one_rank_is_slower"].records.get(2, ()) == ()


@pytest.mark.parametrize("name", NOBODY)
def test_nobody_is_named_for_what_is_nobody_s_fault_alone(runs, name):
    """A deadlock over the order of two groups is in the script, on whichever rank one looks."""
    run = runs[name]
    assert isinstance(run.verdict, Inconclusive), run.told()
    assert NOBODY[name] in run.verdict.why, run.told()


@pytest.mark.parametrize("name", EITHER)
def test_no_victim_is_named(runs, name):
    """The ranks that a library ends are those that were left alone."""
    verdict = runs[name].verdict
    assert not isinstance(verdict, Attributed) or verdict.ranks == (EITHER[name],), runs[
        name
    ].told()


@pytest.mark.parametrize("name", QUIET)
def test_waiting_for_what_is_allowed_is_no_hang(runs, name):
    """A restart here loses the very work that the others wait for."""
    run = runs[name]
    assert run.verdict is None, run.told()
    assert run.last is None or isinstance(run.last, Agree), run.told()
    assert QUIET[name] in ("" if run.last is None else run.last.why), run.told()
