"""The log watcher with real files, written as workers and log rotation write them."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from scout.clock import Instant
from sidecar.api import FaultKind
from sidecar.events import LogFinding
from sidecar.logs.rank_output import TAIL_LINES_MAX
from sidecar.logs.tail import LogWatcher

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
FATAL = {"name": "Fatal", "logPattern": "FATAL", "faultOnMatch": True}


def monotonic() -> Instant:
    return Instant(time.monotonic_ns())


class Node:
    """A watcher over two ranks, and every finding it emitted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.findings: list[LogFinding] = []
        self.watcher = LogWatcher(self.findings.append, monotonic)
        self.files = {rank: (folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(2)}

    def watch(self, *rules: object, generation: int = 1) -> None:
        self.watcher.watch(generation, rules, self.files)

    def write(self, rank: int, text: str | bytes, stream: int = 0) -> None:
        data = text.encode() if isinstance(text, str) else text
        with self.files[rank][stream].open("ab") as file:
            file.write(data)

    async def found(self, count: int = 1) -> list[LogFinding]:
        await until(lambda: len(self.findings) >= count)
        return self.findings

    async def read(self, lines: int) -> None:
        await until(lambda: self.watcher.counters.lines >= lines)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Node], Awaitable[None]]], Node]:
    def _play(scenario: Callable[[Node], Awaitable[None]], run: Callable = asyncio.run) -> Node:
        async def _run() -> Node:
            node = Node(tmp_path)
            try:
                await scenario(node)
            finally:
                node.watcher.close()
            return node

        return run(_run())

    return _play


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_both_streams_of_every_rank_are_read(play, rank, stream, run):
    """Tracebacks go to standard error, and most ranks are not the first."""

    async def scenario(node: Node) -> None:
        node.watch()
        node.write(rank, "RuntimeError: CUDA out of memory. Tried to allocate\n", stream)
        (finding,) = await node.found()
        assert (finding.generation, finding.local_rank) == (1, rank)
        assert (finding.kind, finding.rule) == (FaultKind.LOG_RULE, "CudaOutOfMemory")
        assert "CUDA out of memory" in finding.line

    play(scenario, run)


def test_a_finding_carries_the_step_of_its_line(play):
    """The checkpoint to resume from is chosen by it."""

    async def scenario(node: Node) -> None:
        node.watch()
        node.write(1, "iter 11: loss 2.3, time 9ms\niter 12: loss nan, time 9ms\n")
        (finding,) = await node.found()
        assert (finding.step, finding.rule) == (12, "NonFiniteLoss")
        assert finding.line == "iter 12: loss nan, time 9ms"

    play(scenario)


def test_what_was_written_before_the_watch_began_is_judged_too(play):
    """A worker may fail before its sidecar looks."""

    async def scenario(node: Node) -> None:
        node.write(0, "FATAL\n")
        node.watch(FATAL)
        (finding,) = await node.found()
        assert (finding.line, finding.local_rank) == ("FATAL", 0)

    play(scenario)


def test_a_line_in_two_halves_is_judged_whole(play):
    """`loss: 12` of `loss: 12345` would be below the limit."""

    async def scenario(node: Node) -> None:
        loss = r"loss: (\S+)"
        node.watch({"name": "Low", "logPattern": loss, "operator": "lt", "metricThreshold": 100})
        node.write(0, "start\nloss: 12")
        await node.read(1)
        assert node.watcher.tails()[0] == ("start", "loss: 12")
        node.write(0, "345\nFATAL")
        await node.read(2)
        assert node.findings == []
        node.write(0, "ly low now\nloss: 1\n")
        (finding,) = await node.found()
        assert finding.line == "loss: 1"

    play(scenario)


def test_bytes_that_are_not_text_end_nothing(play):
    """The watch over a whole node would be over, and nobody told."""

    async def scenario(node: Node) -> None:
        node.watch(FATAL)
        node.write(0, b"\xff\xfe\x00 binary\nFATAL \xff\n")
        (finding,) = await node.found()
        assert finding.line == "FATAL \ufffd"
        assert node.watcher.counters.lines_undecodable == 2

    play(scenario)


def test_a_rule_that_cannot_be_used_is_counted_and_the_others_hold(play, caplog):
    """One slip would leave the job without any protection."""

    async def scenario(node: Node) -> None:
        node.watch({"name": "Bad", "logPattern": "(x"}, FATAL, "no rule at all")
        node.write(0, "FATAL\n")
        await node.found()
        assert node.watcher.counters.rules_refused == 2

    play(scenario)
    assert "log rule 'Bad': logPattern" in caplog.text


def test_a_pattern_that_backtracks_elsewhere_leaves_the_loop_free(play):
    """Heartbeats and stops would wait for one regular expression."""

    async def scenario(node: Node) -> None:
        node.watch({"name": "Nested", "logPattern": "(a+)+b"}, FATAL)
        node.write(0, "a" * 60_000 + "\n" + "FATAL\n")
        (finding,) = await node.found()  # with backtracking the loop would never come back to it
        assert finding.line == "FATAL"

    play(scenario)


def test_a_flood_of_output_is_read_to_its_end_and_counted(play):
    """The one line that matters comes last."""

    async def scenario(node: Node) -> None:
        node.watch(FATAL)
        node.write(0, "nothing of note happens in this line of many\n" * 50_000 + "FATAL\n")
        await node.found()
        counters = node.watcher.counters
        assert counters.lines == 50_001
        assert counters.bytes_read == node.files[0][0].stat().st_size
        assert counters.rule_matches["Fatal"] == 1
        assert "Fatal" in counters.matched_at

    play(scenario)


def test_silence_is_a_hang_once_everything_is_read(play):
    """A stalled rank shows in nothing else than what it does not print."""

    async def scenario(node: Node) -> None:
        rule = {"name": "Step", "logPattern": "step", "expectedRecurringFrequencyInSeconds": 0.2}
        node.watch(rule)
        node.write(0, "step 1\n")
        (finding,) = await node.found()
        assert (finding.kind, finding.local_rank) == (FaultKind.LOG_HANG, 0)
        assert finding.line == "step 1"

    play(scenario)


def test_a_rotated_file_loses_no_line(play):
    """Log rotation would switch the watch off."""

    async def scenario(node: Node) -> None:
        path = node.files[0][0]
        node.watch(FATAL)
        node.write(0, "line 0\n")
        written = 1
        for turn in range(4):
            await node.read(written)
            for _ in range(25):
                node.write(0, f"line {written}\n")
                written += 1
            path.rename(path.with_name(f"old.{turn}"))
            node.write(0, f"line {written}\n")
            written += 1
            await until(lambda turn=turn: node.watcher.counters.rotations == turn + 1)
        node.write(0, "FATAL\n")
        await node.found()
        assert node.watcher.counters.lines == written + 1
        assert node.watcher.tails()[0][-2:] == (f"line {written - 1}", "FATAL")

    play(scenario)


@pytest.mark.parametrize("after", ["short\n", "much longer than what stood there before\n" * 9])
def test_a_truncated_file_is_read_from_its_start(play, after):
    """Reading would wait behind an end that never comes back."""

    async def scenario(node: Node) -> None:
        node.watch(FATAL)
        node.write(0, "old text\n" * 10)
        await node.read(10)
        os.truncate(node.files[0][0], 0)
        node.write(0, after + "FATAL\n")
        await node.found()
        assert node.watcher.counters.truncations == 1
        assert node.watcher.counters.lines == 10 + after.count("\n") + 1

    play(scenario)


def test_a_file_that_cannot_be_read_is_said_once_and_the_others_go_on(play, caplog):
    """A full log of warnings, or silence, are both no help."""

    async def scenario(node: Node) -> None:
        node.files[0][0].mkdir()
        node.watch(FATAL)
        await until(lambda: node.watcher.counters.read_errors > 2)
        node.write(1, "FATAL\n")
        await node.found()

    play(scenario)
    assert caplog.text.count("cannot be read") == 1


def test_a_new_generation_judges_its_own_output_only(play):
    """A late line of the run that was stopped would stop the next one."""

    async def scenario(node: Node) -> None:
        old = node.files
        node.watch(FATAL)
        node.write(0, "one\n")
        await node.read(1)
        node.files = {0: (node.folder / "new.out", node.folder / "new.err")}
        node.watch(FATAL, generation=2)
        with old[0][0].open("a") as file:
            file.write("FATAL\n")
        node.write(0, "FATAL\n")
        (finding,) = await node.found()
        assert finding.generation == 2
        assert node.watcher.tails() == {0: ("FATAL",)}

    play(scenario)


def test_stop_is_safe_at_any_time(play):
    """A stop that raises leaves workers running."""

    async def scenario(node: Node) -> None:
        node.watcher.stop()
        node.watch(FATAL)
        node.watcher.stop()
        node.watcher.stop()
        node.write(0, "FATAL\n")
        assert node.watcher.tails() == {}
        node.watch()
        await asyncio.sleep(0)
        node.watcher.stop()

    assert play(scenario).findings == []


def test_tails_hold_the_last_lines_of_both_streams_within_bounds(play):
    """Evidence without bounds does not arrive."""

    async def scenario(node: Node) -> None:
        node.watch()
        node.write(0, "".join(f"line {n}\n" for n in range(200)))
        node.write(0, "x" * 5000 + "\n", stream=1)
        await node.read(201)
        tail = node.watcher.tails()[0]
        assert len(tail) == TAIL_LINES_MAX
        assert tail[-1] == "x" * 400
        assert tail[-2] == "line 199"
        assert node.watcher.tails()[1] == ()

    play(scenario)


def test_a_process_that_holds_watched_files_open_ends(tmp_path):
    """A daemon that waits for its own log thread never shuts down."""
    code = f"""
import asyncio, time
from pathlib import Path
from sidecar.logs.tail import LogWatcher

async def main():
    watcher = LogWatcher(print, time.monotonic_ns)
    watcher.watch(1, [], {{0: (Path({str(tmp_path)!r}) / "out", Path({str(tmp_path)!r}) / "err")}})
    await asyncio.sleep(0.1)

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


STEP_LINE = "[titan] step: {}  loss:  3.2  grad_norm:  0.8  memory:  9.4GiB(64%)  tps: 7,282\n"


def test_a_frameworks_step_lines_are_read_without_a_rule_for_them(play):
    """A job without rules of its own would show no loss and no throughput."""

    async def scenario(node: Node) -> None:
        node.watch()
        node.write(0, "loading\n")
        node.write(1, "loading\n")
        await node.read(2)
        node.write(1, STEP_LINE.format(7))
        await until(lambda: "throughput" in node.watcher.series()[1])
        series = node.watcher.series()[1]
        assert (series["loss"].value, series["loss"].step) == (3.2, 7)
        assert node.watcher.counters.rule_matches["TorchtitanStep"] == 1
        assert node.watcher.series()[0] == {}
        node.write(1, STEP_LINE.format(8).replace("3.2", "nan"))
        (finding,) = await node.found()
        assert (finding.rule, finding.step) == ("NonFiniteLoss", 8)

    play(scenario)


def test_a_job_that_reads_its_own_metrics_has_no_others(play):
    """Every value would be counted twice."""

    async def scenario(node: Node) -> None:
        node.watch({"name": "Own", "logPattern": r"loss:\s+(?P<loss>\S+)"})
        node.write(0, STEP_LINE.format(7))
        await until(lambda: "loss" in node.watcher.series().get(0, {}))
        assert node.watcher.counters.rule_matches["TorchtitanStep"] == 0

    play(scenario)
