"""Output of real jobs, read by rules: one test per recorded case, under its id."""

import math
from pathlib import Path

import pytest
import yaml

from scout.clock import Instant, seconds
from sidecar.api import FaultKind
from sidecar.logs.block import block_of
from sidecar.logs.defaults import default_rules
from sidecar.logs.evaluator import LogEvaluator, LogState
from sidecar.logs.library.catalogue import entries
from sidecar.logs.library.reading import readings
from sidecar.logs.lines import LineSplitter
from sidecar.logs.prefixes import origin, without_prefix
from sidecar.logs.rules import parse_rules, usable_rules
from sidecar.logs.silence import NodeView, Place
from sidecar.logs.verdicts import worst

FILE = Path(__file__).resolve().parents[2] / "fixtures" / "engine_cases" / "text.yaml"
CASES = yaml.safe_load(FILE.read_text(encoding="utf-8"))
S = LogState


def at(value_s: float) -> Instant:
    return Instant(seconds(value_s))


def named(case: dict) -> str:
    return f"{case['id']}-{case['claim'].replace(' ', '-')}"


def same(found: list, expected: list) -> bool:
    def close(one: float, other: float) -> bool:
        return one == pytest.approx(other, rel=1e-12) or (math.isnan(one) and math.isnan(other))

    return len(found) == len(expected) and all(
        metric == wanted[0] and close(value, float(wanted[1])) and step == wanted[2]
        for (metric, value, step), wanted in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=named)
def test_recorded_output_is_read_as_a_person_would_read_it(case):
    """A rule that reads something else in a real log protects nobody."""
    reads: list = []
    rules = parse_rules(case["rules"])
    watched = LogEvaluator(
        rules,
        at(0),
        on_extracted=lambda _, one, __: reads.append((one.metric, one.value, one.step)),
    )
    splitter = LineSplitter()
    shown: list[str] = []
    for number, piece in enumerate(case["pieces"]):
        data = piece if isinstance(piece, bytes) else piece.encode()
        block = splitter.feed_block(data)
        shown += block.data.decode().split("\n")[:-1]
        watched.judge(block, at(number))
        watched.timer(at(number))
    assert same(reads, case["reads"]), reads
    assert watched.states() == {name: S(state) for name, state in case["states"].items()}
    if "shown" in case:
        assert shown == case["shown"]
    if "undecodable" in case:
        assert splitter.undecodable == case["undecodable"]
    assert not any("\ufffd" in line for line in shown) or case.get("undecodable")


# --- who wrote a line -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "rank", "local_rank", "text"),
    [
        ("[rank3]:[titan] step: 7  loss:  3.1", 3, None, "[titan] step: 7  loss:  3.1"),
        ("[default0]:[rank12]:[E817 02:11:12.001 x] y", 12, 0, "[E817 02:11:12.001 x] y"),
        ("[trainer3]: step: 7", None, 3, "step: 7"),
        ("(RayWorkerWrapper pid=4009, ip=192.0.2.17) step: 7", None, None, "step: 7"),
        ("192.0.2.17: step: 7", None, None, "step: 7"),
        ("i.pretrain/0 I0215 10:00:00 step: 7", None, None, "I0215 10:00:00 step: 7"),
        ("[1,26]<stdout>:step: 7", 26, None, "step: 7"),
        (" 26: step: 7", 26, None, "step: 7"),
    ],
)
def test_a53_launchers_prefixes_are_stripped_and_their_ranks_recorded(line, rank, local_rank, text):
    """A rule for the start of a line would depend on the launcher, and faults on rank 0."""
    found = origin(line)
    assert (found.rank, found.local_rank, found.text) == (rank, local_rank, text)
    assert without_prefix(line) == text
    starts = text.split(" ")[0].replace("[", r"\[").replace("]", r"\]")
    rule = {"name": "F", "logPattern": f"^{starts}", "faultOnMatch": True}
    watched = LogEvaluator(parse_rules([rule]), at(0))
    (verdict,) = watched.line(line, at(1))
    assert (verdict.rank, verdict.line) == (rank, text)


def test_a49_a_rank_inside_a_line_is_read_and_a_list_is_no_step():
    """The finding would name the rank whose file it is, not the one that speaks."""
    line = (
        "[2024-01-19 08:21:59,664] [INFO] [axolotl.utils.samplers:178] [PID:6552] [RANK:4] "
        "gather_len_batches: [1201, 1201]"
    )
    assert (origin(line).rank, origin(line).text) == (4, line)
    step = {"name": "Step", "logPattern": r"(?i)\bstep[ :=]+(?P<step>\d+)"}
    watched = LogEvaluator(parse_rules([step]), at(0))
    assert watched.line(line, at(1)) == []
    assert watched.states() == {"Step": S.WAITING}


# --- long lines and odd files -------------------------------------------------------------------


def test_a62_a_line_of_megabytes_is_cut_and_the_next_one_is_read():
    """One dump of a batch would fill the memory, or end the watch over a rank."""
    rule = {"name": "Loss", "logPattern": r"step: (?P<step>\d+)  loss:  (?P<loss>\S+)"}
    reads: list = []
    watched = LogEvaluator(
        parse_rules([rule]),
        at(0),
        on_extracted=lambda _, one, __: reads.append((one.value, one.step)),
    )
    splitter = LineSplitter()
    long_line = b"input_ids: [" + b"1, " * (4 << 20) + b"] step: 21  loss:  2.65000"
    data = long_line + b"\nstep: 22  loss:  2.64000\n"
    largest = 0
    for start in range(0, len(data), 256 << 10):
        block = splitter.feed_block(data[start : start + (256 << 10)])
        watched.judge(block, at(1))
        largest = max(largest, len(splitter.partial))
    assert largest <= 64 << 10
    assert splitter.cut == 1
    # All of a long line is judged, piece by piece: its end too.
    assert reads == [(2.65, 21), (2.64, 22)]


def test_a62_a_long_line_is_not_cut_inside_a_number():
    """Half of 12345 is 12, and below every limit."""
    splitter = LineSplitter(partial_bytes_max=100)
    lines = splitter.feed(b"x" * 80 + b" loss: 12345678901234567890 and more words to come\n")
    assert any("12345678901234567890" in line.split() for line in lines)
    assert splitter.cut == 1
    assert LineSplitter(10).feed("é".encode() * 10 + b"\n") == ["é" * 5, "é" * 5]


# --- what a value means -------------------------------------------------------------------------


def test_a71_a_value_that_is_not_finite_counts_as_a_violation_and_resets_nothing():
    """A value of nan compares as false: the row would begin anew at every one."""
    rule = {
        "name": "LossSpikeDetection",
        "logPattern": r"loss: (\S+)",
        "operator": "gt",
        "metricThreshold": 2.0,
        "metricEvaluationDataPoints": 5,
    }
    watched = LogEvaluator(parse_rules([rule]), at(0))
    slow_at = []
    for step, loss in enumerate(["2.1", "2.2", "nan", "2.3", "2.4", "1.9", "2.5"]):
        found = watched.line(f"step: {step} loss: {loss}", at(step))
        slow_at += [(step, verdict.kind) for verdict in found]
    assert slow_at == [(4, FaultKind.LOG_SLOW)]
    assert watched.state is S.HEALTHY


def test_c17_one_rule_that_cannot_be_used_leaves_the_others_on():
    """A threshold in quotes switched all of a job's protection off."""
    bad = {"logPattern": "loss: (.*)", "metricThreshold": "2.5", "operator": "gt"}
    good = {"name": "oom", "logPattern": "CUDA out of memory", "faultOnMatch": True}
    usable, refused = usable_rules([bad, {"name": "quoted", **bad}, good])
    assert [(error.rule, error.field) for error in refused] == [
        ("#1", "name"),
        ("quoted", "metricThreshold"),
    ]
    watched = LogEvaluator(usable, at(0))
    assert [one.rule for one in watched.line("RuntimeError: CUDA out of memory", at(1))] == ["oom"]


def test_c19_a_pattern_is_searched_and_one_that_never_matched_is_told_from_a_hang():
    """An anchored rule sees nothing behind a rank's prefix, and nobody knows."""
    loss = {
        "name": "Loss",
        "logPattern": "loss: ([0-9.]+)",
        "operator": "gt",
        "metricThreshold": 9,
    }
    slip = {"name": "Slip", "logPattern": "^los: "}
    start = {"name": "Start", "logPattern": "never", "expectedStartCutOffInSeconds": 60}
    watched = LogEvaluator(parse_rules([loss, slip, start]), at(0))
    (verdict,) = watched.line("[rank0]: loss: 9.9", at(1))
    assert (verdict.rule, verdict.state) == ("Loss", S.SLOW)
    assert watched.never_matched() == ("Slip", "Start")
    (hang,) = watched.timer(at(61))
    assert "no line matched within 60 s of the start" in hang.message
    assert watched.states()["Slip"] is S.WAITING


def test_c22_and_c27_what_one_attempt_did_is_over_with_it():
    """A fault of the last run, or its end, would stand over the next one."""
    rules = parse_rules(
        [
            {"name": "Fatal", "logPattern": "FATAL", "faultOnMatch": True},
            {
                "name": "Step",
                "logPattern": "step",
                "expectedRecurringFrequencyInSeconds": 300,
                "stopPattern": "Training completed",
            },
        ]
    )
    first = LogEvaluator(rules, at(0))
    assert first.line("step 1 FATAL", at(1))
    first.line("Training completed", at(2))
    assert first.timer(at(2 + 2400)) == []  # forty minutes of uploads are no hang
    second = LogEvaluator(rules, at(2500))
    second.line("step 1", at(2501))
    assert second.states() == {"Fatal": S.WAITING, "Step": S.HEALTHY}
    assert second.state is S.HEALTHY
    (hang,) = second.timer(at(2501 + 301))
    assert hang.rule == "Step"


# --- silence ------------------------------------------------------------------------------------

STEP = {
    "name": "Step",
    "logPattern": r"step (?P<step>\d+)",
    "expectedStartCutOffInSeconds": 1800,
    "expectedRecurringFrequencyInSeconds": 300,
}
EVALUATION = {
    "name": "Evaluation",
    "phaseStart": "evaluation begins",
    "phaseEnd": "evaluation took",
    "phaseLimitInSeconds": 1800,
}


def test_c23_an_evaluation_has_a_limit_of_its_own_and_one():
    """A limit for both is either blind for half an hour or restarts healthy jobs."""
    watched = LogEvaluator(parse_rules([STEP, EVALUATION]), at(0))
    watched.line("step 1000", at(10))
    watched.line("evaluation begins", at(20))
    assert watched.timer(at(20 + 1500)) == []
    watched.line("evaluation took 1500 s", at(1520))
    assert watched.timer(at(1520 + 299)) == []
    watched.line("step 1001", at(1600))
    assert [one.rule for one in watched.timer(at(1600 + 301))] == ["Step"]


def test_c23_a_phase_that_never_ends_is_a_hang_and_cannot_be_opened_again():
    """A lost end would switch the watch off for good, and so would a loop of beginnings."""
    watched = LogEvaluator(parse_rules([STEP, EVALUATION]), at(0))
    watched.line("step 1000", at(10))
    for again in range(20, 1800, 100):
        watched.line("evaluation begins", at(again))
        assert watched.timer(at(again)) == []
    assert watched.timer(at(20 + 1799)) == []
    (hang,) = watched.timer(at(20 + 1801))
    assert (hang.rule, hang.kind) == ("Step", FaultKind.LOG_HANG)
    assert "the limit of phase Evaluation ran out" in hang.message


def test_c24_the_first_step_may_take_long_and_later_ones_may_not():
    """One number for both is slow, or trigger-happy."""
    rule = STEP | {"expectedRecurringFrequencyInSeconds": 60}
    watched = LogEvaluator(parse_rules([rule]), at(0))
    assert watched.timer(at(1499)) == []
    watched.line("step 1", at(1500))
    assert watched.timer(at(1559)) == []
    assert len(watched.timer(at(1561))) == 1
    never = LogEvaluator(parse_rules([rule]), at(0))
    assert never.timer(at(1799)) == []
    assert len(never.timer(at(1801))) == 1


def test_c26_silence_is_a_hang_whatever_else_is_printed():
    """A job that spins in a collective keeps its GPUs at 100 % and prints no error."""
    watched = LogEvaluator(parse_rules([STEP]), at(0))
    watched.line("step 7", at(10))
    for second in range(20, 320, 10):
        watched.line("GPU utilisation 100 %, power 40 %", at(second))
    (hang,) = watched.timer(at(311))
    assert (hang.kind, hang.step) == (FaultKind.LOG_HANG, 7)


def test_a64_a_silence_before_a_lost_peer_is_told_and_stays_told():
    """The two hours in which nothing came are the early sign; the last line alone hides them."""
    step = {
        "name": "Step",
        "logPattern": r"at epoch \d+, step at (?P<step>\d+), loss=(?P<loss>\S+)",
        "expectedRecurringFrequencyInSeconds": 600,
    }
    watched = LogEvaluator((*parse_rules([step]), *default_rules()), at(0))
    history, found = [], []

    def show(second: float, text: str | None = None) -> None:
        new = watched.timer(at(second)) if text is None else watched.line(text, at(second))
        found.extend(new)
        state = watched.states()["Step"]
        if not history or history[-1][1] is not state:
            history.append((second, state))

    show(0, "Total loss at epoch 5, step at 58800, loss=35.70")
    show(95, "Total loss at epoch 5, step at 58900, loss=35.72")
    for second in range(100, 7295, 5):
        show(second)
    show(7295, "Total loss at epoch 5, step at 59000, loss=35.75")
    lost = "gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.31]:38032"
    show(7300, f"RuntimeError: [../third_party/{lost}")
    assert history == [(0, S.HEALTHY), (695, S.HANGING), (7295, S.HEALTHY)]
    # One finding, with its own time; the lost peer is the other end's fault and convicts nobody.
    assert [(one.rule, one.kind, one.step) for one in found] == [
        ("Step", FaultKind.LOG_HANG, 58900)
    ]
    assert watched.matches["GlooPeerGone"] == 1
    (read,) = readings(lost, [entries()["GlooPeerGone"]])
    assert (read.entry.fault_class, read.fields) == ("lost-peer", {"peer_ip": "192.0.2.31"})


def test_c28_only_a_new_step_is_progress():
    """A rank that prints the same step for ever looks alive."""
    watched = LogEvaluator(parse_rules([STEP]), at(0))
    for second in range(10, 400, 10):
        watched.line("step 30", at(second))
    (hang,) = watched.timer(at(400))
    assert "no step after 30 has come" in hang.message
    # Another attempt, or an epoch, counts from anew.
    again = LogEvaluator(parse_rules([STEP]), at(500))
    again.line("step 25", at(510))
    again.line("step 26", at(700))
    assert again.timer(at(999)) == []


def test_c28_eight_ranks_that_print_one_line_are_one_data_point():
    """Four violations in a row would be reached by a single step."""
    rule = {
        "name": "Spike",
        "logPattern": r"step (?P<step>\d+) loss (?P<loss>\S+)",
        "operator": "gt",
        "metricThreshold": 2,
        "metricEvaluationDataPoints": 4,
        "rankScope": "any",
    }
    rules, node = parse_rules([rule]), NodeView()
    ranks = [
        LogEvaluator(rules, at(0), place=Place(rank=n, world_size=8, lead=n == 0), node=node)
        for n in range(8)
    ]
    found = []
    for step in range(4):
        for rank in ranks:
            found += rank.line(f"step {step} loss 9", at(step))
    assert [verdict.step for verdict in found] == [3]
    assert node.repeats == 4 * 7


def test_c113_every_rank_is_judged_and_the_worst_is_the_nodes_state():
    """A spike on rank 5 poisons everyone's gradients and shows on rank 0 never."""
    rule = {
        "name": "Spike",
        "logPattern": r"loss (\S+)",
        "operator": "gt",
        "metricThreshold": 5,
        "metricEvaluationDataPoints": 5,
    }
    rules, node = parse_rules([rule]), NodeView()
    ranks = [
        LogEvaluator(rules, at(0), place=Place(rank=n, world_size=8, lead=n == 0), node=node)
        for n in range(8)
    ]
    found = {}
    for point in range(5):
        found[0] = ranks[0].line("loss 2.1", at(point))
        found[5] = ranks[5].line("loss 9.8", at(point))
    assert (found[0], len(found[5])) == ([], 1)
    assert worst([rank.state for rank in ranks]) is S.SLOW
    assert [n for n, rank in enumerate(ranks) if rank.state is S.SLOW] == [5]


def test_c41_findings_carry_ages_so_clocks_of_two_nodes_need_not_agree():
    """With clocks a quarter of an hour apart the wrong node would have failed first."""
    rule = [{"name": "Step", "logPattern": "step", "expectedRecurringFrequencyInSeconds": 10}]
    skew_s, received_s = 900.0, 5000.0
    node_a = LogEvaluator(parse_rules(rule), at(0))
    node_b = LogEvaluator(parse_rules(rule), at(skew_s))
    node_a.line("step", at(104))
    node_b.line("step", at(100 + skew_s))
    (hang_a,) = node_a.timer(at(120))
    (hang_b,) = node_b.timer(at(120 + skew_s))
    happened = {
        node: received_s - verdict.age_ns / 1e9 for node, verdict in (("a", hang_a), ("b", hang_b))
    }
    assert happened["b"] == pytest.approx(happened["a"] - 4)
    assert not hasattr(hang_a, "timestamp")


def test_a_traceback_is_evidence_as_a_whole_and_its_last_line_is_the_fault():
    """The one line names the error, and not where it came from."""
    lines = [
        "step 1",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "train.py", line 12, in <module>',
        "[rank1]:     main()",
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "after it",
    ]
    watched = LogEvaluator(default_rules(), at(0))
    (verdict,) = watched.judge(block_of(lines), at(1))
    assert verdict.line.startswith("torch.OutOfMemoryError")
    assert verdict.block == tuple(line.removeprefix("[rank1]: ") for line in lines[1:5])
