"""Rules: what is refused, what a line does to a rule, and what the clock does."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scout.clock import Instant, seconds
from sidecar.api import FaultKind
from sidecar.logs.defaults import default_rules
from sidecar.logs.evaluator import SILENT_START_MAX, LogEvaluator, LogState, clean, number
from sidecar.logs.rules import RULES_MAX, RuleError, parse_rules, usable_rules, with_defaults

S = LogState
LOSS = r"loss[:=] *(\S+)"


def at(value_s: float) -> Instant:
    return Instant(seconds(value_s))


def evaluator(*rules: dict, start_s: float = 0.0) -> LogEvaluator:
    return LogEvaluator(parse_rules(rules), at(start_s))


def rule(name: str = "r", pattern: str = "x", **fields: object) -> dict:
    return {"name": name, "logPattern": pattern, **fields}


def spike(pattern: str = LOSS, operator: str = "gt", threshold: float = 2.0, **more: object):
    return rule("Spike", pattern, operator=operator, metricThreshold=threshold, **more)


def show(watched: LogEvaluator, *lines: str, now_s: float = 1.0) -> list:
    return [verdict for line in lines for verdict in watched.line(line, at(now_s))]


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (rule(metricThreshold="2.5", operator="gt"), "metricThreshold", "the text '2.5'"),
        (rule(metricThreshold=True, operator="gt"), "metricThreshold", "a finite number"),
        (rule(metricThreshold=math.nan, operator="gt"), "metricThreshold", "a finite number"),
        (rule(metricThreshold=10**400, operator="gt"), "metricThreshold", "a finite number"),
        (rule(pattern="(x)", operator="gt"), "operator", "without metricThreshold"),
        (rule(pattern="(x)", metricThreshold=2), "metricThreshold", "without operator"),
        (rule(metricThreshold=2, operator="gt"), "logPattern", "needs a group"),
        (rule(pattern="(x)", metricThreshold=2, operator=">"), "operator", "one of gt, lt, eq"),
        (rule(metricEvaluationDataPoints=3), "metricEvaluationDataPoints", "without"),
        (rule(metricEvaluationDataPoints=0), "metricEvaluationDataPoints", "from 1"),
        (rule(metricEvaluationDataPoints=1.5), "metricEvaluationDataPoints", "whole number"),
        (rule(faultOnMatch="false"), "faultOnMatch", "the text 'false'"),
        (rule(faultOnMatch=1), "faultOnMatch", "true or false"),
        (rule(expectedStartCutOffInSeconds=0), "expectedStartCutOffInSeconds", "above 0"),
        (rule(expectedStartCutOffInSeconds="120"), "expectedStartCutOffInSeconds", "'120'"),
        (
            rule(expectedRecurringFrequencyInSeconds=math.inf),
            "expectedRecurringFrequencyInSeconds",
            "above 0",
        ),
        (rule(expectedRecuringFrequencyInSeconds=3), "expectedRecuringFrequencyInSeconds", "did"),
        (rule(pattern="(?=x)"), "logPattern", "looking ahead or behind"),
        (rule(pattern=r"(?<!best )loss"), "logPattern", "looking ahead or behind"),
        (rule(pattern=r"(a)\1"), "logPattern", "invalid escape sequence"),
        (rule(pattern="(x"), "logPattern", "missing )"),
        (rule(pattern="(a{1000}){1000}"), "logPattern", "RE2 does not take it"),
        (rule(pattern=""), "logPattern", "1 to"),
        (rule(pattern="\ud800"), "logPattern", "RE2 does not take it"),
        (rule(stopPattern="*"), "stopPattern", "RE2 does not take it"),
        (rule(stopPattern=3), "stopPattern", "an expression"),
        ({"name": "r"}, "logPattern", "missing"),
        ({"name": "r", "logPattern": None}, "logPattern", "but is None"),
    ],
)
def test_a_rule_that_would_not_do_what_it_says_is_refused_with_name_field_and_reason(
    fields, field, words
):
    """It looks like protection and is none, until the day it was needed."""
    with pytest.raises(RuleError) as refused:
        parse_rules([rule("first"), fields])
    assert refused.value.rule == "r"
    assert refused.value.field == field
    assert words in refused.value.reason
    assert str(refused.value).startswith(f"log rule 'r': {field}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"logPattern": "x"}], "log rule '#1': name: it is missing"),
        ([rule("a"), {"name": 3, "logPattern": "x"}], "log rule '#2': name: it must be a text"),
        ([rule("a"), rule("a", "y")], "log rule 'a': name: another rule has it"),
        (["x"], "log rule '#1': name: a rule is a mapping"),
        ([rule(f"r{n}") for n in range(RULES_MAX + 1)], f"at most {RULES_MAX}"),
    ],
)
def test_a_rule_that_cannot_be_told_from_others_is_refused(rules, words):
    """A finding under the wrong name sends people to the wrong place."""
    with pytest.raises(RuleError) as refused:
        parse_rules(rules)
    assert words in str(refused.value)


def test_one_wrong_rule_takes_no_other_with_it():
    """A slip in one rule would switch off the protection of all."""
    usable, refused = usable_rules([rule("a"), rule("b", "(x"), rule("c"), rule("a", "y")])
    assert [one.name for one in usable] == ["a", "c"]
    assert [(error.rule, error.field) for error in refused] == [("b", "logPattern"), ("a", "name")]


def test_fields_that_are_null_count_as_left_out():
    """A template that fills in nothing would be refused for it."""
    (parsed,) = parse_rules([rule(stopPattern=None, metricThreshold=None, faultOnMatch=None)])
    assert (parsed.stop, parsed.limit, parsed.fault_on_match) == (None, None, False)


# --- lines ----------------------------------------------------------------------------------


def test_a_pattern_is_found_anywhere_in_a_line():
    """`out of memory` must find `CUDA out of memory`, or most error rules never fire."""
    watched = evaluator(rule("Oom", "out of memory", faultOnMatch=True))
    (verdict,) = show(watched, "RuntimeError: CUDA out of memory")
    assert (verdict.rule, verdict.kind) == ("Oom", FaultKind.LOG_RULE)
    assert verdict.line == "RuntimeError: CUDA out of memory"
    assert "CUDA out of memory" in verdict.message


@pytest.mark.parametrize(
    ("operator", "threshold", "value", "violated"),
    [
        ("gt", 2.5, "2.2", False),
        ("gt", 2.5, "2.6", True),
        ("gt", 2.5, "2.5", False),
        ("gteq", 2.5, "2.5", True),
        ("lt", 0.5, "0.2", True),
        ("lt", 0.5, "0.5", False),
        ("lteq", 0.5, "0.5", True),
        ("eq", 0.0, "0.000", True),
        ("eq", 0.0, "1e-3", False),
        ("lt", 80, "1,234.5", False),
        ("gt", 2, "2.31,", True),
    ],
)
def test_thresholds_are_compared_as_written(operator, threshold, value, violated):
    """A threshold cut to a whole number raises false alarms and misses real ones."""
    watched = evaluator(spike(operator=operator, threshold=threshold))
    verdicts = show(watched, f"loss: {value}")
    assert [verdict.kind for verdict in verdicts] == [FaultKind.LOG_SLOW] * violated
    assert watched.states() == {"Spike": S.SLOW if violated else S.HEALTHY}


def test_only_violations_in_a_row_make_a_rule_slow():
    """One outlier would restart a job that is well."""
    watched = evaluator(spike(metricEvaluationDataPoints=3))
    assert show(watched, "loss: 9", "loss: 9", "loss: 1", "loss: 9", "loss: 9") == []
    assert watched.state is S.HEALTHY
    (verdict,) = show(watched, "noise between", "loss: 9", "loss: 9", "loss: 9")
    assert verdict.kind is FaultKind.LOG_SLOW
    assert "3 times in a row" in verdict.message
    assert watched.state is S.SLOW


def test_a_slow_rule_that_recovers_may_speak_again_and_only_then():
    """Repeated findings bury the first; a silent relapse is missed."""
    watched = evaluator(spike())
    assert len(show(watched, "loss: 9", "loss: 9", "loss: 8")) == 1
    assert show(watched, "loss: 1") == []
    assert watched.state is S.HEALTHY
    assert len(show(watched, "loss: 9")) == 1


@pytest.mark.parametrize("value", ["nan", "NaN", "NAN,", "inf", "-inf", "Infinity", "1e999"])
def test_a_metric_that_is_not_finite_is_a_violation(value):
    """Compared with a threshold, nan is never too large: the run would train on garbage."""
    watched = evaluator(spike(metricEvaluationDataPoints=3))
    assert show(watched, "loss: 2.1", f"loss: {value}") == []
    (verdict,) = show(watched, f"loss: {value}")
    assert (verdict.kind, watched.state) == (FaultKind.LOG_SLOW, S.SLOW)
    assert value.strip(",") in verdict.message


def test_a_loss_that_is_not_finite_is_a_fault_where_no_limit_asks_for_more_points():
    """A rule that only follows the steps would call a run healthy that has no loss any more."""
    watched = evaluator(rule("Step", r"step (?P<step>\d+) loss (?P<loss>\S+)"))
    assert show(watched, "step 1 loss 2.0") == []
    (verdict,) = show(watched, "step 2 loss nan")
    assert (verdict.kind, verdict.step) == (FaultKind.LOG_RULE, 2)
    assert watched.state is S.FAULTED


def test_a_metric_that_is_no_number_is_a_violation_and_hides_nothing_from_other_rules():
    """`loss: N/A FATAL` must not make the rule for FATAL blind."""
    watched = evaluator(spike(), rule("Fatal", "FATAL", faultOnMatch=True))
    verdicts = show(watched, "loss: N/A FATAL")
    assert [(v.rule, v.kind) for v in verdicts] == [
        ("Spike", FaultKind.LOG_SLOW),
        ("Fatal", FaultKind.LOG_RULE),
    ]
    assert "no number" in verdicts[0].message


def test_a_group_that_took_no_part_is_no_metric():
    """A step line without a loss would count against the loss."""
    watched = evaluator(spike(r"step \d+(?: loss: (\S+))?"))
    assert show(watched, "step 1", "step 2 loss: 1") == []
    assert watched.state is S.HEALTHY


def test_a_stop_pattern_switches_its_rule_off_and_no_other():
    """The end of training would be taken for a hang."""
    watched = evaluator(
        rule("Step", "step", expectedRecurringFrequencyInSeconds=5, stopPattern="done"),
        rule("Other", "x", expectedStartCutOffInSeconds=5),
    )
    show(watched, "step 1", "training done")
    assert [verdict.rule for verdict in watched.timer(at(100))] == ["Other"]
    assert watched.states()["Step"] is S.HEALTHY


def test_a_fault_comes_before_a_stop_pattern_in_the_same_line():
    """`done with FATAL error` is not a clean end."""
    watched = evaluator(rule("F", "FATAL", faultOnMatch=True, stopPattern="done"))
    assert len(show(watched, "done with FATAL error")) == 1
    assert watched.state is S.FAULTED


def test_a_fault_stays_and_is_told_once():
    """A flood of the same line would push every other finding out."""
    watched = evaluator(rule("F", "FATAL", faultOnMatch=True))
    assert len(show(watched, "FATAL", "FATAL", "fine", "FATAL")) == 1
    assert watched.state is S.FAULTED
    assert watched.timer(at(1e6)) == []


def test_named_groups_say_which_is_the_step_and_which_the_loss():
    """Without its step a fault cannot be ordered against a checkpoint."""
    watched = evaluator(spike(r"step (?P<step>[\d,]+) .*loss (?P<loss>\S+)"))
    (verdict,) = show(watched, "step 1,234 lr 0.1 loss 7.5")
    assert verdict.step == 1234
    assert verdict.message.endswith("the loss is 7.5, above 2 at step 1234")
    other = evaluator(spike(r"step (?P<step>\d+) norm (\S+)"))
    assert show(other, "step 99 norm 1") == []
    (verdict,) = show(other, "step 99 norm 3")
    assert verdict.step == 99


@pytest.mark.parametrize("step", ["9" * 30, "", "१२"])
def test_a_step_that_is_none_is_left_out(step):
    """A number beyond 64 bits would break the message that carries it."""
    watched = evaluator(rule("F", r"step (?P<step>\S*) bad", faultOnMatch=True))
    (verdict,) = show(watched, f"step {step} bad")
    assert verdict.step is None


def test_colours_and_launchers_prefixes_are_stripped():
    """A rule for the start of a line would depend on how the job was launched."""
    assert clean("[default0]:[rank0]: \x1b[1;31mloss\x1b[0m: nan") == "loss: nan"
    assert clean("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ text") == "link text"
    assert clean("[2024-01-01 10:00:00] INFO") == "[2024-01-01 10:00:00] INFO"
    watched = evaluator(rule("F", "^loss: nan$", faultOnMatch=True))
    assert len(show(watched, "[rank3]: \x1b[32mloss: nan\x1b[0m")) == 1


def test_no_pattern_can_stall_the_node():
    """A pattern that backtracks freezes heartbeats and stops; this one takes others minutes."""
    watched = evaluator(rule("Bad", r"(a+)+b"), rule("Worse", r"^(\S+\s*)*loss: ([\d.]+)$"))
    assert show(watched, "a" * 100_000, "word " * 20_000) == []


# --- the clock ------------------------------------------------------------------------------


def test_no_first_match_within_the_start_cut_off_is_a_hang():
    """A job that never begins would wait for ever."""
    watched = evaluator(rule("Start", "step", expectedStartCutOffInSeconds=120), start_s=1000)
    assert watched.next_deadline() == at(1120)
    assert watched.timer(at(1119.9)) == []
    (verdict,) = watched.timer(at(1121))
    assert (verdict.kind, verdict.age_ns) == (FaultKind.LOG_HANG, seconds(1))
    assert "within 120 s of the start" in verdict.message
    assert watched.timer(at(2000)) == []
    assert watched.next_deadline() is None


def test_silence_longer_than_the_recurrence_is_a_hang_that_a_late_match_ends():
    """A stall of minutes would show only when the collective's own timeout fires."""
    watched = evaluator(rule("Step", "step", expectedRecurringFrequencyInSeconds=10))
    show(watched, "step 1", now_s=5)
    assert watched.next_deadline() == at(15)
    assert watched.timer(at(14)) == []
    (verdict,) = watched.timer(at(16))
    assert (verdict.line, verdict.state) == ("step 1", S.HANGING)
    assert "for 11 s" in verdict.message
    assert show(watched, "step 2", now_s=17) == []
    assert watched.state is S.HEALTHY
    assert len(watched.timer(at(27))) == 1


def test_a_recurrence_alone_also_finds_a_job_that_never_prints():
    """Without a start cut-off nobody would ever look."""
    watched = evaluator(rule("Step", "step", expectedRecurringFrequencyInSeconds=10))
    assert watched.timer(at(60)) == []
    (verdict,) = watched.timer(Instant(SILENT_START_MAX))
    assert verdict.kind is FaultKind.LOG_HANG


def test_only_instants_that_are_handed_in_count():
    """A step of the wall clock would look like an hour of silence."""
    watched = evaluator(
        rule("Step", "step", expectedStartCutOffInSeconds=1, expectedRecurringFrequencyInSeconds=1),
        start_s=5e6,
    )
    show(watched, "step", now_s=5e6)
    assert watched.timer(at(5e6 + 0.5)) == []


def test_the_worst_rule_is_the_ranks_state():
    """A healthy rule would paint over a faulted one."""
    watched = evaluator(
        rule("Waits", "never"),
        rule("Well", "step"),
        spike(),
        rule("Hang", "never", expectedStartCutOffInSeconds=1),
        rule("Fatal", "FATAL", faultOnMatch=True),
    )
    seen = [watched.state]
    for line in ("step", "loss: 9"):
        show(watched, line, now_s=0.5)
        seen.append(watched.state)
    watched.timer(at(2))
    seen.append(watched.state)
    show(watched, "FATAL")
    seen.append(watched.state)
    assert seen == [S.WAITING, S.HEALTHY, S.SLOW, S.HANGING, S.FAULTED]
    assert watched.states() == {
        "Waits": S.WAITING,
        "Well": S.HEALTHY,
        "Spike": S.SLOW,
        "Hang": S.HANGING,
        "Fatal": S.FAULTED,
    }


# --- the shipped rules ----------------------------------------------------------------------

MEGATRON = (
    " [2026-01-01 00:00:00] iteration {:8}/     500 | consumed samples:     96 | elapsed time per "
    "iteration (ms): 100.0 | learning rate: 1.0E-4 | global batch size:     8 | lm loss: {} | "
    "loss scale: {} | grad norm: {} | number of skipped iterations: 0 | "
    "number of nan iterations: 0 |"
)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("iter 12: loss nan, time 39.71ms, mfu 31.20%", 12),
        ("step 250: train loss nan, val loss nan", 250),
        (MEGATRON.format(12, "NAN", "1.0", "NAN"), 12),
        (MEGATRON.format(12, "INF", "1.0", "1.5"), 12),
        ("{'loss': nan, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 0.01}", None),
        ("{'loss': 'nan', 'grad_norm': 'nan'}", None),
        ("{'train_loss': nan, 'epoch': 1.0}", None),
        ("[rank0]:\x1b[32mstep: 12  loss: nan  memory: 1.0GiB\x1b[0m", 12),
        ("Epoch 0:  10%|█ | 10/100 [00:01<00:10, 8.91it/s, loss=nan, v_num=0]", None),
        ("Step 7/100 loss: tensor(nan, device='cuda:0', grad_fn=<Mean>)", 7),
        ("step 31 loss: -inf", 31),
        ("INFO:trainer:step=31 loss=NaN", 31),
        ("loss: nan", None),
    ],
)
def test_the_shipped_rule_finds_a_loss_that_is_not_finite(line, step):
    """A zero-configuration job would train on garbage until somebody looks."""
    (verdict,) = show(LogEvaluator(default_rules(), at(0)), line)
    assert (verdict.rule, verdict.kind, verdict.step) == (
        "NonFiniteLoss",
        FaultKind.LOG_RULE,
        step,
    )


@pytest.mark.parametrize(
    ("line", "rule_name"),
    [
        (
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "CudaOutOfMemory",
        ),
        ("RuntimeError: CUDA out of memory.", "CudaOutOfMemory"),
        ("RuntimeError: CUDA error: out of memory", "CudaOutOfMemory"),
        ("RuntimeError: CUDA error: device-side assert triggered", "CudaDeviceAssert"),
        (
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=A)",
            "NcclWatchdogTimeout",
        ),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "UncorrectableEcc"),
    ],
)
def test_the_shipped_rules_find_what_ends_a_run(line, rule_name):
    """The job would hang until its peers time out."""
    (verdict,) = show(LogEvaluator(default_rules(), at(0)), line)
    assert (verdict.rule, verdict.kind) == (rule_name, FaultKind.LOG_RULE)


@pytest.mark.parametrize(
    "line",
    [
        MEGATRON.format(12, "2.1", "inf", "NAN"),
        "iter 12: loss 2.31, best val loss inf",
        "best loss: inf",
        "best_loss=inf min_loss=inf",
        "{'eval_loss': nan, 'epoch': 1.0}",
        "step 12 loss info: see below",
        "loss: nano",
        "checking the loss for nan and inf values",
        "CUDA out of memory handling is on",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 watchdog timeout 600 s",
        "uncorrectable ECC errors so far: 0",
    ],
)
def test_the_shipped_rules_leave_a_healthy_run_alone(line):
    """Every job gets them: one careless match restarts jobs everywhere."""
    assert show(LogEvaluator(default_rules(), at(0)), line) == []


def test_a_job_can_replace_a_shipped_rule_by_its_name():
    """Whoever skips bad batches on purpose would have no way out."""
    own = parse_rules([rule("NonFiniteLoss", "our own words", faultOnMatch=True)])
    merged = with_defaults(own, default_rules())
    assert merged[0] is own[0]
    assert sorted(one.name for one in merged) == sorted(one.name for one in default_rules())


# --- many lines at once ---------------------------------------------------------------------

LINES = st.lists(
    st.one_of(
        st.sampled_from(
            ["step 1 loss: 9", "loss: 1", "loss: nan", "", "end", "FATAL", "a", "\x00"]
        ),
        st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])),
    ),
    max_size=30,
)


@given(LINES)
@example(["a", "b"])
def test_lines_at_once_mean_what_they_mean_one_by_one(lines):
    """What is found would depend on how fast the file was read."""
    rules = [
        spike(metricEvaluationDataPoints=2),
        rule("Stops", "step", stopPattern="^end$"),
        rule("Whole", r"\Aa\z", faultOnMatch=True),
        rule("Ends", "^a$", faultOnMatch=True),
        rule("Space", r"a\s+b", faultOnMatch=True),
        rule("Not", "a[^x]b", faultOnMatch=True),
        rule("Dot", "(?s)a.b", faultOnMatch=True),
        rule("Flags", "(?-m)^FATAL$", faultOnMatch=True),
        rule("Empty", r"^\s*$"),
    ]
    together, alone = evaluator(*rules), evaluator(*rules)
    assert together.lines(lines, at(1)) == [v for line in lines for v in alone.line(line, at(1))]
    assert together.states() == alone.states()
    assert together.matches == alone.matches


@given(st.text())
def test_no_text_breaks_the_rules(text):
    """One odd byte would end the watch over a whole node in silence."""
    watched = evaluator(spike(r"(?s)(.*)"), rule("F", "FATAL", faultOnMatch=True))
    watched.line(text, at(1))
    assert "F" in [verdict.rule for verdict in watched.line("FATAL", at(1))]
    assert number(text) is None or isinstance(number(text), float)
