"""Arbitrary bytes into the tail and arbitrary documents into the loader: nothing breaks."""

import itertools
import os
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scout.clock import Instant
from sidecar.logs.block import Block
from sidecar.logs.defaults import default_rules
from sidecar.logs.evaluator import LogEvaluator
from sidecar.logs.follow import FollowCounters, FollowedFile
from sidecar.logs.lines import LineSplitter
from sidecar.logs.numbers import measured, number, step_number
from sidecar.logs.prefixes import origin, prefix_end
from sidecar.logs.rule_fields import FIELDS
from sidecar.logs.rules import RuleError, parse_rules, usable_rules

SETTINGS = settings(
    max_examples=int(os.environ.get("OUTRIDER_FUZZ_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
SEEDS = st.sampled_from(
    [
        b"step 1 loss: 2.1\n", b"loss: nan\n", b"\r", b"\n", b"\x1b[31m", b"\x1b]8;;", b"\0" * 70,
        b"\xef\xbb\xbf", b"\xe2\x96", b"\x88", b"2024-01-01T00:00:00Z stdout P ", b'{"log":"x',
        b'{"log":"a\\n","stream":"stdout"}\n', b"2024-01-01T00:00:00Z stderr F end\n",
        b"[rank0]: ", b" 7: ", b"Traceback (most recent call last):\n", b"  File x\n", b"x" * 300,
        b"(a pid=1) ", b"[1,2]<stdout>:", b"1|2|", b"20",
    ]
)  # fmt: skip
DATA = st.lists(st.one_of(SEEDS, st.binary(max_size=40)), max_size=25).map(b"".join)


@SETTINGS
@given(DATA, st.lists(st.integers(0, 400), max_size=8))
def test_how_any_bytes_arrive_changes_no_line_and_breaks_no_promise(data, cuts):
    """What is found would depend on the timing of reads; an odd byte would end the watch."""
    limit = 64
    at_once, in_pieces = LineSplitter(limit), LineSplitter(limit)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    whole = (
        b"".join(in_pieces.feed_block(data[a:b]).data for a, b in itertools.pairwise(edges))
        + in_pieces.feed_block(b"\n").data
    )
    block = at_once.feed_block(data + b"\n")
    lines = [line for line in block.data.split(b"\n") if line]
    assert [line for line in whole.split(b"\n") if line] == lines
    text = block.data.decode()  # it is UTF-8 whatever came
    assert not set(text) & {"\r", "\0"}
    assert not text or text.endswith("\n")
    assert len(in_pieces.partial) <= limit


@SETTINGS
@given(DATA)
def test_no_output_breaks_the_shipped_rules(data):
    """The watch over a whole node would end in silence."""
    watched = LogEvaluator(default_rules(), Instant(0))
    block = LineSplitter().feed_block(data + b"\n")
    watched.judge(block, Instant(1))
    watched.timer(Instant(2))
    assert set(watched.states()) == {rule.name for rule in default_rules() if rule.phase is None}


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(["write", "cut", "move", "drop", "read"]), DATA)))
def test_no_history_of_a_file_breaks_its_reader(tmp_path_factory, steps):
    """Rotation, truncation and deletion in any order; the last line must still arrive."""
    path: Path = tmp_path_factory.mktemp("tail") / "log"
    counters = FollowCounters()
    file = FollowedFile(path, counters)
    for number_, (action, data) in enumerate(steps):
        if action == "write":
            with path.open("ab") as writer:
                writer.write(data)
        elif action == "cut" and path.exists():
            os.truncate(path, 0)
        elif action == "move" and path.exists():
            path.rename(path.with_name(f"log.{number_}"))
        elif action == "drop":
            path.unlink(missing_ok=True)
        else:
            _read(file)
    _read(file)
    with path.open("ab") as writer:
        writer.write(b"\n\nthe last line\n")
    assert any("the last line" in line for line in _read(file))
    assert counters.read_errors == 0
    file.close()


def _read(file: FollowedFile) -> list[str]:
    lines: list[str] = []
    for _ in range(20):
        lines += file.read()
        if not file.behind:
            break
    return lines


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 20_000),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from([r"loss (?P<loss>\S+)", r"(?P<step>\d+) (x)", "gt", "lteq", "any", "loss"]),
    st.lists(st.integers(), max_size=2),
)
DOCUMENTS = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from([*FIELDS, "nmae", 3]), VALUES, max_size=8),
        st.builds(
            lambda more, name: {"name": name, "logPattern": r"loss (?P<loss>\S+)"} | more,
            st.dictionaries(st.sampled_from(list(FIELDS)), VALUES, max_size=5),
            st.sampled_from("abc"),
        ),
        VALUES,
    ),
    max_size=6,
)


@SETTINGS
@given(DOCUMENTS)
def test_any_document_gives_rules_that_work_or_a_sentence(rules):
    """A slip would be a traceback, or a rule that fails when its line comes."""
    usable, refused = usable_rules(rules)
    assert len(usable) + len(refused) == len(rules)
    for error in refused:
        assert "\n" not in str(error)
        assert error.reason
    try:
        assert parse_rules(rules) == usable or refused
    except RuleError:
        assert refused
    watched = LogEvaluator(usable, Instant(0))
    for value in ("loss 1", "loss nan", "loss x", "3 x", "loss 2", "loss 1e400"):
        watched.line(value, Instant(5))
    watched.timer(Instant(10**15))


@SETTINGS
@given(st.text(max_size=80), st.binary(max_size=60), st.integers(0, 60), st.integers(0, 60))
def test_no_text_is_too_odd_for_a_number_or_a_prefix(text, data, one, other):
    """A value that raises hides its line from every rule."""
    start, end = sorted((min(one, len(data)), min(other, len(data))))
    for metric in ("loss", "step_time", "throughput", ""):
        value = measured(metric, data + b"\n", start, end)
        assert value is None or isinstance(value, float)
    assert number(text) is None or isinstance(number(text), float)
    assert step_number(data) is None or step_number(data) >= 0
    line = data.replace(b"\n", b"") + b"\n"
    assert 0 <= prefix_end(line, 0, len(line) - 1) < len(line)
    assert text.endswith(origin(text).text)


def test_no_expression_takes_longer_than_its_text_grows():
    """One rule of one job would hold up the faults of all ranks."""
    rules = parse_rules(
        [
            {"name": f"r{n}", "logPattern": pattern, "faultOnMatch": True}
            for n, pattern in enumerate(
                [
                    r"abcabc(\s*\S*)*z",
                    r"abc.*abc.*abc.*abc!",
                    r"(?i)abc\s*[a-z ]+!",
                    r"(?:abc)?abcabc[a-c]*!",
                    r".*abc(\S+).*abc(\S+)!",
                ]
            )
        ]
    )

    def spent(size: int) -> float:
        block = Block(b"abc" * size + b"\n")
        watched = LogEvaluator(rules, Instant(0))
        began = time.process_time()
        assert watched.judge(block, Instant(1)) == []
        return time.process_time() - began

    spent(100)
    # Eight times the text takes about eight times as long; sixty-four times would be its square.
    small, large = min(spent(2_500) for _ in range(3)), min(spent(20_000) for _ in range(3))
    assert large < 32 * max(small, 1e-4)
