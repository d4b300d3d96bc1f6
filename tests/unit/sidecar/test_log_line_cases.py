"""Single lines as many programs and kernels print them, each with its verdict."""

from pathlib import Path

import pytest
import yaml

from scout.clock import Instant
from sidecar.hardware.kernel_judge import KernelJudge
from sidecar.logs.block import Block, clean_bytes
from sidecar.logs.evaluator import LogEvaluator
from sidecar.logs.library.catalogue import fault_rules, topics
from sidecar.logs.library.choice import chosen, rules_of, sightings
from sidecar.logs.library.reading import readings
from sidecar.logs.rules import with_defaults

FOLDER = Path(__file__).parents[2] / "fixtures" / "line_cases"
FAULT_ENTRIES = [entry for topic in topics() if not topic.steps for entry in topic.entries]


def cases(name: str) -> list:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def block(line: str) -> Block:
    return Block(clean_bytes(f"{line}\n".encode()))


def opened(line: str) -> list[str]:
    found = chosen(sightings(block(line)), 1)
    rules = with_defaults(fault_rules(), rules_of(found))
    return [one.rule for one in LogEvaluator(rules, Instant(0)).judge(block(line), Instant(1))]


@pytest.mark.parametrize("case", cases("told"), ids=lambda case: case["line"][:60])
def test_a_line_that_tells_something_is_read_as_that_and_nothing_more(case):
    """A fault is missed, or a victim's last words convict it."""
    text = block(case["line"]).data.decode()[:-1]
    assert [one.entry.name for one in readings(text, FAULT_ENTRIES)] == case["reads"]
    assert opened(case["line"]) == case["opens"]


@pytest.mark.parametrize("line", cases("quiet"), ids=lambda line: line[:60])
def test_a_line_that_only_looks_like_a_fault_stops_nobody(line):
    """A job is stopped over a word in its configuration, its data or its documentation."""
    assert opened(line) == []
    assert list(readings(block(line).data.decode()[:-1], FAULT_ENTRIES)) == []


@pytest.mark.parametrize("case", cases("steps"), ids=lambda case: case["line"][:60])
def test_a_step_is_read_with_its_numbers_and_units(case):
    """The series of a framework's newer words would end, or be wrong by a thousand."""
    found = chosen(sightings(block(case["line"])), 1)
    assert [topic.key for topic in found] == case["framework"]
    evaluator = LogEvaluator(rules_of(found), Instant(0))
    assert evaluator.judge(block(case["line"]), Instant(1)) == []
    assert {
        name: {"value": pytest.approx(one.value, rel=1e-4), "step": one.step}
        for name, one in evaluator.series.items()
    } == case["series"]


@pytest.mark.parametrize("case", cases("kernel"), ids=lambda case: case["line"][:60])
def test_a_kernels_line_is_as_bad_as_it_is_whatever_brought_it(case):
    """A node is taken for nothing, or kept while it breaks; or anybody's print takes it."""
    judge = KernelJudge({"0000:3b:00": 0, "0009:01:00": 1})
    found = judge.take(case["line"], Instant(1_000_000_000))
    assert (str(found[0].severity) if found else "none") == case["severity"]
    assert any(one.convicts for one in found) == (case["severity"] == "fatal")
