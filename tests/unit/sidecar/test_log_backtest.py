"""A log replayed: which line changed which rule, and when by the log's own time."""

import io
from datetime import UTC, datetime, timedelta

import pytest

from sidecar.logs.backtest import Backtest, Change
from sidecar.logs.evaluator import LogState
from sidecar.logs.library.catalogue import fault_rules, frameworks
from sidecar.logs.library.choice import rules_of
from sidecar.logs.pieces import pieces
from sidecar.logs.rules import parse_rules

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
S = LogState


def stamped(after_s: float, text: str) -> str:
    at = BEGAN + timedelta(seconds=after_s)
    return f"[{at:%Y-%m-%d %H:%M:%S.%f}] {text}\n"


def replay(rules, text: str) -> tuple[Backtest, list[Change]]:
    test = Backtest(rules)
    changes: list[Change] = []
    for piece in pieces(io.BytesIO(text.encode())):
        changes += test.show(piece)
    return test, changes + test.finish()


def told(changes) -> list[tuple]:
    return [(one.line_number, one.rule, one.before, one.after) for one in changes]


def after_s(change: Change) -> float:
    return pytest.approx(change.at_s - BEGAN.timestamp(), abs=1e-3)


def spike(**fields):
    return {
        "name": "Spike",
        "logPattern": r"loss: (?P<loss>\S+)",
        "metricThreshold": 2.0,
        "operator": "gt",
        **fields,
    }


def hang(**fields):
    return {
        "name": "Hang",
        "logPattern": "step",
        "expectedRecurringFrequencyInSeconds": 60,
        **fields,
    }


def test_the_first_match_and_the_fault_are_told_with_their_lines():
    """A person would not find the place in a log of a million lines."""
    text = "hello\nloss: 1\nloss: 1.5\nFATAL\n"
    fatal = {"name": "Fatal", "logPattern": "FATAL", "faultOnMatch": True}
    _, changes = replay(parse_rules([spike(), fatal]), text)
    assert told(changes) == [
        (2, "Spike", S.WAITING, S.HEALTHY),
        (4, "Fatal", S.WAITING, S.FAULTED),
    ]
    assert [one.opens_incident for one in changes] == [False, True]


def test_a_rule_that_comes_and_goes_within_one_piece_is_told_each_time():
    """A flapping rule would look like one that fired once."""
    text = "loss: 1\nloss: 9\nx\nloss: 1\nloss: 9\n"
    _, changes = replay(parse_rules([spike()]), text)
    assert told(changes) == [
        (1, "Spike", S.WAITING, S.HEALTHY),
        (2, "Spike", S.HEALTHY, S.SLOW),
        (4, "Spike", S.SLOW, S.HEALTHY),
        (5, "Spike", S.HEALTHY, S.SLOW),
    ]


def test_silence_is_judged_by_the_logs_own_time():
    """A log of a night is replayed in a second, and its hang would be missed."""
    text = stamped(0, "step 1") + stamped(50, "step 2") + stamped(500, "x") + stamped(900, "step 3")
    _, changes = replay(parse_rules([hang()]), text)
    assert told(changes) == [
        (1, "Hang", S.WAITING, S.HEALTHY),
        (4, "Hang", S.HEALTHY, S.HANGING),
        (4, "Hang", S.HANGING, S.HEALTHY),
    ]
    assert after_s(changes[1]) == 110


def test_silence_at_the_end_counts_as_far_as_the_log_goes_on():
    """The last hang of a log is the one that people look for."""
    text = stamped(0, "step 1") + stamped(30, "x") + stamped(400, "y")
    _, changes = replay(parse_rules([hang()]), text)
    assert [(one.rule, one.after) for one in changes][-1] == ("Hang", S.HANGING)
    assert after_s(changes[-1]) == 60


def test_a_start_without_a_match_is_a_hang_at_its_cut_off():
    """A job that never began would be called healthy."""
    text = stamped(0, "hello") + stamped(99, "still here") + stamped(700, "and here")
    (change,) = replay(parse_rules([hang(expectedStartCutOffInSeconds=600)]), text)[1]
    assert (change.before, change.after) == (S.WAITING, S.HANGING)
    assert after_s(change) == 600


def test_a_log_without_times_has_no_silence():
    """Every rule with a limit would fire on a log without times."""
    test, changes = replay(parse_rules([hang()]), "step 1\n" + "x\n" * 1000 + "step 2\n")
    assert told(changes) == [(1, "Hang", S.WAITING, S.HEALTHY)]
    assert test.began_s is None


def test_lines_without_a_time_have_that_of_the_line_before():
    """A multi-line record's metrics would lie at the start of the log."""
    text = stamped(0, "x") + stamped(100, "record") + "  loss: 9\n"
    (change,) = replay(parse_rules([spike()]), text)[1]
    assert (change.line_number, after_s(change)) == (3, 100)


def test_series_hold_every_point_once():
    """A mean over doubled points hides a spike, and a looked-at block would count twice."""
    text = "".join(f"step: {n} loss: {1 + n % 2 * 8}\n" for n in range(1000)) + "loss: nan\n"
    rules = parse_rules([spike(logPattern=r"(?:step: (?P<step>\d+) )?loss: (?P<loss>\S+)")])
    test, _ = replay(rules, text)
    (series,) = test.series.values()
    assert (series.points, series.not_finite) == (1000, 1)
    assert (series.first, series.last, series.lowest, series.highest) == (1, 9, 1, 9)
    assert series.total / series.points == 5
    assert (series.first_step, series.last_step) == (0, 999)


def test_many_pieces_give_what_one_gives():
    """What is found would depend on the size of a read."""
    lines = [stamped(n, f"step {n} loss: {9 if n in {4000, 9000} else 1}") for n in range(12_000)]
    rules = parse_rules([spike(), hang()])
    _, changes = replay(rules, "".join(lines))
    assert told(changes) == [
        (1, "Spike", S.WAITING, S.HEALTHY),
        (1, "Hang", S.WAITING, S.HEALTHY),
        (4001, "Spike", S.HEALTHY, S.SLOW),
        (4002, "Spike", S.SLOW, S.HEALTHY),
        (9001, "Spike", S.HEALTHY, S.SLOW),
        (9002, "Spike", S.SLOW, S.HEALTHY),
    ]


def test_the_whole_library_replays_a_framework_log():
    """The shipped rules are the first that anyone tries."""
    lines = [
        f"[titan] 2026-05-18 16:{n // 60:02}:{n % 60:02},000 - root - INFO - step: {n}  "
        f"loss:  {'nan' if n == 700 else 3.2}  grad_norm:  0.8  memory:  9.4GiB(64%)  tps: 7,282\n"
        for n in range(900)
    ]
    rules = (*fault_rules(), *rules_of(frameworks()))
    test, changes = replay(rules, "".join(lines))
    assert (701, "NonFiniteLoss", S.WAITING, S.FAULTED) in told(changes)
    loss = test.series["TorchtitanStep", "loss"]
    assert (loss.points, loss.not_finite, loss.last_step) == (899, 1, 899)
