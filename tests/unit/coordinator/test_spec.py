import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.spec import NPROC_MAX, SPEC_BYTES_MAX, JobSpec, load_job_spec, parse_job_spec
from coordinator.spec_errors import SpecError

BARE = "name: job\nreplicaSpecs:\n- {name: workers, replicas: 2}\n"
RESOURCE = """\
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata: {name: job, namespace: default, labels: {team: a}}
spec:
  nprocPerNode: "8"
  replicaSpecs: [{name: workers, replicas: 2, spares: 1, maxReplicas: 2, template: {spec: {}}}]
  runPolicy:
    jobMaxRetryCount: 3
    cleanPodPolicy: All
    startupDeadlineSeconds: 900
    restartPolicy: {evalPeriodSeconds: 21600, numRestartBeforeFullJobRestart: 1}
    logMonitoringConfiguration:
    - name: Loss
      logPattern: '.*loss: (\\d+(?:\\.\\d+)?).*'
      metricThreshold: 2
      operator: gt
      metricEvaluationDataPoints: 5
    - {name: Oom, logPattern: out of memory, faultOnMatch: true}
status: {restartCount: 2}
"""


def spec_of(more="") -> JobSpec:
    """Return the bare spec with more lines."""
    return parse_job_spec(BARE + more, "job.yaml")


def refused(text) -> str:
    """Return the sentence that ``text`` is refused with."""
    with pytest.raises(SpecError) as caught:
        parse_job_spec(text, "job.yaml")
    return str(caught.value)


def with_rule(rule) -> str:
    """Return a spec with one log rule, written in YAML's flow style."""
    return BARE + f"runPolicy: {{logMonitoringConfiguration: [{rule}]}}\n"


def test_a_bare_spec_gets_every_default():
    """A person's first spec has three lines; each default must be the documented one."""
    spec = spec_of()
    made = spec.settings()
    assert (made.job, made.nnodes, made.nproc_per_node) == ("job", 2, 1)
    assert (made.restart.retries_max, made.restart.window_s) == (10, 3600)
    assert (made.stall_timeout_s, made.settle_s, made.inspect_timeout_s) == (
        300,
        0.3,
        1,
    )
    assert (made.lease_s, made.wait_for_nodes_s) == (15, 600)
    assert made.startup_deadline_s == 1800
    assert made.log_rules == ()


def test_our_own_rule_fields_are_read_as_well():
    """A job whose rules need them could not be submitted at all."""
    rule = (
        "{name: Spike, logPattern: 'loss (?P<loss>\\S+)', metric: loss, operator: gt,"
        " ratioToMedian: 3, windowDataPoints: 50, violationsInWindow: 3}"
    )
    (read,) = parse_job_spec(with_rule(rule), "job.yaml").settings().log_rules
    assert read["ratioToMedian"] == 3


def test_the_kubernetes_resource_is_read_as_it_is():
    """People bring the file they have; a rewrite would be the first thing to go wrong."""
    for kind in ("HyperPodPyTorchJob", "HyperPodPytorchJob"):
        spec = parse_job_spec(RESOURCE.replace("HyperPodPyTorchJob", kind), "job.yaml")
        made = spec.settings()
        assert (spec.name, made.nproc_per_node, spec.spares) == ("job", 8, 1)
        assert (made.restart.retries_max, made.restart.window_s) == (3, 21600)
        assert made.startup_deadline_s == 900
    loss, oom = made.log_rules
    assert loss["metricThreshold"] == 2
    assert loss["metricEvaluationDataPoints"] == 5
    assert oom == {"name": "Oom", "logPattern": "out of memory", "faultOnMatch": True}


def test_what_may_mean_less_than_it_seems_is_said():
    """A pod's command would be looked for in vain among the workers."""
    (said,) = parse_job_spec(RESOURCE, "job.yaml").remarks()
    assert said.startswith("replicaSpecs[0].template is the cluster's")
    assert spec_of("nprocPerNode: 1\n").remarks() == ()


def test_every_field_of_the_run_policy_is_carried_out():
    """A deadline that is silently ignored is found out at the end of the allocation."""
    spec = spec_of(
        "nprocPerNode: 1\n"
        "runPolicy: {activeDeadlineSeconds: 1, faultDeadlineSeconds: 1, cleanPodPolicy: All,\n"
        "  ttlSecondsAfterFinished: -1, restartPolicy: {maxFullJobRestarts: 1,\n"
        "  maxNumRepeatOffendersToAvoid: 1, scaleUpSnoozeTimeInSeconds: 0}}\n"
    )
    settings = spec.settings()
    assert settings.offenders.avoid_max == 1
    assert (settings.active_deadline_s, settings.fault_deadline_s, settings.ttl_s) == (1, 1, -1)
    assert settings.restart.job_max == 1
    assert parse_job_spec(RESOURCE, "job.yaml").settings().spares == 1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("runPolicy: {cleanPodPolicy: None}\n", "runPolicy.cleanPodPolicy: None is not possible"),
        (
            "runPolicy: {cleanPodPolicy: OnlyComplete}\n",
            "runPolicy.cleanPodPolicy: OnlyComplete is not possible",
        ),
        ("runPolicy: {workloadMode: elastic}\n", "runPolicy.workloadMode: is not possible"),
        (
            "runPolicy: {restartPolicy: {scaleUpSnoozeTimeInSeconds: 5}}\n",
            "runPolicy.restartPolicy.scaleUpSnoozeTimeInSeconds: must be 0",
        ),
        ("elasticPolicy: {minReplicas: 1}\n", "elasticPolicy: is not possible"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_with_a_sentence(more, sentence):
    """A job that was to shrink or to keep its pods would be found out to have done neither."""
    assert f"job.yaml: {sentence}" in refused(BARE + more)
    grown = BARE.replace("replicas: 2", "replicas: 2, maxReplicas: 4")
    assert "replicaSpecs[0].maxReplicas: is not 2, as replicas is" in refused(grown)


def test_exit_statuses_are_written_as_codes_and_signals():
    """A code that stands in two lists would mean what the reader of one of them does not expect."""
    text = "exitPolicy: {neverRestart: [93], alwaysRestart: [3], preempted: [SIGTERM, SIGUSR2]}\n"
    exits = spec_of(text).settings().restart.exits
    assert (exits.never, exits.always, exits.preempted) == ({93}, {3}, {-15, -12})
    twice = "exitPolicy: {neverRestart: [93], alwaysRestart: [3, 93]}\n"
    assert refused(BARE + twice).endswith(
        "exitPolicy.alwaysRestart[1]: 93 stands in neverRestart too"
    )
    assert "exitPolicy.preempted[0]: 'SIGNOPE' is neither" in refused(
        BARE + "exitPolicy: {preempted: [SIGNOPE]}\n"
    )


def test_auto_is_one_worker_unless_the_command_line_says_otherwise():
    """A number guessed from one machine's devices would not fit the next machine."""
    assert "auto" in spec_of().remarks()[0]
    assert spec_of().nproc() == 1
    assert spec_of().settings(nproc=4).nproc_per_node == 4
    assert spec_of("nprocPerNode: '8'\n").nproc() == 8


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            "runPolicy: {jobMaxRetryCont: 3}",
            (
                "job.yaml: runPolicy.jobMaxRetryCont: this field does not exist; "
                "did you mean jobMaxRetryCount?"
            ),
        ),
        (
            "runPolicy: {job_max_retry_count: 3}",
            (
                "job.yaml: runPolicy.job_max_retry_count: this field does not exist; "
                "did you mean jobMaxRetryCount?"
            ),
        ),
        (
            "shape: {}",
            (
                "job.yaml: shape: this field does not exist; the fields here are name, "
                "nprocPerNode, replicaSpecs, runPolicy, progressPolicy, nodePolicy, scout, "
                "exitPolicy, detectorPolicy, elasticPolicy"
            ),
        ),
        (
            "runPolicy: {jobMaxRetryCount: ten}",
            "job.yaml: runPolicy.jobMaxRetryCount: must be a whole number, but is the text 'ten'",
        ),
        (
            "runPolicy: {jobMaxRetryCount: -1}",
            "job.yaml: runPolicy.jobMaxRetryCount: must be a whole number >= 0, but is -1",
        ),
        (
            "runPolicy: {cleanPodPolicy: none}",
            (
                "job.yaml: runPolicy.cleanPodPolicy: must be one of All, None, OnlyComplete, "
                "but is the text 'none'"
            ),
        ),
        (
            "runPolicy: {suspend: true}",
            "job.yaml: runPolicy.suspend: a job cannot be held back here; start it later instead",
        ),
        ("runPolicy:", "job.yaml: runPolicy: must be a mapping, but is empty"),
        ("runPolicy: [1]", "job.yaml: runPolicy: must be a mapping, but is a list"),
        (
            "nprocPerNode: gpu",
            (
                "job.yaml: nprocPerNode: must be a whole number from 1 to 1024 or auto, "
                "but is 'gpu'; write the number of workers of a node"
            ),
        ),
        ("name: again", "job.yaml: line 4, column 1: the field 'name' is given twice"),
        ("a: b: c", "job.yaml: line 4, column 5: mapping values are not allowed here"),
        ("a: [1", "job.yaml: line 5, column 1: expected ',' or ']', but got '<stream end>'"),
        ("x: \x07", "job.yaml: line 4, column 4: the character U+0007 may not stand here"),
        ("d: 2024-99-99", "job.yaml: a value cannot be read: month must be in 1..12"),
        ("1: 2", "job.yaml: the name of a field must be a text"),
        (
            "nodePolicy: {leaseSeconds: .inf}",
            "job.yaml: nodePolicy.leaseSeconds: must be a number <= 86400.0, but is inf",
        ),
    ],
)
def test_every_refusal_names_file_field_and_reason(more, sentence):
    """'invalid configuration' costs an evening; the field and the reason cost a minute."""
    assert refused(BARE + more + "\n") == sentence


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            "{name: a, logPattern: '(?=x)'}",
            "[0].logPattern: RE2 does not take it: invalid perl operator",
        ),
        ("{name: a, logPattern: '(x'}", "[0].logPattern: RE2 does not take it: missing )"),
        ("{name: a, logPattern: x, stopPattern: '*'}", "[0].stopPattern: RE2 does not take it"),
        ("{name: a, logPattern: (x), operator: gt}", "[0].operator: it means nothing without"),
        ("{name: a, logPattern: (x), metricThreshold: 2}", "it means nothing without operator"),
        ("{name: a, logPattern: (x), metricThreshold: '2', operator: gt}", "but is the text '2'"),
        ("{name: a, logPattern: (x), metricThreshold: .nan, operator: gt}", "a finite number"),
        (
            "{name: a, logPattern: x, metricThreshold: 2, operator: gt}",
            "[0].logPattern: a threshold needs a group",
        ),
        (
            "{name: a, logPattern: (x), metricThreshold: 2, operator: '>'}",
            "must be one of gt, lt, eq, gteq, lteq",
        ),
        (
            "{name: a, logPattern: x, metricEvaluationDataPoints: 3}",
            "it means nothing without metricThreshold",
        ),
        ("{name: a, logPattern: x, faultOnMatch: 'false'}", "must be true or false, but is the te"),
        (
            "{name: a, logPattern: x, expectedRecurringFrequencyInSeconds: 0}",
            "must be a number of seconds above 0",
        ),
        ("{name: a, logPatern: x}", "did you mean logPattern?"),
        ("{name: a}", "[0].logPattern: it is missing"),
        ("{name: a, logPattern: x}, {name: a, logPattern: y}", "[1].name: another rule has it"),
    ],
)
def test_a_log_rule_that_would_never_fire_is_refused(rule, words):
    """A misspelt rule looks like protection and is none."""
    sentence = refused(with_rule(rule))
    assert sentence.startswith("job.yaml: runPolicy.logMonitoringConfiguration")
    assert words in sentence


def test_a_refused_pattern_prints_nothing_by_itself():
    """The pattern library writes to standard error behind our back unless told not to."""
    text = with_rule("{name: a, logPattern: '(?=x)'}")
    code = (
        "from coordinator.spec import parse_job_spec, SpecError\n"
        f"try: parse_job_spec({text!r}, 'f')\n"
        "except SpecError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    assert "RE2" in done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("- 1", "must hold fields with values"),
        ("replicaSpecs: [{name: w, replicas: 1}]", "name: this field is required"),
        ("name: a\nreplicaSpecs: []", "replicaSpecs: must be a list of length >= 1"),
        ("name: a\nreplicaSpecs: [{name: w, replicas: 0}]", "the replicas add up to 0 nodes"),
        ("name: a/b\nreplicaSpecs: [{name: w, replicas: 1}]", "but is the text 'a/b'"),
        (
            "name: a\nreplicaSpecs: [{name: w, replicas: 1}, {name: w, replicas: 1}]",
            "two have the same name",
        ),
        ("name: a\nx: &a [*a]\n", "aliases add up"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{n}: &{n} [{', '.join([f'*{p}'] * 10)}]\n"
                for p, n in zip("abcdefg", "bcdefgh", strict=True)
            ),
            "aliases add up",
        ),
        (RESOURCE.replace("HyperPodPyTorchJob", "PyTorchJob"), "kind: must be one of HyperPodPy"),
        (RESOURCE.replace("jobMaxRetryCount", "retries"), "job.yaml: spec.runPolicy.retries: this"),
        (RESOURCE.replace("  nproc", "  name: other\n  nproc"), "metadata.name says 'job'"),
        (RESOURCE.replace("{name: job, ", "{"), "metadata.name: this field is required"),
    ],
)
def test_unusable_files_are_refused_in_one_sentence(text, words):
    """Whatever stands in the file, the answer is a sentence and never a traceback."""
    assert words in refused(text)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path):
    """A typing error in the path is the most common error of all."""
    with pytest.raises(
        SpecError, match=r"nothing\.yaml: the job spec cannot be read: No such file"
    ):
        load_job_spec(tmp_path / "nothing.yaml")
    with pytest.raises(SpecError, match="it is a directory"):
        load_job_spec(tmp_path)
    with pytest.raises(SpecError, match="it is a device, not a file"):
        load_job_spec(Path("/dev/zero"))
    path = tmp_path / "job.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(SpecError, match="byte 6 is not UTF-8"):
        load_job_spec(path)
    path.write_bytes(b"#" * (SPEC_BYTES_MAX + 1))
    with pytest.raises(SpecError, match="larger than"):
        load_job_spec(path)
    path.write_text(BARE)
    assert load_job_spec(path).name == "job"


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ("nprocPerNode", "replicaSpecs", "runPolicy", "progressPolicy", "nodePolicy", "kind", "zz")


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), plain))
def test_any_content_gives_a_spec_or_one_sentence(fields):
    """A traceback tells a person nothing about the file they wrote."""
    text = yaml.safe_dump({"name": "job", **fields})
    try:
        spec = parse_job_spec(text, "job.yaml")
    except SpecError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("job.yaml: ")
    else:
        assert spec.settings().nnodes >= 1


@settings(deadline=None)
@given(st.one_of(st.integers(), st.text(max_size=6)))
def test_the_number_of_workers_is_a_sane_number_or_refused(value):
    """A slip of the finger must not start ten thousand processes."""
    text = BARE + yaml.safe_dump({"nprocPerNode": value})
    try:
        assert 1 <= parse_job_spec(text, "job.yaml").nproc() <= NPROC_MAX
    except SpecError as error:
        assert error.path == "nprocPerNode"


def test_half_a_character_is_refused_where_it_stands():
    """YAML may escape what no encoding can hold; submitting it would end in a traceback."""
    assert "line 4, column 13: an escape here is half of a character" in refused(
        BARE + 'nodePolicy: "\\uD800"\n'
    )


def test_a_detector_is_observed_by_its_name():
    """A detector that nobody trusts yet is switched off, and then nobody ever learns of it."""
    kinds = spec_of("detectorPolicy: {observe: [process_stall, log_slow]}\n").settings().observed
    assert {str(kind) for kind in kinds} == {"process_stall", "log_slow"}
    for name in ("crash", "operator", "stall"):
        said = refused(BARE + f"detectorPolicy: {{observe: [{name}]}}\n")
        assert f"detectorPolicy.observe[0]: '{name}' is no detector; there are log_rule" in said
