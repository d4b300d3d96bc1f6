"""Eighteen ways in which an evaluator of log rules goes wrong in silence; none of them is ours."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from scout.clock import Instant, seconds
from sidecar.api import FaultKind
from sidecar.drive import monotonic
from sidecar.events import LogFinding
from sidecar.findings import log_fault
from sidecar.logs.evaluator import LogEvaluator, LogState
from sidecar.logs.rule_files import problems
from sidecar.logs.rules import RuleError, parse_rules
from sidecar.logs.tail import LogWatcher

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
ROOT = Path(__file__).parents[2]


class Node:
    """Two ranks with two files each, and what was found in them."""

    def __init__(self, folder: Path) -> None:
        self.files = {n: (folder / f"{n}.out", folder / f"{n}.err") for n in range(2)}
        self.findings: list[LogFinding] = []
        self.watcher = LogWatcher(self.findings.append, monotonic)

    def say(self, text: str | bytes, rank: int = 0, stream: int = 0) -> None:
        with self.files[rank][stream].open("ab") as file:
            file.write(text.encode() if isinstance(text, str) else text)

    async def found(self, count: int = 1) -> LogFinding:
        await until(lambda: len(self.findings) >= count)
        return self.findings[count - 1]

    async def read(self, lines: int) -> None:
        await until(lambda: self.watcher.counters.lines >= lines)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Node]:
    """Run a scenario over a node that is watched by the given rules."""

    def run(scenario: Callable[[Node], Awaitable[None]], *rules: object) -> Node:
        async def go() -> Node:
            node = Node(tmp_path)
            node.watcher.watch(1, rules, node.files)
            try:
                await scenario(node)
            finally:
                node.watcher.close()
            return node

        return asyncio.run(go())

    return run


def fatal(pattern: str, name: str = "Fatal") -> dict[str, object]:
    return {"name": name, "logPattern": pattern, "faultOnMatch": True}


def limited(threshold: object, operator: str = "gt", points: int = 1, group: str = r"(\S+)"):
    return {
        "name": "Loss",
        "logPattern": f"loss: {group}",
        "metricThreshold": threshold,
        "operator": operator,
        "metricEvaluationDataPoints": points,
    }


def states_after(rule: dict[str, object], *lines: str) -> list[LogState]:
    evaluator = LogEvaluator(parse_rules([rule]), Instant(0))
    states = []
    for number, line in enumerate(lines, 1):
        evaluator.line(line, Instant(seconds(number)))
        states.append(evaluator.states()["Loss"])
    return states


def test_pitfall_01_standard_error_is_read(play):
    """Tracebacks and Python's logging go there."""

    async def scenario(node: Node) -> None:
        node.say("RuntimeError: CUDA out of memory\n", stream=1)
        await until(lambda: "Memory" in {one.rule for one in node.findings})

    assert play(scenario, fatal("out of memory", "Memory")).findings


def test_pitfall_02_every_local_rank_is_read(play):
    """The rank that breaks is seldom the first one."""

    async def scenario(node: Node) -> None:
        node.say("FATAL\n", rank=1)
        assert (await node.found()).local_rank == 1

    play(scenario, fatal("FATAL"))


def test_pitfall_03_and_17_a_healthy_job_needs_no_option_and_leaves_nothing_behind(tmp_path):
    """Without a redirection there was no file, and the job that prints was called hung."""
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nfor n in range(55):\n    print('step', n, flush=True)\n    time.sleep(0.2)\n"
    )
    rule = {"name": "Start", "logPattern": "step", "expectedStartCutOffInSeconds": 10}
    spec = tmp_path / "job.yaml"
    written = {
        "name": "p3",
        "replicaSpecs": [{"name": "w", "replicas": 1}],
        "runPolicy": {"logMonitoringConfiguration": [rule]},
    }
    spec.write_text(yaml.safe_dump(written))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", "run", "--standalone", "--no-warm-workers",
         "--job-spec", str(spec), "--log-dir", str(tmp_path / "logs"), str(script)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "LogHang" not in done.stderr
    assert list(scratch.iterdir()) == []


def test_pitfall_04_a_pattern_is_searched_for(play):
    """Everybody writes the words and nobody the leading `.*`."""

    async def scenario(node: Node) -> None:
        node.say("CUDA went out of memory\n")
        assert (await node.found()).rule == "Fatal"

    play(scenario, fatal("out of memory"))


def test_pitfall_05_thresholds_are_not_whole_numbers():
    """A false alarm above, and a miss below."""
    assert states_after(limited(2.5), "loss: 2.2") == [LogState.HEALTHY]
    assert states_after(limited(0.5, "lt"), "loss: 0.2") == [LogState.SLOW]


@pytest.mark.parametrize("bad", [limited("2.5"), fatal("(")], ids=["text", "unclosed"])
def test_pitfall_06_a_bad_rule_is_refused_by_name_and_voids_no_other(play, bad):
    """All rules were dropped, and the job was said to run well."""
    with pytest.raises(RuleError, match=bad["name"]):
        parse_rules([bad, fatal("FATAL", "Good")])

    async def scenario(node: Node) -> None:
        node.say("FATAL\n")
        assert (await node.found()).rule == "Good"
        assert node.watcher.counters.rules_refused == 1

    play(scenario, bad, fatal("FATAL", "Good"))


def test_pitfall_07_an_unknown_field_is_an_error_with_the_nearest_known_one():
    """A misspelt recurrence is a hang that nobody finds."""
    rule = {"name": "Step", "logPattern": "step", "expectedRecuringFrequencyInSeconds": 5}
    (found,) = problems([rule])
    assert found.field == "expectedRecuringFrequencyInSeconds"
    assert "expectedRecurringFrequencyInSeconds" in found.reason


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN"])
def test_pitfall_08_a_value_that_is_not_finite_violates(value):
    """Nothing is larger than NaN, so the worst loss of all was well."""
    states = states_after(limited(2.0, points=2), "loss: 9", f"loss: {value}")
    assert states == [LogState.HEALTHY, LogState.SLOW]


def test_pitfall_09_a_value_that_is_no_number_hides_no_line_from_another_rule(play):
    """One rule's exception took the line from all the rules behind it."""

    async def scenario(node: Node) -> None:
        node.say("loss: N/A FATAL\n")
        await until(lambda: {one.rule for one in node.findings} == {"Loss", "Fatal"})

    assert len(play(scenario, limited(2.0), fatal("FATAL")).findings) == 2


def test_pitfall_10_a_spike_that_flaps_is_found():
    """Every third value was good and forgave the rest."""
    windowed = limited(50.0) | {"windowDataPoints": 6, "violationsInWindow": 4}
    del windowed["metricEvaluationDataPoints"]
    assert LogState.SLOW in states_after(windowed, *["loss: 90", "loss: 90", "loss: 1"] * 3)


def test_pitfall_11_a_byte_that_is_no_text_ends_nothing(play):
    """The thread died and the last state stood."""

    async def scenario(node: Node) -> None:
        node.say(b"bad \xff byte\n")
        await node.read(1)
        node.say("FATAL\n")
        await node.found()
        assert node.watcher.counters.lines_undecodable == 1

    play(scenario, fatal("FATAL"))


def test_pitfall_12_half_a_line_is_no_line(play):
    """A loss of 12345 was one of 12, and too low."""

    async def scenario(node: Node) -> None:
        node.say("first\nloss: 12")
        await node.read(1)
        await asyncio.sleep(0.3)
        node.say("345\nloss: 7\n")
        found = await node.found()
        assert found.line == "loss: 7"

    play(scenario, limited(100.0, "lt"))


def test_pitfall_13_no_pattern_holds_up_the_node(play):
    """A status took half a minute, and the manager of the node took it for dead."""

    async def scenario(node: Node) -> None:
        node.say("a" * 60_000 + "\nFATAL\n")
        turns = 0
        while not node.findings:
            turns += 1
            await asyncio.sleep(0)
        assert turns > 0

    play(scenario, fatal("(a+)+b", "Hostile"), fatal("FATAL"))


def test_pitfall_14_a_recurrence_alone_finds_a_job_that_never_begins():
    """It also needed a start cut-off, and nobody said so."""
    rule = {"name": "Step", "logPattern": "step", "expectedRecurringFrequencyInSeconds": 60}
    evaluator = LogEvaluator(parse_rules([rule]), Instant(0))
    assert evaluator.timer(Instant(seconds(60))) == []
    (hang,) = evaluator.timer(Instant(seconds(3600)))
    assert hang.kind is FaultKind.LOG_HANG


def test_pitfall_15_a_clock_that_is_set_moves_no_deadline(play, monkeypatch):
    """Every job hung at the moment the time was corrected."""
    real = time.time

    async def scenario(node: Node) -> None:
        node.say("step\n")
        await node.read(1)
        monkeypatch.setattr(time, "time", lambda: real() + 86_400)
        await asyncio.sleep(0.5)
        assert node.findings == []

    play(scenario, {"name": "S", "logPattern": "step", "expectedRecurringFrequencyInSeconds": 600})


def test_pitfall_16_a_line_is_found_within_a_poll_of_milliseconds(play):
    """Half a second passed before anybody looked; `make bench-log-rules` has the time."""

    async def scenario(node: Node) -> None:
        await until(node.watcher.states)
        began = node.watcher.counters.bytes_read
        node.say("FATAL\n")
        await node.found()
        assert node.watcher.counters.bytes_read > began

    play(scenario, fatal("FATAL"))


def test_pitfall_18_every_bad_rule_is_named_in_what_programs_can_read(play, tmp_path):
    """Of several only the first was told, in the words of a Python dictionary."""

    async def scenario(node: Node) -> None:
        node.say("FATAL one\n")
        await node.found(2)
        reasons = {log_fault(one, rank=0).reason for one in node.findings}
        assert reasons == {"LogFault_Fatal", "LogFault_One"}
        assert node.watcher.counters.rule_matches["One"] == 1
        assert node.watcher.states()[0]["One"] is LogState.FAULTED

    rules = [fatal("FATAL"), fatal("one", "One")]
    play(scenario, *rules)
    log, written = tmp_path / "finished.log", tmp_path / "rules.json"
    log.write_text("step 1\nFATAL one\n")
    written.write_text(json.dumps(rules))
    dry_run = subprocess.run(
        [
            sys.executable,
            "-m",
            "coordinator.cli",
            "rules",
            "test",
            "--json",
            str(written),
            str(log),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = json.loads(dry_run.stdout)
    assert {change["rule"] for change in told["changes"]} == {"Fatal", "One"}
