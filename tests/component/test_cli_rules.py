"""What `outrider rules` says, by the command itself."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli.main import main
from coordinator.cli.rules_table import markdown
from sidecar.logs.library.catalogue import entries

pytestmark = pytest.mark.component

ROOT = Path(__file__).resolve().parents[2]
STEP = (
    "[titan] 2026-05-18 16:{:02}:{:02},000 - root - INFO - step: {}  loss:  {}  "
    "grad_norm:  0.8  memory:  9.4GiB(64%)  tps: 7,282\n"
)


def steps(count: int, bad: int | None = None) -> str:
    return "".join(
        STEP.format(n // 60, n % 60, n, "nan" if n == bad else "3.2") for n in range(count)
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "job.log"
    path.write_text("starting\n\n" + steps(300, bad=200), encoding="utf-8")
    return path


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(arg) for arg in argv]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(arg) for arg in argv]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


# --- list -----------------------------------------------------------------------------------


def test_list_names_every_shipped_rule(capsys) -> None:
    """A rule that is not listed is found out by its first false alarm."""
    out = answer(capsys, "rules", "list")
    assert all(name in out for name in entries())


def test_list_as_json_holds_what_a_job_spec_needs(capsys) -> None:
    """A program would have to cut the rules out of a table."""
    listed = json.loads(answer(capsys, "rules", "list", "--json"))
    assert [one["name"] for one in listed] == list(entries())
    assert all(one["rule"]["name"] == one["name"] and one["examples"] for one in listed)


def test_the_documentation_holds_the_table_of_the_library(capsys) -> None:
    """People choose rules by the documentation, and it would be out of date."""
    table = answer(capsys, "rules", "list", "--markdown")
    assert table == markdown()
    assert table in (ROOT / "docs/log-rules-library.md").read_text(encoding="utf-8")


# --- check ----------------------------------------------------------------------------------

BAD = """
- name: Spike
  logPattern: 'loss: ([0-9.]+)'
  metricThreshold: "2.5"
  operator: more
- name: Look
  logPattern: '(?=loss)'
- name: Odd
  logPatern: x
- logPattern: x
- name: Good
  logPattern: 'step'
- name: Good
  logPattern: 'step 2'
"""


def test_check_tells_every_problem_on_a_line_of_its_own(tmp_path, capsys) -> None:
    """One bad rule after the other would be found, each by a refused job."""
    path = tmp_path / "rules.yaml"
    path.write_text(BAD, encoding="utf-8")
    assert main(["rules", "check", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = [line.removeprefix(f"{path}: rule ").split(": ")[:2] for line in lines]
    assert found == [
        ["Spike", "metricThreshold"],
        ["Spike", "operator"],
        ["Look", "logPattern"],
        ["Odd", "logPatern"],
        ["#4", "name"],
        ["Good", "name"],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "- name: Good\n  logPattern: 'step'\n",
        "name: j\nrunPolicy:\n  logMonitoringConfiguration:\n  - {name: Good, logPattern: step}\n",
        "kind: K\nspec: {runPolicy: {logMonitoringConfiguration: [{name: G, logPattern: st}]}}\n",
    ],
)
def test_check_takes_a_list_of_rules_and_a_job_spec(tmp_path, capsys, text) -> None:
    """Rules would have to be copied out of the spec to be checked."""
    path = tmp_path / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    assert "1 rules, all of them can be used" in answer(capsys, "rules", "check", path)


def test_check_as_json(tmp_path, capsys) -> None:
    """A pipeline would parse sentences."""
    path = tmp_path / "rules.yaml"
    path.write_text(BAD, encoding="utf-8")
    assert main(["rules", "check", "--json", str(path)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["rules"] == 6
    assert {"rule": "Odd", "field": "logPatern"}.items() <= told["problems"][3].items()


def test_check_says_which_rule_is_searched_in_every_line(tmp_path, capsys) -> None:
    """One expression without a literal costs as much as fifty others."""
    path = tmp_path / "rules.yaml"
    path.write_text("- {name: Slow, logPattern: '(\\d+)'}\n", encoding="utf-8")
    assert "note: rule Slow: logPattern" in answer(capsys, "rules", "check", path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("just words", "holds no rules"),
        ("name: j\nreplicaSpecs: []\n", "holds no rules"),
        ("- name: [", "line 1"),
        ("a: b: c", "line 1"),
    ],
)
def test_a_file_that_holds_no_rules_is_refused_in_one_sentence(tmp_path, capsys, text, words):
    """A traceback says nothing about which file was the wrong one."""
    path = tmp_path / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    assert words in refusal(capsys, "rules", "check", path)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path, capsys) -> None:
    """The same, for the usual slips."""
    assert "cannot be read" in refusal(capsys, "rules", "check", tmp_path / "none")
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(capsys, "rules", "check", path)


# --- test -----------------------------------------------------------------------------------


def test_a_log_is_replayed_by_the_rules_that_fit_it(capsys, log) -> None:
    """Nobody would know what the shipped rules do with their own job's output."""
    told = json.loads(answer(capsys, "rules", "test", "auto", log, "--json"))
    assert told["frameworks"] == ["torchtitan"]
    incident = told["first_incident"]
    assert (incident["incident"], incident["line_number"]) == ("LogFault_NonFiniteLoss", 203)
    assert (incident["role"], incident["class"]) == ("fault", "numerical")
    series = {(one["rule"], one["metric"]): one for one in told["series"]}
    loss = series["TorchtitanStep", "loss"]
    assert (loss["points"], loss["not_finite"], loss["last_step"]) == (299, 1, 299)
    rules = {one["rule"]: one["lines"] for one in told["rules"]}
    assert rules["TorchtitanStep"] == 300


def test_a_replay_is_told_to_a_person(capsys, log) -> None:
    """Only programs would have an answer."""
    out = answer(capsys, "rules", "test", "auto", log)
    assert "it looks like torchtitan" in out
    assert "an incident would have opened at line 203" in out
    assert "LogFault_NonFiniteLoss" in out
    assert "throughput" in out


def test_rules_of_ones_own_are_replayed_in_the_logs_time(tmp_path, capsys) -> None:
    """A limit for silence would only be tried on a running job."""
    rules, log = tmp_path / "rules.yaml", tmp_path / "job.log"
    rules.write_text(
        "- {name: Hang, logPattern: 'step: ', expectedRecurringFrequencyInSeconds: 60}\n",
        encoding="utf-8",
    )
    quiet = STEP.format(59, 59, 400, 3.2)
    log.write_text(steps(300) + quiet, encoding="utf-8")
    told = json.loads(answer(capsys, "rules", "test", rules, log, "--json"))
    assert told["first_incident"]["incident"] == "LogHang_Hang"
    assert told["first_incident"]["at_s"] == pytest.approx(told["began_s"] + 299 + 60)


def test_a_log_may_come_through_a_pipe_and_the_whole_library_be_used(log) -> None:
    """A compressed log would have to be unpacked first."""
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", "rules", "test", "--library", "-", "--json"],
        input=log.read_bytes(),
        capture_output=True,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout)["first_incident"]["rule"] == "NonFiniteLoss"


def test_terminal_sequences_in_a_log_do_not_reach_the_terminal(tmp_path, capsys) -> None:
    """A line of a training script would move somebody's cursor."""
    log = tmp_path / "job.log"
    log.write_bytes(b"\x1b]0;owned\x07\x1b[2JRuntimeError: CUDA out of memory. \x9b31m\xc2\x9b2J\n")
    out = answer(capsys, "rules", "test", "auto", log)
    assert "CudaOutOfMemory" in out
    assert not {"\x1b", "\x9b", "\x07"} & set(out)


@pytest.mark.parametrize("argv", [["auto"], ["a", "b", "c"], ["--library", "a", "b"]])
def test_test_says_what_it_takes(capsys, argv) -> None:
    """A person would guess the order of the words."""
    assert "takes RULES and LOG" in refusal(capsys, "rules", "test", *argv)


def test_a_replay_with_a_bad_rule_is_refused(tmp_path, capsys, log) -> None:
    """The other rules would be replayed, and the bad one be thought to be silent."""
    path = tmp_path / "rules.yaml"
    path.write_text(BAD, encoding="utf-8")
    err = refusal(capsys, "rules", "test", path, log)
    assert "rule Spike" in err
    assert "outrider rules check" in err


def test_a_log_that_cannot_be_read_is_refused(tmp_path, capsys) -> None:
    """A traceback says nothing about which file was the wrong one."""
    assert "cannot be read" in refusal(capsys, "rules", "test", "auto", tmp_path / "none")
    assert "cannot be read" in refusal(capsys, "rules", "suggest", tmp_path)


# --- suggest --------------------------------------------------------------------------------


def test_suggest_names_the_framework_with_values_and_a_limit_for_silence(capsys, log) -> None:
    """A person would read the framework's source to write the first rule."""
    told = json.loads(answer(capsys, "rules", "suggest", log, "--json"))
    assert told["frameworks"] == [{"name": "torchtitan", "step_lines": 300}]
    (step,) = (rule for rule in told["rules"] if rule["rule"] == "TorchtitanStep")
    assert (step["lines"], step["first_line"]) == (300, 3)
    assert step["values"] == {
        "step": 0,
        "loss": 3.2,
        "grad_norm": 0.8,
        "memory_gib": 9.4,
        "throughput": 7282.0,
    }
    assert [rule["rule"] for rule in told["faults"]] == ["NonFiniteLoss"]
    assert told["silence_s"] == 1
    assert told["proposal"][0]["expectedRecurringFrequencyInSeconds"] == 60


def test_what_suggest_proposes_can_be_used(tmp_path, capsys, log) -> None:
    """A proposal that is refused is worse than none."""
    out = answer(capsys, "rules", "suggest", log)
    path = tmp_path / "spec.yaml"
    path.write_text(out[out.index("runPolicy:") :], encoding="utf-8")
    answer(capsys, "rules", "check", path)
    told = json.loads(answer(capsys, "rules", "test", path, log, "--json"))
    assert told["first_incident"]["incident"] == "LogFault_StepsStopped"  # its loss is no number
    assert {one["rule"]: one["lines"] for one in told["rules"]}["StepsStopped"] >= 200


def test_suggest_says_so_when_nothing_fits(capsys, monkeypatch) -> None:
    """Silence would be taken for a broken command."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"nothing\nof it\n")))
    out = answer(capsys, "rules", "suggest", "-")
    assert "it looks like no framework known here" in out


def test_a_slip_elsewhere_in_a_whole_job_spec_is_found_too(capsys, tmp_path):
    """A file that was checked and is refused at submission was checked in vain."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: job\nreplicaSpecs: [{name: w, replicas: 1}]\nrunPolicy:\n"
        "  jobMaxRetryCuont: 3\n"
        "  logMonitoringConfiguration: [{name: one, logPattern: 'loss (?P<loss>.*)'}]\n"
    )
    text = refusal(capsys, "rules", "check", path)
    assert "runPolicy.jobMaxRetryCuont" in text
    assert "did you mean jobMaxRetryCount?" in text
