"""NVML through the real bindings and the real helper process, against a scripted library."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout.clock import Instant
from sidecar.hardware.health import HardwareHealth, HealthCleared, HealthConfig, HealthEvent
from sidecar.hardware.nvml_answers import DEVICE_METRICS
from sidecar.hardware.nvml_probe import NvmlProbe
from sidecar.hardware.readings import Metric, Severity
from sidecar.hardware.snapshot import DeviceHealth
from tests.fakenvml.build import WELL, FakeNvml, compiler

pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(compiler() is None, reason="no C compiler to build the library with"),
]

PATIENCE_S = 60.0
QUICK = HealthConfig(
    debounce_s=0, missing_debounce_s=0, fabric_debounce_s=0, throttle_debounce_s=0, clear_after_s=0
)


class Node:
    """An imaginary node, its probe and its judge."""

    def __init__(self, fake: FakeNvml, config: HealthConfig = QUICK, **options: object) -> None:
        self.fake = fake
        self.probe = NvmlProbe(**options)
        self.health = HardwareHealth(config)
        self.outcomes: list[HealthEvent | HealthCleared] = []

    def poll(self) -> None:
        readings = self.probe.read()
        self.outcomes += self.health.evaluate(readings, Instant(time.monotonic_ns()))

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"never seen: {what}\n{self.describe()}"
            self.poll()
            time.sleep(0.02)

    def gpu(self, index: int) -> DeviceHealth:
        device = self.health.snapshot(Instant(time.monotonic_ns())).gpu(index)
        assert device is not None
        return device

    def node(self) -> DeviceHealth:
        return self.health.snapshot(Instant(time.monotonic_ns())).node

    def state(self, index: int, metric: Metric) -> Severity:
        device = self.health.snapshot(Instant(time.monotonic_ns())).gpu(index)
        row = None if device is None else device.metric(metric)
        return Severity.UNKNOWN if row is None else row.severity

    def fatal(self) -> list[tuple[int | None, Metric]]:
        return [
            (outcome.device.index, outcome.metric)
            for outcome in self.outcomes
            if isinstance(outcome, HealthEvent) and outcome.severity is Severity.FATAL
        ]

    def describe(self) -> str:
        snapshot = self.health.snapshot(Instant(time.monotonic_ns()))
        return "\n".join(
            f"{device.device}: {device.severity} "
            + "; ".join(
                f"{row.metric}={row.value} {row.severity} {row.reason}"
                for row in device.metrics
                if row.severity is not Severity.HEALTHY
            )
            for device in snapshot.devices
        )


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(config: HealthConfig = QUICK, *, count: int = 8, **options: object) -> Node:
        fake = FakeNvml(tmp_path, count)
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        made.append(Node(fake, config, **options))
        return made[-1]

    yield make
    for each in made:
        each.probe.close()


def test_a_well_node_is_read_as_well(node: Callable[..., Node]) -> None:
    """A false fault would stop every job on every node."""
    ours = node()
    ours.poll()
    ours.until(
        lambda: ours.state(7, Metric.XID_WATCH) is Severity.HEALTHY, "listening for error events"
    )
    assert ours.outcomes == []
    assert [gpu.device.pci for gpu in ours.probe.gpus][:2] == ["0000:18:00", "0000:20:00"]
    assert [gpu.device.index for gpu in ours.probe.gpus] == list(range(8))
    for index in range(8):
        assert ours.gpu(index).severity is Severity.HEALTHY, ours.describe()
        rows = {row.metric for row in ours.gpu(index).metrics}
        assert rows >= set(DEVICE_METRICS) - {Metric.FABRIC_STATE, Metric.FABRIC_HEALTH}
    assert len(ours.probe.helpers) == 1, "one process looks after all devices"


@pytest.mark.parametrize(
    ("rules", "metric"),
    [
        ({"gpu3_ecc_unc_vol": 1}, Metric.ECC_UNCORRECTABLE_VOLATILE),
        (
            {"gpu3_ecc_unc_vol": "error:3", "gpu3_ecc_unc_agg": 1},
            Metric.ECC_UNCORRECTABLE_AGGREGATE,
        ),
        ({"gpu3_sram_exceeded": 1}, Metric.SRAM_THRESHOLD_EXCEEDED),
        ({"gpu3_remap_failure": 1}, Metric.REMAP_FAILURE),
        ({"gpu3_temperature": 94}, Metric.TEMPERATURE_C),
        ({"gpu3_link2_recovery": 20_000}, Metric.NVLINK_ERRORS),
        ({"gpu3_link0_crc_data": 20_000}, Metric.NVLINK_ERRORS),
        ({"gpu3_field230": 2}, Metric.RECOVERY_ACTION),
        ({"gpu3_lost": 1}, Metric.DEVICE_LOST),
    ],
)
def test_a_fatal_fault_of_one_device_convicts_that_device_alone(
    node: Callable[..., Node], rules: dict[str, object], metric: Metric
) -> None:
    """The wrong device is replaced and the broken one serves on."""
    ours = node()
    ours.poll()
    ours.fake.set(**rules)
    ours.until(ours.fatal, str(metric))
    ours.poll()
    assert ours.fatal() == [(3, metric)]


@pytest.mark.parametrize(
    ("rules", "metric"),
    [
        ({"gpu3_ecc_cor_vol": 500}, Metric.ECC_CORRECTABLE_VOLATILE),
        ({"gpu3_remap_pending": 1}, Metric.REMAP_PENDING),
        ({"gpu3_temperature": 90}, Metric.TEMPERATURE_C),
        ({"gpu3_link1_replay": 500}, Metric.NVLINK_REPLAY),
        ({"gpu3_link1_crc_flit": 500}, Metric.NVLINK_CRC_FLIT),
        ({"gpu3_link1_recovery": 500}, Metric.NVLINK_ERRORS),
        ({"gpu3_pcie_replay": 50}, Metric.PCIE_REPLAY),
        ({"gpu3_throttle": 0x40}, Metric.THROTTLE_REASONS),
        ({"gpu3_field230": 4}, Metric.RECOVERY_ACTION),
    ],
)
def test_a_precursor_of_one_device_warns_of_that_device_alone(
    node: Callable[..., Node], rules: dict[str, object], metric: Metric
) -> None:
    """A job would be stopped for a device that computes correctly."""
    ours = node()
    ours.poll()
    ours.fake.set(**rules)
    ours.until(lambda: ours.state(3, metric) is Severity.WARNING, str(metric))
    assert [(o.device.index, o.metric, o.severity) for o in ours.outcomes] == [
        (3, metric, Severity.WARNING)
    ]


def test_a_lost_device_comes_back_when_it_answers_again(node: Callable[..., Node]) -> None:
    """A node whose device was reset would stay out of service."""
    ours = node(look_again_s=0)
    ours.poll()
    ours.fake.set(gpu3_lost=1)
    ours.until(ours.fatal, "the loss")
    ours.fake.set(gpu3_lost=0)
    ours.until(
        lambda: any(isinstance(outcome, HealthCleared) for outcome in ours.outcomes), "recovery"
    )
    ours.until(lambda: ours.gpu(3).severity is Severity.HEALTHY, "health")
    lost = {(index, metric) for index, metric in ours.fatal()}
    cleared = {
        (outcome.device.index, outcome.metric)
        for outcome in ours.outcomes
        if isinstance(outcome, HealthCleared)
    }
    assert {index for index, _ in lost} == {3}
    assert cleared == lost


def test_links_of_newer_devices_are_counted_by_their_fields(node: Callable[..., Node]) -> None:
    """A newer NVLink has no such counters, and its failures would stay unseen."""
    ours = node()
    names = ("replay", "recovery", "crc_flit", "crc_data")
    ours.fake.set(**{f"all_links_{name}": None for name in names})
    ours.fake.set(all_field215=0, all_field219=3)
    ours.poll()
    row = ours.gpu(3).metric(Metric.NVLINK_RECOVERY)
    assert row is not None
    assert dict(row.links) == {0: 0, 1: 0, 2: 0, 3: 0}
    ours.fake.set(gpu3_field215=5000)
    ours.until(ours.fatal, "link recoveries")
    assert ours.fatal() == [(3, Metric.NVLINK_ERRORS)]


def test_a_device_without_a_shutdown_temperature_is_judged_by_what_is_left(
    node: Callable[..., Node],
) -> None:
    """Newer devices would overheat unseen."""
    ours = node()
    ours.fake.set(all_shutdown=None, all_margin=30, all_field193=-8)
    ours.poll()
    row = ours.gpu(3).metric(Metric.TEMPERATURE_MARGIN_C)
    assert row is not None
    assert row.value == 38
    ours.fake.set(gpu3_margin=-7)
    ours.until(ours.fatal, "the margin")
    assert ours.fatal() == [(3, Metric.TEMPERATURE_C)]


def test_an_error_event_arrives_without_waiting_for_the_next_poll(
    node: Callable[..., Node],
) -> None:
    """A whole poll interval of training on a dead device."""
    ours = node()
    woken: list[float] = []
    ours.probe.wake = lambda: woken.append(time.monotonic())
    ours.until(
        lambda: ours.state(7, Metric.XID_WATCH) is Severity.HEALTHY, "listening for error events"
    )
    ours.fake.raise_xid(3, 79)
    ours.fake.raise_xid(5, 31)
    deadline = time.monotonic() + PATIENCE_S
    while len(woken) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ours.poll()
    assert ours.fatal() == [(3, Metric.XID)]
    assert ours.state(5, Metric.XID) is Severity.WARNING
    row = ours.gpu(3).metric(Metric.XID)
    assert row is not None
    assert dict(row.counts) == {79: 1}


def test_a_call_about_starting_nvml_that_hangs_is_given_up_and_tried_later(
    node: Callable[..., Node],
) -> None:
    """The monitor itself would hang, on the one node that needs it."""
    ours = node(query_timeout_s=0.5)
    ours.fake.set(node_init="hang")
    ours.until(lambda: ours.node().metric(Metric.QUERY_STUCK_S), "the hang")
    assert ours.probe.helpers == ()
    assert ours.fatal() == []


def test_a_device_that_hangs_from_the_start_hides_no_other(node: Callable[..., Node]) -> None:
    """A node that boots with one bad device would be blind on all of them."""
    ours = node(query_timeout_s=0.5)
    ours.fake.set(gpu4_open="hang")
    others = [index for index in range(8) if index != 4]
    ours.until(
        lambda: all(ours.state(index, Metric.XID_WATCH) is Severity.HEALTHY for index in others),
        "the other devices",
    )
    assert {ours.gpu(index).severity for index in others} == {Severity.HEALTHY}
    assert ours.gpu(4).severity is Severity.UNKNOWN, ours.describe()


def test_a_helper_that_dies_is_replaced(node: Callable[..., Node]) -> None:
    """One crash of the driver's library would end the watch for good."""
    ours = node()
    ours.poll()
    (pid,) = ours.probe.helpers
    os.kill(pid, signal.SIGKILL)
    ours.until(lambda: ours.gpu(3).severity is Severity.UNKNOWN, "blindness")
    assert ours.fatal() == []
    ours.probe._main.start_again_at_once()
    ours.until(lambda: ours.gpu(3).severity is Severity.HEALTHY, "sight")


def test_closing_leaves_no_process_behind(node: Callable[..., Node]) -> None:
    """A node would collect one process for every restart of its sidecar."""
    ours = node()
    ours.poll()
    (pid,) = ours.probe.helpers
    ours.probe.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_source_for_one_device_reads_that_device_alone(node: Callable[..., Node]) -> None:
    """The callers of eight sources would get eight copies of every fault."""
    ours = node(device_index=5)
    ours.poll()
    assert [gpu.device.index for gpu in ours.probe.gpus] == [5]
    ours.until(lambda: ours.gpu(5).severity is Severity.HEALTHY, "health")


def test_without_the_library_everything_is_unknown_and_says_why(
    monkeypatch: pytest.MonkeyPatch, node: Callable[..., Node], tmp_path: Path
) -> None:
    """A node without a driver would be reported as well."""
    ours = node()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    ours.poll()
    row = ours.node().metric(Metric.NVML)
    assert row is not None
    if row.severity is Severity.HEALTHY:
        pytest.skip("this machine has the real library")
    assert (row.severity, row.reason) == (Severity.UNKNOWN, "NVML Shared Library Not Found")
    assert ours.node().severity is Severity.UNKNOWN
    assert ours.outcomes == []


PARENT = """
import sys, time
from sidecar.hardware.nvml_process import NvmlProcess
process = NvmlProcess({"pci": ["0000:18:00"]}, lambda urgent: None)
while not any("hello" in message for message in process.take()):
    time.sleep(0.01)
process.send({"round": 1})
while not any("step" in message for message in process.take()):
    time.sleep(0.01)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_a_helper_ends_with_its_parent_even_in_a_call_that_never_returns(
    node: Callable[..., Node],
) -> None:
    """A node would keep a stuck process, and an open driver, for every sidecar that was killed."""
    ours = node()
    ours.fake.set(all_temperature="hang")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        os.kill(helper, 0)
        parent.kill()
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{helper}").exists() and not _is_zombie(helper):
        assert time.monotonic() < deadline, "the helper outlived its parent"
        time.sleep(0.02)


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


_ANSWERS = st.one_of(
    st.integers(0, 3),
    st.integers(-(2**40), 2**63 - 1),
    st.sampled_from(["error:2", "error:3", "error:15", "error:16", "error:19", "error:999"]),
    st.none(),
)
_KEYS = st.sampled_from([*WELL, "lost", "margin", "field193", "field215", "sram_exceeded", "open"])


def test_whatever_the_driver_answers_is_read_without_an_error(node: Callable[..., Node]) -> None:
    """One odd answer of one device would end the watch over all of them."""
    ours = node(look_again_s=0.2)

    @settings(max_examples=40, deadline=None)
    @given(st.dictionaries(_KEYS, _ANSWERS, max_size=6), st.integers(0, 9))
    def read(rules: dict[str, object], count: int) -> None:
        ours.fake.set(node_count=count, **{f"gpu3_{key}": value for key, value in rules.items()})
        ours.poll()
        ours.fake.set(node_count=8, **dict.fromkeys([f"gpu3_{key}" for key in rules]))

    read()
    ours.probe._main.stop()
    ours.probe._main.start_again_at_once()
    ours.until(lambda: ours.state(6, Metric.TEMPERATURE_C) is Severity.HEALTHY, "sight again")
    others = {index for index, metric in ours.fatal() if metric is not Metric.DEVICE_MISSING}
    assert others <= {3}, "an odd answer of one device convicts no other"
