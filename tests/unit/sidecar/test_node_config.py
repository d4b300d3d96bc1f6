"""The node's file: what is accepted, and how a mistake is told."""

import re
import textwrap
from pathlib import Path

import msgspec
import pytest

from sidecar.config import ConfigError, check_node_config, load_node_config
from sidecar.hardware.node_file import THRESHOLDS
from sidecar.hardware.thresholds import HealthConfig

GOOD = """
nodeName: node-0
job: demo
coordinator: http://127.0.0.1:8081
command: [{script}, --lr, "1"]
"""


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a configuration and loads it."""
    script = tmp_path / "train.py"
    script.touch()

    def load(text: str, *, base: str = GOOD):
        path = tmp_path / "node.yaml"
        path.write_text(base.format(script=script) + textwrap.dedent(text))
        return load_node_config(path)

    return load


def test_a_small_file_is_enough_and_the_rest_has_safe_defaults(write):
    """A newcomer would have to know every field, or expose the node by leaving one out."""
    config = write("")
    assert config.node_name == "node-0"
    assert config.command[1:] == ("--lr", "1")
    assert config.http_host == "127.0.0.1"
    assert config.nproc_per_node == 1
    assert not config.spare


def test_every_field_is_read(write, tmp_path):
    """A field that is accepted and ignored misleads whoever wrote it."""
    (tmp_path / "token").write_text("secret\n")
    config = write(
        f"""
        host: node-0.cluster
        httpHost: 0.0.0.0
        httpPort: 9090
        nprocPerNode: 8
        spare: true
        labels: {{zone: a}}
        logDir: {tmp_path}/logs
        runDir: {tmp_path}/run
        kernelLog: {tmp_path}/kernel.log
        gpus: [{{index: 0, pci: "0000:3b:00"}}]
        xids: {{63: {{severity: fatal, action: call us}}}}
        health:
          thresholds: {{temperatureWarnC: 80, queryStuckFatalS: null, fatalOnRemapFailure: false}}
          dcgmExporter: http://127.0.0.1:9400/metrics
          files: [{tmp_path}/agent.jsonl]
        tokenFile: {tmp_path}/token
        module: false
        noPython: false
        """
    )
    assert (config.host, config.http_port, config.nproc_per_node) == ("node-0.cluster", 9090, 8)
    assert config.labels == {"zone": "a"}
    assert config.gpus[0].pci == "0000:3b:00"
    assert config.xids[63].severity == "fatal"
    limits = config.health.config(frozenset({63}))
    assert (limits.temperature_warn_c, limits.query_stuck_fatal_s) == (80.0, None)
    assert (limits.fatal_on_remap_failure, limits.fatal_xids) == (False, frozenset({63}))
    names = [source.name for source in config.health.sources()]
    assert names == ["dcgm-exporter", f"file:{tmp_path}/agent.jsonl"]
    assert config.socket_path().name == "worker.sock"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nprocPerNod: 2", "nprocPerNod"),
        ("httpPort: many", "httpPort: must be a whole number, but is the text 'many'"),
        ("httpPort: 70000", "httpPort: must be a whole number <= 65535, but is 70000"),
        ("labels: {a: 1}", "labels"),
        ("gpus: [{index: 0}]", "gpus[0]"),
        ("xids: {63: {severity: awful}}", "severity"),
        ("xids: {0: {severity: fatal}}", "xids"),
        ("gpus: [{index: 0, pci: nonsense}]", "gpus[0].pci: 'nonsense' is not a PCI address"),
        (
            "gpus: [{index: 0, pci: '0000:3B:00.0'}, {index: 1, pci: '00000000:3b:00.0'}]",
            "gpus[1].pci: 00000000:3b:00.0 is that of GPU 0",
        ),
        ("httpHost: 0.0.0.0", "httpHost: 0.0.0.0 can be reached from other machines"),
        ("tokenFile: /no/such/file", "tokenFile: /no/such/file: No such file"),
        ("module: true\nnoPython: true", "command: --module and --no-python exclude"),
        ("runDir: /" + "x" * 120, "runDir: socket path"),
        ("kernelLog: /tmp", "kernelLog: /tmp is a directory"),
        ("a: [", "not YAML"),
        ("logRules: /no/such/rules.yaml", "logRules: /no/such/rules.yaml cannot be read: "),
        (
            "health: {threshold: {}}",
            "health.threshold: this field does not exist; did you mean thresholds?",
        ),
        (
            "health: {thresholds: {temperatureWarn: 80}}",
            "health.thresholds.temperatureWarn: no such threshold; did you mean temperatureWarnC?",
        ),
        ("health: {thresholds: {fatalXids: [63]}}", "say it under `xids`"),
        (
            "health: {thresholds: {temperatureWarnC: hot}}",
            "health.thresholds.temperatureWarnC: must be a number, but is the text 'hot'",
        ),
        (
            "health: {thresholds: {pollIntervalS: -1}}",
            "health.thresholds: pollIntervalS must not be negative, but is -1",
        ),
        ("health: {thresholds: {pollIntervalS: .inf}}", "pollIntervalS must be at most 1000000000"),
        ("health: {thresholds: {debounceS: .nan}}", "debounceS must be"),
        (
            "health: {thresholds: {pollIntervalS: 60}}",
            "unknownAfterS (30) must be above pollIntervalS (60)",
        ),
        (
            "health: {thresholds: {nvlinkErrorsWarnPerMin: 20000}}",
            "nvlinkErrorsWarnPerMin must not be above nvlinkErrorsFatalPerMin",
        ),
        ("health: {dcgmExporter: localhost:9400}", "health.dcgmExporter: the exporter's address"),
        ("health: {files: [/a, /a]}", "health.files: one of them stands there twice"),
        ('health: {files: [""]}', "health.files[0]: a path must not be empty"),
        ("job: other", "line 6, column 1: the field 'job' is given twice"),
        ('runDir: "a\\0b"', "runDir: 'a\\x00b' holds a zero byte"),
        ('logDir: "a\\0b"', "logDir: 'a\\x00b' holds a zero byte"),
        ('kernelLog: "a\\0b"', "kernelLog: 'a\\x00b' holds a zero byte"),
        ('tokenFile: "a\\0b"', "tokenFile: 'a\\x00b' holds a zero byte"),
        ('warmModules: ["a\\0b"]', "warmModules[0]: 'a\\x00b' holds a zero byte"),
        ("logDir: /dev/null/logs", "logDir: /dev/null/logs"),
        ("runDir: /dev/null/run", "runDir: /dev/null/run"),
        ('labels: {rack: "7\\e[2J"}', "labels: the value '7\\x1b[2J' of 'rack' cannot be used"),
        ('labels: {"": x}', "labels: '' is no name"),
        (f"labels: {{rack: {'x' * 300}}}", "use up to 256 printable characters"),
        (f"host: {'h' * 300}", "is longer than the 253 characters of a host's name"),
        ("host: a b", "host: 'a b' is not a host's name or address"),
        ("host: \u00e9", "host: '\u00e9' is not a host's name or address"),
        ("tokenFile: /dev/zero", "tokenFile: /dev/zero: it is a device"),
        ("a: &a [x, x]\nb: &b [*a, *a]", "a: this field does not exist"),
    ],
)
def test_a_mistake_is_told_with_file_field_and_reason(write, text, words):
    """A person would search a stack trace for a typo."""
    with pytest.raises(ConfigError) as caught:
        write(text)
    assert words in str(caught.value)
    assert "node.yaml: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("nodeName: node-0", "nodeName: ../up", "nodeName: '../up' is not a name"),
        ("job: demo", "job: 'a b'", "job: 'a b' is not a name"),
        ("coordinator: http://127.0.0.1:8081", "coordinator: 127.0.0.1", "is not a URL such as"),
        ('command: [{script}, --lr, "1"]', "command: []", "command: no training script"),
        ('command: [{script}, --lr, "1"]', "command: [gone.py]", "'gone.py' does not exist"),
        ("job: demo\n", "", "job: this field is required"),
    ],
)
def test_a_wrong_value_of_a_required_field_is_told_too(write, field, value, words):
    """The job would fail later, on every node, and for a reason that names nothing."""
    with pytest.raises(ConfigError) as caught:
        write("", base=GOOD.replace(field, value))
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_told_in_one_line(tmp_path):
    """A wrong path would end in a traceback."""
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_node_config(tmp_path / "gone.yaml")


def test_a_configuration_made_by_a_command_line_is_checked_alike(write):
    """Flags would slip past what a file is held to."""
    config = write("")
    assert check_node_config(config) is None
    open_to_all = msgspec.structs.replace(config, http_host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"httpHost: 0\.0\.0\.0 can be reached"):
        check_node_config(open_to_all)


@pytest.mark.parametrize("text", ['host: "\\uD800"', "host: 2026-13-45", "host: " + "[" * 5000])
def test_what_yaml_itself_cannot_build_is_told_in_one_line(write, text):
    """A node that a typing error keeps out would say so in a traceback."""
    with pytest.raises(ConfigError) as caught:
        write(text)
    assert "\n" not in str(caught.value)


def test_every_threshold_is_documented_with_its_default():
    """A person on call would have to read the source to know when a device is convicted."""
    page = (Path(__file__).parents[3] / "docs" / "hardware-health.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    defaults = HealthConfig()
    for camel, name in THRESHOLDS.items():
        value = getattr(defaults, name)
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
        assert told[camel].strip() == shown, camel
