"""The shipped rules against the lines they were written for, and against whole outputs."""

import math
import re
from pathlib import Path

import pytest
import yaml

from scout.clock import Instant
from sidecar.logs.block import Block, block_of, clean_bytes
from sidecar.logs.defaults import default_rules
from sidecar.logs.evaluator import LogEvaluator
from sidecar.logs.library.catalogue import Entry, Role, entries, fault_rules, frameworks, topics
from sidecar.logs.library.choice import (
    FALLBACK_HITS,
    LINES_AFTER_FIRST,
    LINES_MAX,
    STEP_CLASS,
    Choice,
    chosen,
    rules_of,
    sightings,
)
from sidecar.logs.library.reading import readings
from sidecar.logs.numbers import METRICS
from sidecar.logs.rules import parse_rules, with_defaults

CASES = Path(__file__).resolve().parents[2] / "fixtures" / "log_cases"
ENTRIES = tuple(entries().values())
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def cases() -> list[dict]:
    found = []
    for path in sorted(CASES.glob("*.yaml")):
        found += yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)
    return found


def opened(rules, block: Block) -> list[str]:
    """The rules that open an incident over ``block``, in order."""
    return [one.rule for one in LogEvaluator(rules, Instant(0)).judge(block, Instant(1))]


def whole(text: str) -> Block:
    return Block(clean_bytes(f"{text}\n".encode()))


def close(fields: dict) -> dict:
    return {
        name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        for name, value in fields.items()
    }


# --- each rule alone ------------------------------------------------------------------------


@each_entry
def test_a_rule_reads_its_own_lines(entry: Entry) -> None:
    """The documentation promises what these lines hold."""
    for example in entry.examples:
        read = list(readings(example.line, [entry]))
        assert [one.fields for one in read] == [close(dict(example.fields))], example.line


@each_entry
def test_a_rule_leaves_alone_what_only_looks_like_its_lines(entry: Entry) -> None:
    """Every job gets these rules: one careless match restarts jobs everywhere."""
    for line in entry.others:
        assert not list(readings(line, [entry])), line
        assert opened(fault_rules(), block_of([line])) == [], line


@each_entry
def test_a_line_opens_one_incident_if_its_rule_tells_a_fault_and_else_none(entry: Entry) -> None:
    """A victim would be convicted for its last words, or one fault be told twice."""
    for example in entry.examples:
        finite = all(str(value) not in {"nan", "inf", "-inf"} for value in example.fields.values())
        found = opened(fault_rules(), whole(example.line))
        if entry.role is Role.FAULT:
            assert found == [entry.name], example.line
        elif finite:
            assert found == [], example.line


@each_entry
def test_a_fault_and_nothing_else_is_one_at_its_first_match(entry: Entry) -> None:
    """A collateral line that opens incidents hides the rank that began it."""
    assert entry.rule.fault_on_match == (entry.role is Role.FAULT)


@each_entry
def test_a_rule_can_be_copied_into_a_job_spec(entry: Entry) -> None:
    """People take a shipped rule as the start of their own."""
    (copied,) = parse_rules([dict(entry.written)])
    assert copied.name == entry.name


@each_entry
def test_lines_without_a_literal_of_the_rule_are_never_searched(entry: Entry) -> None:
    """One rule without a literal costs as much as all the others together."""
    assert entry.rule.pattern.literals


def test_a_framework_reads_only_its_own_step_lines() -> None:
    """Two frameworks would feed one metric twice."""
    for topic in frameworks():
        for entry in topic.entries:
            for example in entry.examples:
                if entry.fault_class == STEP_CLASS:
                    seen = sightings(whole(example.line))
                    others = {key for key in seen if key != topic.key}
                    assert not others - {"plain"}, example.line


STEPS_WITH_LOSS = [
    (entry, example)
    for topic in frameworks()
    for entry in topic.entries
    for example in entry.examples
    if "loss" in example.fields and entry.fault_class == STEP_CLASS
]


@pytest.mark.parametrize("bad", ["nan", "NaN", "inf", "-inf"])
@pytest.mark.parametrize(
    ("entry", "example"), STEPS_WITH_LOSS, ids=[entry.name for entry, _ in STEPS_WITH_LOSS]
)
def test_a_loss_that_is_no_number_is_a_fault_in_every_frameworks_words(entry, example, bad) -> None:
    """A job of that framework would train on garbage until somebody looks."""
    data = whole(example.line)
    (hit,) = entry.rule.pattern.hits(data)
    start, end = hit[1][entry.rule.pattern.groups["loss"]]
    broken = Block(data.data[:start] + bad.encode() + data.data[end:])
    assert opened(fault_rules(), broken) == ["NonFiniteLoss"]


def test_metrics_are_named_so_that_they_feed_the_series() -> None:
    """A step line would be recognized and its numbers lost."""
    for topic in frameworks():
        metrics = {name for entry in topic.entries for name, _ in entry.rule.metrics}
        assert metrics & set(METRICS), topic.title


def test_the_library_is_what_every_job_is_watched_by() -> None:
    """Rules that are written down and not applied protect nobody."""
    assert default_rules() == fault_rules()
    wanted = {
        "NonFiniteLoss",
        "CudaOutOfMemory",
        "CudaDeviceAssert",
        "NcclWatchdogTimeout",
        "UncorrectableEcc",
    }
    assert wanted <= {rule.name for rule in default_rules()}


def test_a_job_replaces_a_shipped_rule_by_its_name() -> None:
    """Whoever skips bad batches on purpose would have no way out."""
    own = parse_rules([{"name": "NonFiniteLoss", "logPattern": "our words"}])
    assert "NonFiniteLoss" not in opened(with_defaults(own, fault_rules()), whole("loss: nan"))


def test_every_topic_says_what_it_is_about() -> None:
    """The list and the documentation are built from these."""
    for topic in topics():
        assert topic.title
        for entry in topic.entries:
            assert re.fullmatch(r"[a-z][a-z-]*", entry.fault_class)
            assert not entry.means.endswith(".")


# --- whole outputs --------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case['id']}-{case['kind']}")
def test_an_output_is_read_as_it_is_meant(case: dict) -> None:
    """A job's own words would be misjudged, or missed."""
    block = whole(case["text"])
    found = chosen(sightings(block))
    assert [topic.key for topic in found] == case["frameworks"], case["claim"]
    among = [entry for topic in topics() if not topic.steps for entry in topic.entries]
    among += [entry for topic in found for entry in topic.entries]
    lines = block.data.decode().split("\n")
    read = [
        {
            "rule": one.entry.name,
            "role": str(one.entry.role),
            "class": one.entry.fault_class,
            "fields": one.fields,
        }
        for line in lines
        for one in readings(line, among)
    ]
    assert read == [{**one, "fields": close(one["fields"])} for one in case["reads"]], case["claim"]
    rules = with_defaults(fault_rules(), rules_of(found))
    assert opened(rules, block) == case["opens"], case["claim"]


def test_series_of_a_step_line_arrive_in_their_own_units() -> None:
    """Milliseconds read as seconds make a fast job look dead."""
    (case,) = (one for one in cases() if one["id"] == "A1")
    evaluator = LogEvaluator(rules_of(frameworks()), Instant(0))
    evaluator.judge(whole(case["text"]), Instant(1))
    values = {name: one.value for name, one in evaluator.series.items()}
    assert values["step_time"] == pytest.approx(1.8342)
    assert values["loss"] == pytest.approx(2.104583)
    assert evaluator.series["loss"].step == 4512


# --- the choice -----------------------------------------------------------------------------

TITAN = "[titan] step: {}  loss:  3.2  grad_norm:  0.8  memory:  9.4GiB(64%)  tps: 7,282\n"
PLAIN = "step {} loss 3.1 and so on\n"


def block(*lines: str) -> Block:
    return Block("".join(lines).encode())


def names(rules) -> set[str]:
    return {rule.name for rule in rules}


def test_step_lines_are_recognized_by_the_first_of_them() -> None:
    """Rules that nobody wrote would never be applied."""
    choice = Choice()
    assert choice.show(block("starting\n", "loading\n")) == ()
    assert "TorchtitanStep" in names(choice.show(block("x\n", TITAN.format(1))))
    assert [topic.key for topic in choice.topics] == ["torchtitan"]
    assert choice.show(block(TITAN.format(2))) == ()


def test_two_frameworks_may_speak_in_turn() -> None:
    """The trainer's loss or the engine's throughput would be lost."""
    choice = Choice()
    choice.show(block("{'loss': 2.1, 'learning_rate': 1e-05, 'epoch': 0.25}\n"))
    late = choice.show(block("[INFO] [Rank 0] step=30, skipped=8, lr=[9.65e-06]\n"))
    assert "DeepSpeedStep" in names(late)


def test_plain_lines_count_only_where_no_framework_speaks() -> None:
    """Two rules would read one line, and a script's odd print would be a metric."""
    choice = Choice()
    assert choice.show(block(*(PLAIN.format(n) for n in range(FALLBACK_HITS - 1)))) == ()
    assert names(choice.show(block(PLAIN.format(99)))) == {"PlainStep"}
    other = Choice()
    other.show(block(TITAN.format(1)))
    assert other.show(block(*(PLAIN.format(n) for n in range(2 * FALLBACK_HITS)))) == ()


def test_the_search_for_a_framework_ends() -> None:
    """A job without step lines would pay for it for ever."""
    choice = Choice()
    choice.show(block("nothing here\n" * LINES_MAX))
    assert not choice.open
    assert choice.show(block(TITAN.format(1))) == ()
    other = Choice()
    other.show(block(TITAN.format(1), *(["x\n"] * LINES_AFTER_FIRST)))
    assert not other.open


def test_a_job_that_reads_its_own_metrics_is_left_alone() -> None:
    """Its series would have every value twice."""
    own = parse_rules([{"name": "Own", "logPattern": r"loss:\s+(?P<loss>\S+)"}])
    assert Choice(own).show(block(TITAN.format(1))) == ()


def test_numbers_that_are_none_stay_text() -> None:
    """JSON knows no NaN: a program that reads it would fail."""
    for entry in ENTRIES:
        for example in entry.examples:
            for one in readings(example.line, [entry]):
                for value in one.fields.values():
                    assert not isinstance(value, float) or math.isfinite(value)
