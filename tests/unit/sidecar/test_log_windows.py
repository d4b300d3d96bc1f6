"""Windows, ratios, rates, units, scopes and joined lines: what rules may ask beyond a threshold."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout.clock import Instant, seconds
from sidecar.logs.block import block_of
from sidecar.logs.evaluator import LogEvaluator, LogState
from sidecar.logs.numbers import measured, measured_all, number, step_number
from sidecar.logs.rules import Limit, Operator, RuleError, parse_rules
from sidecar.logs.silence import NodeView, Place
from sidecar.logs.windows import Points, change_per_point

S = LogState


def at(value_s: float) -> Instant:
    return Instant(seconds(value_s))


def rule(**fields: object) -> dict:
    return {"name": "r", "logPattern": r"loss (?P<loss>\S+)", **fields}


def told(fields: dict, values: list) -> list[int]:
    """The places of the values at which the rule turned slow."""
    watched = LogEvaluator(parse_rules([fields]), at(0))
    return [n for n, value in enumerate(values) if watched.line(f"loss {value}", at(n))]


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (rule(operator="gt", metricThreshold=1, ratioToMedian=2), "ratioToMedian", "one of them"),
        (rule(ratioToMedian=2), "ratioToMedian", "without operator"),
        (rule(operator="eq", ratioToMedian=2), "operator", "no value is exactly it"),
        (rule(operator="gt", ratioToMedian=0), "ratioToMedian", "above 0"),
        (rule(operator="gt", metricThreshold=1, historyDataPoints=9), "historyDataPoints", "means"),
        (rule(operator="gt", ratioToMedian=2, historyDataPoints=4), "historyDataPoints", "from 5"),
        (rule(operator="gt", metricThreshold=1, windowDataPoints=5), "windowDataPoints", "both"),
        (
            rule(operator="gt", metricThreshold=1, windowDataPoints=5, violationsInWindow=6),
            "violationsInWindow",
            "do not fit",
        ),
        (
            rule(
                operator="gt",
                metricThreshold=1,
                windowDataPoints=5,
                violationsInWindow=3,
                metricEvaluationDataPoints=2,
            ),
            "metricEvaluationDataPoints",
            "give one",
        ),
        (rule(violationsInWindow=3), "violationsInWindow", "without metricThreshold"),
        (rule(metric="los"), "metric", "its groups are loss"),
        (rule(rankScope="all"), "rankScope", "one of every, any, first, last"),
        (rule(phaseLimitInSeconds=3), "phaseLimitInSeconds", "without phaseStart"),
        ({"name": "r", "phaseStart": "x"}, "phaseLimitInSeconds", "never ends"),
        ({"name": "r", "phaseStart": "x", "logPattern": "y"}, "logPattern", "rule of its own"),
        ({"name": "r", "phaseStart": "(x", "phaseLimitInSeconds": 3}, "phaseStart", "RE2"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, field, words):
    """One of the two would silently win, and the author believes in the other."""
    with pytest.raises(RuleError) as refused:
        parse_rules([fields])
    assert (refused.value.field, words in refused.value.reason) == (field, True), refused.value


# --- windows ----------------------------------------------------------------------------------


def test_a_spike_that_flaps_is_found_by_some_of_many():
    """Every third value is well, so no row of violations ever gets long enough."""
    values = [90, 90, 1] * 10
    in_row = rule(operator="gt", metricThreshold=10, metricEvaluationDataPoints=3)
    of_many = rule(operator="gt", metricThreshold=10, windowDataPoints=6, violationsInWindow=4)
    assert told(in_row, values) == []
    assert told(of_many, values) == [4]


def test_a_window_forgets_what_is_older_than_it():
    """One bad hour would stop a job a day later."""
    of_many = rule(operator="gt", metricThreshold=10, windowDataPoints=4, violationsInWindow=3)
    assert told(of_many, [90, 1, 1, 1] * 10) == []
    assert told(of_many, [90, 90, 90, 1, 1, 1, 1, 90, 90, 90]) == [2, 9]


def test_a_spike_is_found_by_its_ratio_to_the_runs_own_history():
    """A threshold that fits the first thousand steps fits none of the later ones."""
    noise = random.Random(3)
    falling = [8 * math.exp(-step / 80) + 2 + noise.random() / 10 for step in range(200)]
    spike = rule(operator="gt", ratioToMedian=2.0, historyDataPoints=20)
    assert told(spike, falling) == []
    assert told(spike, [*falling[:150], 9.0, *falling[150:]]) == [150]


def test_a_throughput_that_drops_is_found_by_its_ratio():
    """A slow node shows in no error."""
    watched = LogEvaluator(
        parse_rules(
            [
                {
                    "name": "Drop",
                    "logPattern": r"(?P<throughput>\S+) tokens/s",
                    "operator": "lt",
                    "ratioToMedian": 0.7,
                    "windowDataPoints": 5,
                    "violationsInWindow": 3,
                }
            ]
        ),
        at(0),
    )
    found = []
    for step in range(100):
        speed = 10_000 + step % 7 if step < 60 else 6_000
        found += [(step, one) for one in watched.line(f"{speed:,} tokens/s", at(step))]
    ((step, verdict),) = found
    assert step == 62
    assert "the throughput is 6,000, below 0.7 times the median" in verdict.message
    assert "3 of the last 5 points" in verdict.message


def test_a_ratio_is_not_judged_before_there_is_a_history_nor_below_zero():
    """The first values of a run are wild, and a multiple of a negative median is no limit."""
    spike = rule(operator="gt", ratioToMedian=2.0)
    assert told(spike, [1, 900, 1, 900, 1]) == []
    assert told(spike, [-5.0] * 40 + [-1.0, 7.0]) == []


def test_a_loss_that_climbs_is_found_by_its_change_and_one_odd_value_is_not():
    """A divergence crosses its threshold only when the run is long lost."""
    climbs = rule(operator="gt", changePerPoint=0.01, historyDataPoints=20)
    steady = [2.0 + 0.001 * (step % 3) for step in range(60)]
    assert told(climbs, steady) == []
    assert told(climbs, [*steady[:30], 1e6, *steady[30:]]) == []
    slow_at = told(climbs, steady + [2.0 + 0.05 * step for step in range(40)])
    assert len(slow_at) == 1
    assert 60 < slow_at[0] < 85


@given(st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=40), st.floats(-100, 100))
def test_a_straight_line_changes_by_its_slope(noise, slope):
    """A rate that is off by a factor makes every limit a guess."""
    line = tuple(slope * step for step in range(len(noise)))
    assert change_per_point(line) == pytest.approx(slope, abs=1e-9)
    assert isinstance(change_per_point(tuple(noise)), float)


@given(
    st.sampled_from(["metricThreshold", "ratioToMedian", "changePerPoint"]),
    st.sampled_from(list(Operator)),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=80),
)
def test_no_series_of_numbers_breaks_a_limit(basis, operator, values):
    """An overflow in one rule would end the watch."""
    limit = Limit(basis=basis, operator=operator, threshold=2.0, data_points=2, history=7)
    points = Points(limit)
    for value in values:
        assert points.push(value) in {True, False}
        assert points.reason()
    points.push_bad()


# --- a metric that is not there ------------------------------------------------------------------


def test_a_step_line_without_the_metric_that_was_asked_for_is_a_violation():
    """The framework leaves a loss out that is not finite, and the rule sees nothing."""
    optional = r"step (?P<step>\d+)(?: loss (?P<loss>\S+))?"
    silent = rule(logPattern=optional, operator="gt", metricThreshold=9)
    asked = silent | {"metric": "loss"}
    for fields, state in ((silent, S.HEALTHY), (asked, S.SLOW)):
        watched = LogEvaluator(parse_rules([fields]), at(0))
        watched.line("step 1 loss 2", at(1))
        found = watched.line("step 2", at(2))
        assert (watched.state, len(found)) == (state, int(state is S.SLOW))
    assert "the loss is missing from its line at step 2" in found[0].message


def test_the_metric_that_is_judged_may_be_chosen():
    """A pattern with several names would be judged by the first."""
    both = rule(
        logPattern=r"loss (?P<loss>\S+) norm (?P<grad_norm>\S+)",
        metric="grad_norm",
        operator="gt",
        metricThreshold=5,
    )
    watched = LogEvaluator(parse_rules([both]), at(0))
    assert watched.line("loss 90 norm 1", at(1)) == []
    (verdict,) = watched.line("loss 1 norm 6", at(2))
    assert "the grad norm is 6, above 5" in verdict.message
    assert {name: one.value for name, one in watched.series.items()} == {
        "loss": 1.0,
        "grad_norm": 6.0,
    }


# --- numbers and units ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2.31", 2.31),
        ("2.104583E+00", 2.104583),
        ("1,234.5", 1234.5),
        ("503,316,480", 503316480.0),
        ("'2.31',", 2.31),
        ("1.2e-05", 1.2e-05),
        ("1.049B", 1.049e9),
        ("9.5K", 9500.0),
        ("99.8%", 99.8),
        ("tensor(2.5,", 2.5),
        ("-inf", -math.inf),
        ("1.#INF", math.inf),
    ],
)
def test_numbers_are_read_as_frameworks_print_them(text, value):
    """A number misread by its separator is off by a thousand."""
    assert number(text) == value


@pytest.mark.parametrize(
    "text", ["nan", "NaN", "nan.0", "-nan(ind)", "-NAN", "tensor(nan, dev", "1.#QNAN"]
)
def test_every_spelling_of_nan_is_nan(text):
    """One that is not known is "no number", and the message says nothing of use."""
    assert math.isnan(number(text) or 0.0)


@pytest.mark.parametrize("text", ["", "N/A", "step:", "1_000", "0x10", "१२", "2.3.4", "e", "--1"])
def test_what_is_no_number_is_none(text):
    """Python takes more for a number than any framework prints."""
    assert number(text) is None


@pytest.mark.parametrize(
    ("metric", "line", "group", "value"),
    [
        ("step_time", "elapsed time per iteration (ms): 1834.2 | x", "1834.2", 1.8342),
        ("step_time", "12/50 [00:31<01:38,  2.59s/it]", "2.59", 2.59),
        ("step_time", "100/1000 [00:41<06:09,  2.50it/s, loss", "2.50", 0.4),
        ("step_time", "time 39.71ms, mfu", "39.71ms,", 0.03971),
        ("step_time", "step_time_ms=12.5", "12.5", 0.0125),
        ("step_time", "took 1.5 minutes", "1.5", 90.0),
        ("step_time", "'step_time': 1.25, 'x': 3", "1.25", 1.25),
        ("throughput", "10.00s/it]", "10.00", 0.1),
        ("throughput", "2.44it/s", "2.44it/s", 2.44),
        ("throughput", "tps: 7,282  tflops", "7,282", 7282.0),
        ("throughput", "30 it/min", "30", 0.5),
        ("throughput", "412.7 | learning rate", "412.7", 412.7),
        ("loss", "loss: 2.5 ms", "2.5", 2.5),
    ],
)
def test_units_make_seconds_of_times_and_nothing_of_the_rest(metric, line, group, value):
    """A bar that turns from it/s to s/it would look a hundred times faster."""
    data = line.encode() + b"\n"
    start = data.index(group.encode())
    edges = (start, start + len(group.encode()))
    assert measured(metric, data, *edges) == pytest.approx(value)
    together = measured_all(metric, data, [edges, edges])
    assert together in ([], [pytest.approx(value)] * 2)


@pytest.mark.parametrize(
    ("text", "step"), [(b"12", 12), (b"1,234", 1234), (b"x", None), (b"", None)]
)
def test_a_step_is_a_whole_number_or_none(text, step):
    """A checkpoint is chosen by it."""
    assert step_number(text) == step


def test_a_line_without_a_step_belongs_to_the_last_one_before_it():
    """Some frameworks print the step on one line and the loss on the next."""
    rules = parse_rules(
        [
            {"name": "Head", "logPattern": r"^step (?P<step>\d+)"},
            {"name": "Loss", "logPattern": r"^  loss (?P<loss>\S+)"},
        ]
    )
    reads: list = []
    watched = LogEvaluator(
        rules, at(0), on_extracted=lambda _, one, __: reads.append((one.step, one.value))
    )
    watched.lines(["  loss 9", "step 1", "  loss 8", "step 2"], at(1))
    watched.lines(["  loss 7", "step 3", "  loss 6"], at(2))
    assert reads == [(None, 9.0), (1, 8.0), (2, 7.0), (3, 6.0)]


# --- whose silence counts -------------------------------------------------------------------------


def node_of(count: int, fields: dict, *, world_size: int | None = None) -> list[LogEvaluator]:
    rules, view = parse_rules([fields]), NodeView()
    size = count if world_size is None else world_size
    return [
        LogEvaluator(
            rules,
            at(0),
            place=Place(rank=n, world_size=size, lead=n == 0, whole_job=size == count),
            node=view,
        )
        for n in range(count)
    ]


STEP = {
    "name": "Step",
    "logPattern": r"step (?P<step>\d+)",
    "expectedStartCutOffInSeconds": 100,
    "expectedRecurringFrequencyInSeconds": 10,
}


def hanging(ranks: list[LogEvaluator], now_s: float) -> list[int]:
    return [n for n, rank in enumerate(ranks) if rank.timer(at(now_s))]


def test_without_a_scope_a_rank_that_never_printed_waits_for_nothing():
    """A rule list for one rank's output must work unchanged on eight."""
    ranks = node_of(4, STEP)
    ranks[3].line("step 1", at(50))
    assert hanging(ranks, 55) == []
    assert hanging(ranks, 61) == [3]
    assert hanging(ranks, 500) == []
    nobody = node_of(4, STEP)
    assert hanging(nobody, 99) == []
    assert hanging(nobody, 101) == [0]  # told once, not once a rank


def test_a_rank_that_spoke_for_a_silent_node_recovers_when_another_begins():
    """Its state would stay HANGING while the job trains."""
    ranks = node_of(2, STEP)
    assert hanging(ranks, 101) == [0]
    ranks[1].line("step 1", at(102))
    assert hanging(ranks, 103) == []
    assert ranks[0].state is S.WAITING


def test_every_means_every_rank():
    """A rank that prints nothing is then the fault that was asked for."""
    ranks = node_of(3, STEP | {"rankScope": "every"})
    ranks[0].line("step 1", at(95))
    assert hanging(ranks, 101) == [1, 2]


def test_any_means_that_one_rank_is_enough_and_the_printer_may_change():
    """A framework that prints on whichever rank is first would look hung on the others."""
    ranks = node_of(3, STEP | {"rankScope": "any"})
    ranks[0].line("step 1", at(50))
    ranks[2].line("step 2", at(58))
    assert hanging(ranks, 65) == []
    assert hanging(ranks, 69) == [0]
    ranks[1].line("step 3", at(70))
    assert ranks[0].state is S.HEALTHY
    # Where the node is part of a job, its silence from the start says nothing.
    part = node_of(3, STEP | {"rankScope": "any"}, world_size=6)
    assert hanging(part, 1000) == []


@pytest.mark.parametrize(("scope", "silent"), [("first", [0]), ("last", [2])])
def test_first_and_last_are_ranks_of_the_job(scope, silent):
    """Megatron prints on the last rank, most others on the first."""
    ranks = node_of(3, STEP | {"rankScope": scope})
    assert hanging(ranks, 101) == silent
    assert [bool(rank.states()) for rank in ranks] == [n in silent for n in range(3)]


# --- time of the past ----------------------------------------------------------------------------


def test_a_block_of_the_past_is_judged_as_if_its_lines_came_one_by_one():
    """A log that is tried against rules would show no hang that had been in it."""
    rules = parse_rules(
        [
            STEP,
            {"name": "Eval", "phaseStart": "eval", "phaseEnd": "done", "phaseLimitInSeconds": 60},
        ]
    )
    lines = ["5 step 1", "9 step 2", "30 step 3", "31 eval", "80 done", "85 step 4", "99 step 5"]
    watched = LogEvaluator(rules, at(0))

    def when(block, position):
        start = block.data.rfind(b"\n", 0, position) + 1
        return at(int(block.line(start).split()[0]))

    found = watched.judge(block_of(lines), at(0), when=when)
    assert [(one.state, one.step) for one in found] == [(S.HANGING, 2), (S.HANGING, 4)]
    assert [one.age_ns for one in found] == [seconds(11), seconds(4)]
