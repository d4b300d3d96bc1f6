"""The log watcher on real files, rotated, cut, lost and found, under recorded cases' ids."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scout.clock import Instant, seconds
from scout.snapshot import Phase, RankSnapshot
from sidecar.api import FaultKind
from sidecar.events import LogFinding
from sidecar.folder_watch import FolderWatch
from sidecar.logs.evaluator import LogState
from sidecar.logs.follow import FollowCounters, FollowedFile
from sidecar.logs.tail import READS_MAX, LogWatcher

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
FATAL = {"name": "Fatal", "logPattern": "FATAL", "faultOnMatch": True}
LOSS = {
    "name": "Loss",
    "logPattern": r"step: (?P<step>\d+) loss: (?P<loss>\S+)",
    "operator": "gt",
    "metricThreshold": 2.0,
    "metricEvaluationDataPoints": 5,
}


AT_WORK = RankSnapshot(rank=0, node="n", local_rank=0, phase=Phase.FORWARD, progress_age_ns=1)
UNREADABLE = RankSnapshot(rank=0, node="n", local_rank=0)


class Node:
    """A watcher, its clock, which a test may move on, and every finding it emitted."""

    def __init__(self, folder: Path, positions: Path | None = None, ranks: int = 1) -> None:
        self.findings: list[LogFinding] = []
        self.skipped = 0
        self.watcher = LogWatcher(self.findings.append, self.clock, positions=positions)
        self.files = {n: (folder / f"{n}.out", folder / f"{n}.err") for n in range(ranks)}
        self.path = self.files[0][0]

    def watch(self, *rules: object, generation: int = 1, **more: object) -> None:
        self.watcher.watch(generation, rules, self.files, **more)

    def clock(self) -> Instant:
        return Instant(time.monotonic_ns() + self.skipped)

    async def skip(self, span_s: float) -> None:
        """Let time pass, and return once the rules have been judged after it."""
        self.skipped += seconds(span_s)
        for _ in range(2):  # a line that is read proves that the look before it is over
            lines = self.watcher.counters.lines
            append(self.path, "noise\n")
            await self.read(lines + 1)

    def sees(self, phase: Phase, limit_s: float, since: Instant) -> None:
        """Show the watcher a page of rank 0 that declared ``phase`` at ``since``."""
        page = replace(
            AT_WORK,
            phase=phase,
            phase_limit_ns=seconds(limit_s),
            phase_started_age_ns=self.clock() - since,
        )
        self.watcher.saw_progress(1, [page])

    async def read(self, lines: int) -> None:
        await until(lambda: self.watcher.counters.lines >= lines)

    async def found(self, count: int = 1) -> list[LogFinding]:
        await until(lambda: len(self.findings) >= count)
        return self.findings


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def append(path: Path, data: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def play(scenario: Callable[[Node], Awaitable[None]], node: Node) -> Node:
    async def run() -> None:
        try:
            await scenario(node)
        finally:
            node.watcher.close()

    asyncio.run(run())
    return node


def test_c1_a_byte_that_is_no_text_costs_that_byte_and_nothing_else(tmp_path):
    """A tail that dies of one byte leaves the last state, HEALTHY, standing for ever."""

    async def scenario(node: Node) -> None:
        node.watch(LOSS | {"logPattern": r"loss: (\S+)"})
        append(node.path, b"\xff\xfe loss: 9.0\n" + b"loss: 9.0\n" * 5)
        (finding,) = await node.found()
        assert finding.kind is FaultKind.LOG_SLOW
        await until(lambda: node.watcher.counters.rule_matches["Loss"] == 6)
        assert node.watcher.counters.lines_undecodable == 1

    play(scenario, Node(tmp_path))


def test_a_file_that_is_written_anew_to_the_same_length_is_read_again(tmp_path):
    """A restarted job whose log is as long as its last one's would never be looked at."""
    path = tmp_path / "out"
    file = FollowedFile(path, FollowCounters())
    path.write_text("step: 1 loss: 1.0\n")
    assert file.read() == ["step: 1 loss: 1.0"]
    for _ in range(2):
        assert file.read() == []
    path.write_text("the second attemp\n")
    os.utime(path, ns=(0, 7))  # a file system's clock may be too coarse to tell two writes apart
    assert [line for _ in range(3) for line in file.read()] == ["the second attemp"]
    assert file.counters.truncations == 1
    file.close()


def test_c3_a_hole_that_copytruncate_leaves_is_no_line(tmp_path):
    """A megabyte of NUL would be one line, and the step behind it lost."""

    async def scenario(node: Node) -> None:
        with node.path.open("wb", buffering=0) as writer:  # without O_APPEND, as `> file` opens
            writer.write(b"step: 1 loss: 1.0 ........................................\n" * 20_000)
            node.watch(LOSS)
            await node.read(20_000)
            os.truncate(node.path, 0)
            writer.write(b"step: 11 loss: 2.0\n")
            matched = node.watcher.counters.rule_matches
            await until(lambda: matched["Loss"] == 20_001)
        assert node.watcher.counters.lines == 20_001
        assert node.watcher.counters.lines_cut == 0
        await until(lambda: node.watcher.tails()[0][-1] == "step: 11 loss: 2.0")
        assert node.watcher.series()[0]["loss"].step == 11

    play(scenario, Node(tmp_path))


def test_c4_what_is_written_to_a_renamed_file_is_read_before_the_new_one(tmp_path):
    """The writer goes on in the old file for a while: those lines say why it failed."""

    async def scenario(node: Node) -> None:
        with node.path.open("ab", buffering=0) as writer:
            writer.write(b"line 0\n")
            node.watch(FATAL)
            await node.read(1)
            node.path.rename(node.path.with_suffix(".out.1"))
            for number in (1, 2, 3):
                writer.write(f"line {number}\n".encode())
            append(node.path, "line 4\nline 5\n")
            await node.read(6)
            # Lines are counted before they are kept for the tail.
            await until(lambda: node.watcher.tails()[0] == tuple(f"line {n}" for n in range(6)))
            writer.write(b"late FATAL\n")  # after the new file was found
            await node.found()
        assert node.watcher.counters.lines == 7
        assert node.watcher.counters.rotations == 1

    play(scenario, Node(tmp_path))


def test_c6_lines_are_found_where_no_event_tells_of_them(tmp_path, monkeypatch):
    """On network and overlay file systems nothing is notified."""
    monkeypatch.setattr(FolderWatch, "on_any_event", lambda *_: None)

    async def scenario(node: Node) -> None:
        node.watch(FATAL)
        append(node.path, "FATAL\n")
        (finding,) = await node.found()
        assert finding.line == "FATAL"

    play(scenario, Node(tmp_path))


def _counting(function: Callable, count: dict[str, int]) -> Callable:
    def call(*arguments: object) -> object:
        count["asked"] += 1
        return function(*arguments)

    return call


def test_c15_a_file_that_comes_late_is_read_from_its_first_line(tmp_path):
    """Image pulls and set-up take minutes, and the first line may be the last."""

    async def scenario(node: Node) -> None:
        folder = tmp_path / "not" / "yet"
        node.files = {0: (folder / "out", folder / "err")}
        node.watch(FATAL)
        await asyncio.sleep(0.3)
        folder.mkdir(parents=True)
        append(folder / "out", "FATAL at once\n")
        (finding,) = await node.found()
        assert finding.line == "FATAL at once"
        assert node.watcher.counters.read_errors == 0

    play(scenario, Node(tmp_path))


def test_c15_the_start_cut_off_counts_from_the_workers_start(tmp_path):
    """A file that comes late would give a job that hangs its time twice."""

    async def scenario(node: Node) -> None:
        node.watch({"name": "Start", "logPattern": "step", "expectedStartCutOffInSeconds": 0.3})
        (finding,) = await node.found()
        assert finding.kind is FaultKind.LOG_HANG
        assert not node.path.exists()

    play(scenario, Node(tmp_path))


def test_c21_standard_error_is_judged_by_the_same_rules(tmp_path):
    """Tracebacks, NCCL's warnings and some frameworks' steps go there."""

    async def scenario(node: Node) -> None:
        oom = {"name": "Oom", "logPattern": "CUDA out of memory", "faultOnMatch": True}
        node.watch(oom, LOSS)
        append(node.files[0][1], "step: 3 loss: 1.5\nRuntimeError: CUDA out of memory\n")
        assert (await node.found())[0].rule in {"Oom", "CudaOutOfMemory"}
        assert node.watcher.series()[0]["loss"].value == 1.5

    play(scenario, Node(tmp_path))


def test_a66_another_attempt_is_followed_in_its_own_file_and_begins_anew(tmp_path):
    """The watch would stay with a file that nobody writes, or call a resumed step a fault."""
    rule = {
        "name": "Step",
        "logPattern": r"step: (?P<step>\d+)  loss:  (?P<loss>\S+)",
        "expectedRecurringFrequencyInSeconds": 600,
        "operator": "gt",
        "metricThreshold": 2.0,
        "metricEvaluationDataPoints": 3,
    }

    def attempt(number: int) -> Path:
        folder = tmp_path / "run42" / f"attempt_{number}" / "3"
        folder.mkdir(parents=True)
        return folder

    async def scenario(node: Node) -> None:
        first, second = attempt(0), attempt(1)
        node.files = {0: (first / "stdout.log", first / "stderr.log")}
        node.watch(rule)
        append(first / "stdout.log", "step: 99  loss:  2.4\nstep: 100  loss:  2.5\n")
        await node.read(2)
        node.files = {0: (second / "stdout.log", second / "stderr.log")}
        node.watch(rule, generation=2)
        # What a worker of the first attempt still writes is not this attempt's.
        append(first / "stdout.log", "step: 101  loss:  9.9\n")
        append(second / "stdout.log", "step: 90  loss:  2.6\n")
        await until(lambda: node.watcher.tails() == {0: ("step: 90  loss:  2.6",)})
        assert node.watcher.series()[0]["loss"].step == 90
        assert node.watcher.states()[0]["Step"] is LogState.HEALTHY
        # Two points of the first attempt and one of the second are no row of three.
        append(second / "stdout.log", "step: 91  loss:  2.6\n")
        await until(lambda: node.watcher.series()[0]["loss"].step == 91)
        assert node.findings == []
        append(second / "stdout.log", "step: 92  loss:  2.6\n")
        (finding,) = await node.found()
        assert (finding.generation, finding.step) == (2, 92)

    play(scenario, Node(tmp_path))


def test_c111_a_writer_is_never_held_up_by_the_watch(tmp_path):
    """A monitor whose pipe is full stops the training it should protect."""

    async def scenario(node: Node) -> None:
        node.watch(FATAL)
        await asyncio.sleep(0.1)
        blocked = threading.Event()
        node.watcher._thread.submit(blocked.wait)  # the thread that reads does nothing more
        try:
            line = b"\xff much output that nobody reads now \xff\n" * 1000
            for _ in range(200):
                await asyncio.to_thread(append, node.path, line)
            assert node.path.stat().st_size == len(line) * 200
        finally:
            blocked.set()
        append(node.path, "FATAL\n")
        await node.found()

    play(scenario, Node(tmp_path))


def test_a_link_that_is_switched_to_another_file_is_followed(tmp_path):
    """Some launchers keep `latest` as a link, and every restart moves it."""

    async def scenario(node: Node) -> None:
        for name in ("first", "second"):
            append(tmp_path / name, f"in {name}\n")
        node.path.symlink_to("first")
        node.watch(FATAL)
        await node.read(1)
        fresh = tmp_path / "fresh"
        fresh.symlink_to("second")
        fresh.rename(node.path)
        append(tmp_path / "second", "FATAL\n")
        await node.found()
        assert node.watcher.tails()[0] == ("in first", "in second", "FATAL")

    play(scenario, Node(tmp_path))


def test_a_deleted_file_is_read_on_and_its_successor_from_the_start(tmp_path):
    """A clean-up job would switch the watch off."""

    async def scenario(node: Node) -> None:
        with node.path.open("ab", buffering=0) as writer:
            writer.write(b"one\n")
            node.watch(FATAL)
            await node.read(1)
            node.path.unlink()
            writer.write(b"two\n")
            await node.read(2)
        append(node.path, "three\nFATAL\n")
        await node.found()
        assert node.watcher.tails()[0] == ("one", "two", "three", "FATAL")

    play(scenario, Node(tmp_path))


def test_a_restarted_sidecar_goes_on_where_the_last_one_stopped(tmp_path):
    """It would raise last hour's faults again, or never hear of those in between."""
    state = tmp_path / "positions.json"

    async def first(node: Node) -> None:
        node.watch(FATAL)
        append(node.path, "FATAL before\nhalf a li")
        await node.found()
        size = len("FATAL before\n")
        await until(lambda: state.exists() and _offset(state, node.path) == size)

    async def second(node: Node) -> None:
        append(node.path, "ne FATAL meanwhile\n")
        node.watch(FATAL)
        (finding,) = await node.found()
        assert finding.line == "half a line FATAL meanwhile"
        assert node.watcher.counters.lines == 1

    async def later(node: Node) -> None:
        node.watch(FATAL, generation=2)  # another generation's files begin at their start
        await node.read(2)

    play(first, Node(tmp_path, positions=state))
    play(second, Node(tmp_path, positions=state))
    play(later, Node(tmp_path, positions=state))


def _offset(state: Path, path: Path) -> int | None:
    place = json.loads(state.read_text(encoding="utf-8"))["files"].get(str(path))
    return place["offset"] if place else None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\x00", b'{"generation": 1, "files": 3}', b"[" * 9]
)
def test_a_state_file_that_is_none_is_said_and_reading_begins_at_the_start(text, tmp_path, caplog):
    """A torn file would leave a node without its watch."""
    state = tmp_path / "positions.json"
    state.write_bytes(text)

    async def scenario(node: Node) -> None:
        append(node.path, "FATAL\n")
        node.watch(FATAL)
        await node.found()

    play(scenario, Node(tmp_path, positions=state))
    assert "cannot be used" in caplog.text


def test_a_known_place_in_a_file_that_became_another_is_not_gone_back_to(tmp_path):
    """Reading would begin in the middle of a line of a file that was written anew."""
    path = tmp_path / "log"
    path.write_text("first file's text\nmore\n")
    counters = FollowCounters()
    file = FollowedFile(path, counters)
    assert file.read() == ["first file's text", "more"]
    place = file.place()
    file.close()
    with path.open("r+b") as same_inode:
        same_inode.truncate(0)
        same_inode.write(b"another text, longer than the first file's was\nend\n")
    again = FollowedFile(path, counters, position=place)
    assert again.read() == ["another text, longer than the first file's was", "end"]
    assert counters.truncations == 1
    again.close()


def test_thousands_of_files_are_all_read(tmp_path):
    """A node with many workers would be watched in part, and nobody would know which."""
    ranks = 6 * READS_MAX

    async def scenario(node: Node) -> None:
        node.watch(FATAL)
        append(node.files[ranks - 1][1], "start\n")
        await node.read(1)
        await asyncio.sleep(3.0)  # long enough to count as silent
        append(node.files[ranks - 1][0], "FATAL late\n")
        append(node.files[ranks // 2][1], "FATAL too\n")
        found = await node.found(2)
        assert {finding.local_rank for finding in found} == {ranks - 1, ranks // 2}
        assert node.watcher.counters.read_errors == 0

    play(scenario, Node(tmp_path, ranks=ranks))


def test_a_rank_that_never_prints_is_no_hang_where_another_does(tmp_path):
    """Most frameworks print on one rank: a hang rule would stop every such job."""
    rule = {
        "name": "Step",
        "logPattern": "step",
        "expectedStartCutOffInSeconds": 600,
        "expectedRecurringFrequencyInSeconds": 60,
    }

    async def scenario(node: Node) -> None:
        node.watch(rule)
        append(node.files[2][0], "step 1\n")
        await node.read(1)
        await node.skip(100)
        (finding,) = await node.found()
        assert (finding.local_rank, finding.kind) == (2, FaultKind.LOG_HANG)
        await node.skip(100)
        assert len(node.findings) == 1

    play(scenario, Node(tmp_path, ranks=4))


@pytest.mark.parametrize(
    ("scope", "first_rank", "silent"),
    [("first", 0, 0), ("last", 4, 3), ("first", 4, None), ("last", 0, None)],
)
def test_a_rule_for_one_rank_of_the_job_is_judged_where_that_rank_is(
    scope, first_rank, silent, tmp_path
):
    """On every other node it would wait for lines that no rank prints there."""
    rule = {
        "name": "Step",
        "logPattern": "step",
        "expectedStartCutOffInSeconds": 30,
        "rankScope": scope,
    }

    async def scenario(node: Node) -> None:
        ranks = {n: first_rank + n for n in range(4)}
        node.watch(rule, ranks=ranks, world_size=8)
        if silent is None:
            await node.skip(60)
            assert node.findings == []
        else:
            await node.skip(60)
            (finding,) = await node.found()
            assert finding.local_rank == silent

    play(scenario, Node(tmp_path, ranks=4))


def test_hostile_expressions_leave_the_loop_free(tmp_path):
    """Heartbeats and stops would wait for one rule."""
    turns = {"count": 0}

    async def scenario(node: Node) -> None:
        hostile = (r"(a+)+b", r"^(\S+\s*)*loss: ([\d.]+)$", r"(x|xx)+y", r"a.*a.*a.*a.*a.*z")
        node.watch(*({"name": f"r{n}", "logPattern": one} for n, one in enumerate(hostile)), FATAL)
        append(
            node.path, ("a" * 60_000 + "\n" + "x" * 60_000 + "\n" + "word " * 12_000 + "\n") * 20
        )
        append(node.path, "FATAL\n")
        while not node.findings:
            await asyncio.sleep(0.001)
            turns["count"] += 1
            assert turns["count"] < 60_000

    play(scenario, Node(tmp_path))
    assert turns["count"] > 0


def test_a_rank_may_declare_a_phase_itself(tmp_path):
    """A framework that prints nothing about its evaluation would be stopped in it."""
    rule = {"name": "Step", "logPattern": "step", "expectedRecurringFrequencyInSeconds": 60}

    async def scenario(node: Node) -> None:
        node.watch(rule)
        append(node.path, "starting\n")
        await node.read(1)
        declared = node.clock()
        node.sees(Phase.EVALUATE, 6000.0, declared)
        append(node.path, "step 1\n")
        await node.read(2)
        for _ in range(5):  # what is seen again and again is one phase
            await node.skip(20)
            node.sees(Phase.EVALUATE, 6000.0, declared)
        assert node.findings == []
        node.watcher.saw_progress(2, [AT_WORK])  # of another generation
        node.watcher.saw_progress(1, [UNREADABLE])
        await node.skip(100)
        assert node.findings == []
        node.watcher.saw_progress(1, [AT_WORK])
        await node.skip(100)
        await node.found()

    play(scenario, Node(tmp_path))


def test_c94_a_phase_that_its_attempt_never_ended_is_over_with_it(tmp_path):
    """It would be held against every later attempt, or hide each hang of theirs."""
    rule = {"name": "Step", "logPattern": "step", "expectedRecurringFrequencyInSeconds": 60}
    save = {"name": "Save", "phaseStart": "save begins", "phaseLimitInSeconds": 6000}

    async def scenario(node: Node) -> None:
        node.watch(rule, save)
        append(node.path, "step 1\nsave begins\n")
        await node.read(2)
        node.sees(Phase.CHECKPOINT, 6000.0, node.clock())  # and then it is killed
        node.path = tmp_path / "second.out"
        node.files = {0: (node.path, tmp_path / "second.err")}
        node.watch(rule, save, generation=2)
        for number in range(5):
            append(node.path, f"step {number}\n")
            await node.skip(20)
        assert node.findings == []
        assert node.watcher.states()[0]["Step"] is LogState.HEALTHY
        await node.skip(100)
        (finding,) = await node.found()
        assert (finding.generation, finding.kind) == (2, FaultKind.LOG_HANG)
        assert "phase" not in finding.message

    play(scenario, Node(tmp_path))


@pytest.mark.parametrize("before", ["", "what had this name first\n"])
def test_a_file_written_anew_with_as_many_bytes_is_read_again(tmp_path, before):
    """Its size tells nothing, nor does its time where the file system counts in ticks."""
    path = tmp_path / "log"
    file = FollowedFile(path, FollowCounters())
    if before:  # is held open for a while after it was replaced
        path.write_text(before)
        assert file.read() == before.splitlines()
    new = path.with_name("new")
    new.write_text("step 1\nstep 2\n")
    tick = time.time_ns() + 3600 * 10**9  # a clock ahead of ours; it stands still, as a tick does
    os.utime(new, ns=(tick, tick))
    new.replace(path)
    assert [line for _ in range(4) for line in file.read()] == ["step 1", "step 2"]
    path.write_text("FATAL!\nstep 3\n")
    os.utime(path, ns=(tick, tick))
    assert path.stat().st_size == len("step 1\nstep 2\n")
    assert [line for _ in range(4) for line in file.read()] == ["FATAL!", "step 3"]
    assert file.counters.truncations == 1
    file.close()
