"""Arbitrary bytes where workers write, and arbitrary rules over them."""

import itertools
import tempfile
from pathlib import Path

import yaml
from hypothesis import strategies as st

from scout.clock import Instant, seconds
from sidecar.logs.evaluator import LogEvaluator, LogVerdict
from sidecar.logs.follow import FollowCounters, FollowedFile
from sidecar.logs.library.catalogue import entries
from sidecar.logs.lines import PARTIAL_BYTES_MAX, LineSplitter
from sidecar.logs.rule_files import problems, rules_in
from sidecar.logs.rules import LogRule, RuleError, parse_rules, usable_rules
from tests.fuzz.budget import fuzz

KNOWN = tuple(entry.rule for entry in entries().values())
SAID = tuple(example.line.encode() for entry in entries().values() for example in entry.examples)
PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"\n", b"\r", b"\r\n", b"\0", b"\0" * 20, b"\x1b[31m", b"\x1b[K", b"\xef\xbb\xbf",
            b"\xff\xfe", b"\xe2\x82", b"\xac", b"[rank0]: ", b"[default0]:", b"loss: nan\n",
            b'{"log":"loss 1\\n","stream":"stdout","time":"2026-01-01T00:00:00Z"}\n', b'{"log":"',
            b"2026-01-01T00:00:00.0Z stdout F loss 1\n", b"2026-01-01T00:00:00.0Z stderr P half\n",
            b"Traceback (most recent call last):\n", b'  File "x", line 1\n', b"x" * 5000,
            b"\xc3" * 300, b" " * 300, b"1" * 400,
        ]
    ),
    st.sampled_from(SAID),
    st.sampled_from(SAID).map(lambda line: line + b"\n"),
)  # fmt: skip
WRAPPED = b'{"log":"loss 1\\n","stream":"stdout","time":"2026-01-01T00:00:00Z"}\n'
MARKED = b"\xef\xbb\xbf" + WRAPPED
LONG_WRAPPED = b'{"log":"' + b"x" * 40_000 + b'\\n","stream":"stdout","time":"t"}\nend\n'
THE_END = b"x" * 100 + b"\nthe end\n"
OUTPUT = st.lists(PIECES, max_size=12).map(b"".join)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Return ``data`` in pieces."""
    ends = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def test_lines_do_not_depend_on_how_the_bytes_came() -> None:
    """A fault line that is written in two pieces would be missed, or seen twice."""

    def check(given: tuple[bytes, list[int]]) -> None:
        data, places = given
        whole = LineSplitter()
        expected = whole.feed(data)
        pieces = LineSplitter()
        found = [line for piece in cut(data, places) for line in pieces.feed(piece)]
        assert found == expected
        assert pieces.partial.replace("\r", "\n") == whole.partial.replace("\r", "\n")
        assert all(line and "\n" not in line and "\r" not in line for line in found)

    known = [(MARKED, [place]) for place in range(1, len(MARKED), 3)]
    known += [(LONG_WRAPPED, [35_000]), (MARKED[:3], [1]), (b"\0" * 20 + MARKED, [3, 21, 23, 30])]
    inputs = st.tuples(OUTPUT, st.lists(st.integers(0, 1 << 16), max_size=8))
    fuzz(inputs, check, examples=known)


def test_a_line_without_an_end_stays_bounded_and_nothing_of_it_is_lost() -> None:
    """A writer without line ends fills the memory of the node's only watcher."""

    def check(given: tuple[bytes, int, list[bytes]]) -> None:
        unit, limit, tail = given
        splitter = LineSplitter(limit)
        data = [unit * (3 * limit // len(unit) + 1), *tail]
        lines = [line for piece in data for line in splitter.feed(piece)]
        assert all(len(line.encode()) <= max(limit, 4) * 3 for line in lines)
        assert len(splitter.partial.encode()) <= max(PARTIAL_BYTES_MAX, limit) * 3

    units = st.binary(min_size=1, max_size=30)
    fuzz(st.tuples(units, st.integers(1, 600), st.lists(PIECES, max_size=4)), check)


def test_a_file_that_is_written_cut_and_replaced_is_read_without_an_error() -> None:
    """Log rotation at the wrong moment would end the watch over a rank."""
    deed = st.tuples(st.sampled_from(["write", "cut", "replace", "remove", "reopen"]), OUTPUT)

    def check(deeds: list[tuple[str, bytes]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "log")
            file = FollowedFile(path, FollowCounters())
            for kind, data in deeds:
                if kind == "write":
                    with path.open("ab") as out:
                        out.write(data)
                elif kind == "cut" and path.exists():
                    path.write_bytes(data[:7])
                elif kind == "replace":
                    path.with_name("new").write_bytes(data)
                    path.with_name("new").replace(path)
                elif kind == "remove":
                    path.unlink(missing_ok=True)
                elif kind == "reopen":
                    position, _ = file.place(), file.close()
                    file = FollowedFile(path, FollowCounters(), position=position)
                assert all(isinstance(line, str) for line in file.read())
            path.write_bytes(THE_END)
            lines = [line for _ in range(8) for line in file.read()]
            file.close()
            assert lines[-1:] == ["the end"]

    as_long = b"\0" * (len(THE_END) - len(WRAPPED)) + WRAPPED
    known = [
        # The first file is still held open when the second is written anew.
        [("write", WRAPPED), ("replace", as_long[:3]), ("write", as_long[3:])],
        [("write", WRAPPED), ("replace", MARKED[:3]), ("write", as_long[3:])],
        [("write", as_long)],
        [("replace", as_long), ("reopen", b"")],
    ]
    fuzz(st.lists(deed, max_size=8), check, examples=known)


def judged(rules: tuple[LogRule, ...], pieces: list[bytes]) -> list[LogVerdict]:
    """Return what ``rules`` say of some output, and of the silence after it."""
    evaluator = LogEvaluator(rules, Instant(0))
    splitter, found = LineSplitter(), []
    for number, piece in enumerate(pieces, 1):
        found += evaluator.judge(splitter.feed_block(piece), Instant(seconds(number)))
        found += evaluator.timer(Instant(seconds(number)))
    found += evaluator.timer(Instant(seconds(10**9)))
    assert set(evaluator.states()) <= {rule.name for rule in rules}
    return found


def test_the_shipped_rules_take_any_output() -> None:
    """One strange line would end the watch over every rank of the node."""

    def check(pieces: list[bytes]) -> None:
        for verdict in judged(KNOWN, pieces):
            assert verdict.rule
            assert verdict.message

    fuzz(st.lists(OUTPUT, max_size=4), check)


NUMBERS = st.one_of(
    st.integers(-3, 40), st.floats(), st.sampled_from(["1", "nan", "-1", "1e400", "0x10", "x", ""])
)
PATTERNS = st.one_of(
    st.from_regex(r"[a-z(){}\[\]|*+?.\\d:<>P=^$0-9,-]{0,24}", fullmatch=True),
    st.sampled_from(
        [
            r"loss: (?P<loss>\S+)", r"(a+)+$", r"(?=x)", r"(x)\1", r"step (\d+)", "", ".*", "(",
            r"(?P<step>\d+) (?P<step>\d+)", r"\C", r"\x{110000}", "a{1001}", r"(?i)NaN", "[",
        ]
    ),
    st.text(max_size=12),
)  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), NUMBERS, PATTERNS, st.lists(st.integers(), max_size=2),
    st.sampled_from(["gt", "lteq", "first", "last", "any", "loss", "step_time"]),
)  # fmt: skip
FIELDS = (
    "expectedStartCutOffInSeconds", "expectedRecurringFrequencyInSeconds", "stopPattern",
    "metricThreshold", "operator", "metricEvaluationDataPoints", "faultOnMatch", "metric",
    "ratioToMedian", "windowDataPoints", "violationsInWindow", "rankScope", "phaseStart",
    "phaseEnd", "phaseLimitInSeconds", "metricRequired", "noSuchField", "joinIndented",
)  # fmt: skip
RULES = st.builds(
    lambda fixed, more: {**fixed, **more},
    st.fixed_dictionaries(
        {}, optional={"name": st.one_of(st.just("r"), VALUES), "logPattern": PATTERNS}
    ),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
)


def test_a_rule_is_used_or_refused_with_a_sentence() -> None:
    """A job with a typing error would get a traceback, or start without its rules."""

    def check(given: tuple[list[dict[str, object]], list[bytes]]) -> None:
        rules, output = given
        usable, refused = usable_rules(rules)
        assert len(usable) + len(refused) == len(rules)
        assert all(str(error) and "\n" not in str(error) for error in refused)
        try:
            parse_rules(rules)
        except RuleError as error:
            assert refused or "name" in str(error)
        judged(usable, output)

    fuzz(st.tuples(st.lists(RULES, max_size=3), st.lists(OUTPUT, max_size=2)), check)


def test_a_file_of_rules_is_read_or_its_problems_are_named() -> None:
    """`outrider rules check` would fall over the file that it is asked about."""

    def check(text: str) -> None:
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError:
            return
        except (ValueError, RecursionError):
            return
        rules = rules_in(document)
        if rules is not None:
            assert all(problem.reason for problem in problems(rules))

    written = st.lists(RULES, max_size=2).map(yaml.safe_dump)
    mangled = st.tuples(written, st.integers(0, 400), st.text(max_size=4)).map(
        lambda it: it[0][: it[1]] + it[2] + it[0][it[1] :]
    )
    fuzz(st.one_of(st.text(max_size=80), written, mangled), check)
