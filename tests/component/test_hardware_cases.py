"""Failures that others met on real nodes, each against the whole path that it concerns.

The probe is real, its helper process is real, NVIDIA's bindings are real; the library below them
answers from a script.
"""

import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scout.clock import SECOND, Instant
from sidecar.hardware.dcgm import DcgmExporterSource
from sidecar.hardware.devices import Gpu, rank_devices, visible
from sidecar.hardware.health import HardwareHealth, HealthConfig, HealthEvent
from sidecar.hardware.monitor import HardwareHealthMonitor
from sidecar.hardware.nvml_probe import NvmlProbe
from sidecar.hardware.readings import NODE, Device, Known, Metric, Reading, Severity
from sidecar.hardware.snapshot import DeviceHealth
from sidecar.hardware.sources import KernelLogSource, NvmlSource, claim_of
from sidecar.hardware.watch import finding_of
from tests.fakenvml.build import FakeNvml, compiler

pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(compiler() is None, reason="no C compiler to build the library with"),
]

CASES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures/cases/hardware_health.json").read_text(encoding="utf-8")
)
PATIENCE_S = 60.0
QUICK = HealthConfig(debounce_s=0, missing_debounce_s=0, fabric_debounce_s=0, clear_after_s=0)


class Bench:
    """One imaginary node: its script, what reads it and what judges it."""

    def __init__(self, fake: FakeNvml) -> None:
        self.fake = fake
        self.probe = NvmlProbe(query_timeout_s=0.5)
        self.health = HardwareHealth(QUICK)
        self.events: list[HealthEvent] = []

    def poll(self) -> list[HealthEvent]:
        return self.judge(self.probe.read())

    def judge(self, readings: list[Reading]) -> list[HealthEvent]:
        outcomes = self.health.evaluate(readings, Instant(time.monotonic_ns()))
        found = [event for event in outcomes if isinstance(event, HealthEvent)]
        self.events += found
        return found

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            self.poll()
            time.sleep(0.02)

    def device(self, index: int) -> DeviceHealth:
        device = self.health.snapshot(Instant(time.monotonic_ns())).gpu(index)
        assert device is not None
        return device

    def state(self, index: int, metric: Metric) -> Severity:
        row = self.device(index).metric(metric)
        return Severity.UNKNOWN if row is None else row.severity

    @property
    def node(self) -> DeviceHealth:
        return self.health.snapshot(Instant(time.monotonic_ns())).node

    def fatal(self) -> list[tuple[int | None, Metric]]:
        return [
            (event.device.index, event.metric)
            for event in self.events
            if event.severity is Severity.FATAL
        ]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    fake = FakeNvml(tmp_path)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    made = Bench(fake)
    yield made
    made.probe.close()


def kernel(reading: tuple[Metric, Device, float, Severity | None], count: int = 1) -> list[Reading]:
    source = KernelLogSource()
    metric, device, value, claim = reading
    source.tell(
        metric, device, at=Instant(time.monotonic_ns()), value=value, claim=claim, count=count
    )
    return source.read()


# --- NVML -------------------------------------------------------------------------------------


def test_c51_a_query_that_hangs_blinds_one_device_and_not_eight(bench: Bench) -> None:
    """Seven healthy devices would be unwatched because of the eighth."""
    place = CASES["C51"]["place"]
    bench.poll()
    bench.fake.set(**{f"gpu{place}_temperature": "hang"})
    bench.until(lambda: bench.state(place, Metric.QUERY_STUCK_S) is not Severity.UNKNOWN)
    bench.until(lambda: len(bench.probe.helpers) > 0)
    bench.fake.set(gpu2_remap_failure=1)
    bench.until(bench.fatal)
    assert bench.fatal() == [(2, Metric.REMAP_FAILURE)]
    for index in set(range(8)) - {2, place}:
        assert bench.state(index, Metric.TEMPERATURE_C) is Severity.HEALTHY
    stuck = bench.device(place)
    assert stuck.severity is Severity.UNKNOWN
    row = stuck.metric(Metric.TEMPERATURE_C)
    assert row is not None
    assert row.severity is Severity.UNKNOWN
    assert "temperature_c" in row.reason


def test_c51_a_stuck_device_warns_and_is_convicted_in_the_end() -> None:
    """A device that answers nothing for ever is no device to train on."""
    health = HardwareHealth(HealthConfig())
    found: list[tuple[int, Severity]] = []
    for waited in range(0, CASES["C51"]["blocked_s"], 5):
        now = Instant(waited * SECOND)
        reading = Reading(
            source="nvml",
            device=Device(index=CASES["C51"]["place"]),
            metric=Metric.QUERY_STUCK_S,
            value=Known(waited),
            at=now,
        )
        found += [
            (waited, event.severity)
            for event in health.evaluate([reading], now)
            if isinstance(event, HealthEvent)
        ]
    assert found == [(10, Severity.WARNING), (60, Severity.FATAL)]


def test_c51_a_device_that_answers_again_goes_back_to_the_others(bench: Bench) -> None:
    """Every device that was once slow would keep a process of its own for good."""
    place = CASES["C51"]["place"]
    bench.probe._rejoin = 0
    bench.poll()
    bench.fake.set(**{f"gpu{place}_temperature": "hang"})
    bench.until(lambda: bench.probe._solos)
    bench.fake.set(**{f"gpu{place}_temperature": 60})
    bench.until(lambda: not bench.probe._solos)
    bench.until(lambda: len(bench.probe.helpers) == 1)
    bench.until(lambda: bench.device(place).severity is Severity.HEALTHY)
    assert len(bench.probe.helpers) == 1


def test_c54_ecc_that_is_not_supported_is_neither_zero_nor_fatal(bench: Bench) -> None:
    """No errors would be read where nobody counts them."""
    names = ("ecc_unc_vol", "ecc_unc_agg", "ecc_cor_vol", "ecc_cor_agg")
    bench.fake.set(**{f"all_{name}": f"error:{CASES['C54']['error']}" for name in names})
    bench.poll()
    bench.until(lambda: bench.state(3, Metric.XID_WATCH) is Severity.HEALTHY)
    row = bench.device(3).metric(Metric.ECC_UNCORRECTABLE_VOLATILE)
    assert row is not None
    assert (row.severity, row.value, row.supported) == (Severity.UNKNOWN, None, False)
    assert bench.state(3, Metric.TEMPERATURE_C) is Severity.HEALTHY, "other queries go on"
    assert bench.events == []


@pytest.mark.parametrize("entry", CASES["C56"]["lists"], ids=lambda entry: str(entry["visible"]))
def test_c56_visible_devices_are_read_as_cuda_reads_them(entry: dict[str, Any]) -> None:
    """The healthy neighbour of a broken device would be blamed."""
    gpus = [
        Gpu(device=Device(index=place, uuid=uuid))
        for place, uuid in enumerate(CASES["C56"]["uuids"])
    ]
    environment = {"CUDA_VISIBLE_DEVICES": entry["visible"], "CUDA_DEVICE_ORDER": entry["order"]}
    seen = visible(gpus, {name: text for name, text in environment.items() if text is not None})
    assert [slot.device.index for slot in seen.slots] == entry["indices"]
    assert (seen.ambiguous is not None) == entry["ambiguous"]


def test_c56_a_rank_is_found_by_its_device_whatever_the_order() -> None:
    """The fault of one device would stop the rank of another."""
    gpus = [
        Gpu(device=Device(index=place, uuid=uuid, pci=f"0000:{place:02x}:00"))
        for place, uuid in enumerate(CASES["C56"]["uuids"])
    ]
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "3,1"}
    shared = rank_devices(gpus, {0: order, 1: order})
    assert shared.ranks_on(Device(pci="0000:03:00")) == (0,)
    assert shared.ranks_on(gpus[1].device) == (1,)
    assert shared.ranks_on(gpus[0].device) == ()
    own = rank_devices(gpus, {0: {"CUDA_VISIBLE_DEVICES": "GPU-9c01e7"}, 5: order})
    assert own.ranks_on(gpus[3].device) == (0,)
    assert own.doubts == ("local rank 5 sees 2 devices",)


def test_c58_a_replaced_library_is_a_warning_of_the_node_and_no_storm(bench: Bench) -> None:
    """A running job would be stopped by a package upgrade, or the log filled by retries."""
    bench.fake.set(node_init=f"error:{CASES['C58']['error']}")
    for _ in range(5):
        bench.poll()
    assert [(event.device, event.metric, event.severity) for event in bench.events] == [
        (NODE, Metric.DRIVER_MISMATCH, Severity.WARNING)
    ]
    assert "reboot" in bench.events[0].message
    assert bench.probe._main._retry_at is not None, "it waits before it tries again"
    assert bench.probe.helpers == ()


def test_b61_the_kernels_word_on_mismatched_versions_is_the_same_warning(bench: Bench) -> None:
    """One cause, seen by two sources, would be two incidents, or a fault of eight devices."""
    bench.fake.set(node_init="error:18")
    bench.judge(kernel((Metric.DRIVER_MISMATCH, NODE, 1, None)))
    bench.poll()
    assert [(event.device, event.severity) for event in bench.events] == [(NODE, Severity.WARNING)]


def test_c59_an_error_that_was_remapped_warns_until_the_reset_and_growth_convicts(
    bench: Bench,
) -> None:
    """A mended device is thrown away, or a failing one is kept."""
    case = CASES["C59"]
    bench.fake.set(
        gpu3_ecc_unc_vol=case["volatile"],
        gpu3_remap_pending=case["pending"],
        gpu3_remap_failure=case["failure"],
    )
    bench.poll()
    assert bench.state(3, Metric.ECC_UNCORRECTABLE_VOLATILE) is Severity.WARNING
    bench.fake.set(gpu3_ecc_unc_vol=0)
    bench.until(lambda: bench.state(3, Metric.ECC_UNCORRECTABLE_VOLATILE) is Severity.HEALTHY)
    assert bench.fatal() == []
    bench.fake.set(gpu3_ecc_unc_vol=1)
    bench.until(bench.fatal)
    assert bench.fatal() == [(3, Metric.ECC_UNCORRECTABLE_VOLATILE)]


def test_c61_a_device_that_vanished_is_lost_and_no_other_is_blamed(bench: Bench) -> None:
    """Indices move up and the neighbour of the lost device is replaced."""
    place = CASES["C61"]["place"]
    bench.poll()
    before = {gpu.device.uuid: gpu.device.index for gpu in bench.probe.gpus}
    bench.fake.set(**{f"gpu{place}_absent": 1})
    bench.probe._main.stop()
    bench.until(bench.fatal)
    bench.fake.set(gpu5_remap_failure=1)
    bench.until(lambda: len(bench.fatal()) > 1)
    assert bench.fatal() == [(place, Metric.DEVICE_MISSING), (5, Metric.REMAP_FAILURE)]
    assert {gpu.device.uuid: gpu.device.index for gpu in bench.probe.gpus} == before
    assert bench.state(4, Metric.TEMPERATURE_C) is Severity.HEALTHY


def test_c105_a_fabric_that_is_not_ready_is_the_nodes_fault_and_no_devices(bench: Bench) -> None:
    """Eight healthy devices would be replaced, or jobs started that cannot initialise."""
    bench.fake.set(all_fabric_state=CASES["C105"]["fabric_state"])
    bench.until(bench.fatal)
    bench.poll()
    assert bench.fatal() == [(None, Metric.FABRIC_STATE)]
    assert bench.node.severity is Severity.FATAL
    finding = finding_of(bench.events[0])
    assert (finding.gpu, finding.reason) == (None, "FabricState")
    assert {bench.state(index, Metric.TEMPERATURE_C) for index in range(8)} == {Severity.HEALTHY}
    assert {bench.device(index).metric(Metric.FABRIC_STATE) for index in range(8)} == {None}


# --- error events -----------------------------------------------------------------------------


def test_c44_the_event_of_a_lost_device_keeps_the_devices_name(bench: Bench) -> None:
    """The most serious error is the one that is not reported."""
    case = CASES["C44"]
    bench.poll()
    bench.until(lambda: bench.state(0, Metric.XID_WATCH) is Severity.HEALTHY)
    bench.fake.set(**{f"gpu{case['place']}_lost": 1})
    bench.fake.raise_xid(case["place"], case["xid"])
    bench.until(lambda: (case["place"], Metric.XID) in bench.fatal())
    event = next(event for event in bench.events if event.metric is Metric.XID)
    assert event.device.pci == "0000:30:00"
    assert event.device.uuid is not None
    assert finding_of(event).reason == "Xid79"


def test_c44_an_event_of_an_unknown_address_is_told_all_the_same() -> None:
    """A device that was lost before the sidecar started would fail in silence."""
    health = HardwareHealth(QUICK)
    events = health.evaluate(
        kernel((Metric.XID, Device(pci="0000:3b:00"), 79, None)), Instant(time.monotonic_ns())
    )
    assert [type(event) for event in events] == [HealthEvent]
    finding = finding_of(events[0])
    assert finding.gpu is None
    assert "0000:3b:00" in finding.message


@pytest.mark.parametrize("answer", CASES["C46"]["answers"])
def test_c46_error_events_that_cannot_be_waited_for_leave_the_readings_alone(
    bench: Bench, answer: str
) -> None:
    """A stuck driver would silence every reading, and its Xid is in the kernel log only."""
    bench.fake.set(node_event_wait=answer)
    bench.poll()
    bench.poll()
    assert bench.state(3, Metric.TEMPERATURE_C) is Severity.HEALTHY
    assert bench.fatal() == []
    bench.judge(kernel((Metric.XID, Device(pci="0000:30:00"), 119, None)))
    assert bench.fatal() == [(3, Metric.XID)]


@pytest.mark.parametrize("now", CASES["C47"]["now"], ids=lambda now: now["severity"])
def test_c47_what_nvml_says_now_outweighs_an_older_line_about_remapping(
    bench: Bench, now: dict[str, Any]
) -> None:
    """A device that was reset long ago would alarm at every start."""
    old = kernel((Metric.XID, Device(pci="0000:30:00"), CASES["C47"]["xid"], None))
    bench.fake.set(gpu3_remap_pending=now["pending"], gpu3_remap_failure=now["failure"])
    bench.judge([*old, *bench.probe.read()])
    bench.until(lambda: bench.state(3, Metric.XID_WATCH) is Severity.HEALTHY)
    assert bench.device(3).severity.value == now["severity"]
    if now["severity"] == "healthy":
        assert bench.events == []


def test_c49_a_storm_is_one_event_with_a_count() -> None:
    """Eight hundred thousand events would fill the store that should hold the one."""
    case = CASES["C49"]
    health, source = HardwareHealth(QUICK), KernelLogSource()
    told = 0
    polls = case["minutes"] * 60 // 5
    batch = case["lines"] // polls
    now = Instant(0)
    for poll in range(polls):
        now = Instant(poll * 5 * SECOND)
        left = batch if poll < polls - 1 else case["lines"] - batch * (polls - 1)
        for _ in range(left):
            source.tell(Metric.XID, Device(pci="0000:9b:00"), at=now, value=case["xid"])
        readings = source.read()
        assert len(readings) == 1
        told += len(health.evaluate(readings, now))
    assert told == 1
    row = health.snapshot(now).devices[1].metric(Metric.XID)
    assert row is not None
    assert dict(row.counts) == {case["xid"]: case["lines"]}


def test_c53_a_reset_that_is_due_is_seen_from_the_state_alone(bench: Bench) -> None:
    """The error was missed and every counter reads zero; the next job fails to start."""
    bench.fake.set(gpu3_field230=CASES["C53"]["recovery_action"])
    bench.poll()
    assert bench.fatal() == [(3, Metric.RECOVERY_ACTION)]
    assert "GPU reset" in bench.events[0].message


def test_c53_a_driver_without_that_field_loses_no_device(bench: Bench) -> None:
    """Every node with an older driver would be out of service."""
    bench.fake.set(all_field230=None)
    bench.poll()
    bench.until(lambda: bench.device(3).severity is Severity.HEALTHY)
    row = bench.device(3).metric(Metric.RECOVERY_ACTION)
    assert row is not None
    assert (row.severity, row.supported) == (Severity.UNKNOWN, False)
    assert bench.events == []


def test_c106_a_known_code_convicts_even_if_the_device_cannot_be_asked(bench: Bench) -> None:
    """The query fails just because the device is gone, and the event would be let pass."""
    case = CASES["C106"]
    bench.poll()
    bench.until(lambda: bench.state(0, Metric.XID_WATCH) is Severity.HEALTHY)
    bench.fake.set(gpu3_lost=1)
    bench.fake.raise_xid(3, case["known"])
    bench.fake.raise_xid(5, case["unknown"])
    bench.until(lambda: bench.state(5, Metric.XID) is Severity.WARNING)
    bench.until(lambda: (3, Metric.XID) in bench.fatal())
    assert {index for index, _ in bench.fatal()} == {3}
    assert bench.state(5, Metric.RECOVERY_ACTION) is Severity.HEALTHY


def test_c102_codes_that_lists_disagree_about_have_one_documented_meaning() -> None:
    """Two nodes of one fleet would treat the same error differently."""
    config = HealthConfig()
    for code, severity in CASES["C102"]["severities"].items():
        assert config.xid_severity(int(code), None).value == severity, code
    strict = HealthConfig(fatal_xids={63, 79})
    assert strict.xid_severity(63, None) is Severity.FATAL


def test_c110_follow_ups_of_one_nvlink_incident_blame_only_the_root() -> None:
    """Five devices would be replaced for the fault of one."""
    case = CASES["C110"]
    health, source = HardwareHealth(QUICK), KernelLogSource()
    now = Instant(time.monotonic_ns())

    def tell(place: int, xid: int, severity: str) -> None:
        source.tell(Metric.XID, Device(index=place), at=now, value=xid, claim=claim_of(severity))

    for entry in (*case["peers"], case["root"]):
        tell(entry["place"], case["follow_up"], "follow_up")
    for peer in case["peers"]:
        tell(peer["place"], peer["xid"], "warning")
    tell(case["root"]["place"], case["root"]["xid"], "fatal")
    events = [
        event for event in health.evaluate(source.read(), now) if isinstance(event, HealthEvent)
    ]
    assert [e.device.index for e in events if e.severity is Severity.FATAL] == [7]
    assert {e.device.index for e in events if e.severity is Severity.WARNING} == {4, 5, 6}


# --- exporters --------------------------------------------------------------------------------


class Exporter:
    """A metrics page on loopback."""

    def __init__(self) -> None:
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exporter.page.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: object) -> None:
                return

        self.page = ""
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/metrics"


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter()
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


def line(field: str, gpu: int, value: float, **labels: str) -> str:
    written = {"gpu": str(gpu), "UUID": f"GPU-{gpu}", **labels}
    escaped = {
        name: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for name, text in written.items()
    }
    inside = ",".join(f'{name}="{text}"' for name, text in escaped.items())
    return f"{field}{{{inside}}} {value}\n"


def test_c62_labels_that_change_at_every_restart_make_no_new_devices(exporter: Exporter) -> None:
    """A thousand restarts would be a thousand times eight devices, the old ones never gone."""
    source, health = DcgmExporterSource(exporter.url), HardwareHealth(QUICK)
    for attempt in range(0, CASES["C62"]["restarts"], 100):
        exporter.page = "".join(
            line("DCGM_FI_DEV_GPU_TEMP", gpu, 50 + gpu, pod=f"train-{attempt}", pid=str(attempt))
            for gpu in range(8)
        )
        health.evaluate(source.read(), Instant(time.monotonic_ns()))
    assert len(health.snapshot(Instant(time.monotonic_ns())).devices) == 9


def test_c64_a_hostile_label_neither_breaks_the_page_nor_names_a_device(
    exporter: Exporter,
) -> None:
    """One pod's name would blind the node, or fill its memory."""
    case = CASES["C64"]
    hostile = case["label"] + "x" * case["padding"]
    exporter.page = (
        line("DCGM_FI_DEV_GPU_TEMP", 3, 51, pod=hostile)
        + line("DCGM_FI_DEV_ROW_REMAP_FAILURE", 3, 1, pod=hostile, container=hostile)
        + line("DCGM_FI_DEV_GPU_TEMP", 4, 52, UUID=hostile)
    )
    readings = DcgmExporterSource(exporter.url).read()
    assert {(r.device.index, r.metric, r.value) for r in readings} == {
        (3, Metric.TEMPERATURE_C, Known(51)),
        (4, Metric.TEMPERATURE_C, Known(52)),
        (3, Metric.REMAP_FAILURE, Known(1)),
    }
    assert all(len(reading.device.uuid or "") <= 100 for reading in readings)


def test_c66_the_state_is_answered_at_once_while_a_query_hangs(
    bench: Bench, tmp_path: Path
) -> None:
    """Metrics would be missing exactly during the incident."""
    place = CASES["C66"]["place"]
    source = NvmlSource(query_timeout_s=PATIENCE_S)
    config = HealthConfig(poll_interval_s=0.2, unknown_after_s=0.5)
    monitor = HardwareHealthMonitor(config, [source], on_event=lambda _event: None)
    monitor.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while monitor.snapshot().gpu(7) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        bench.fake.set(**{f"gpu{place}_temperature": "hang"})
        while True:
            began = time.monotonic()
            snapshot = monitor.snapshot()
            assert time.monotonic() - began < PATIENCE_S / 2, "it waited for the stuck query"
            (seen,) = snapshot.sources
            device = snapshot.gpu(7)
            assert device is not None
            row = device.metric(Metric.TEMPERATURE_C)
            assert row is not None
            if (seen.reading_for_s or 0) > 1 and row.severity is Severity.UNKNOWN:
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert row.value == 55, "the last value is still shown, with its age"
        assert row.age_s is not None
        assert row.age_s > 0.5
    finally:
        for pid in source.helpers:
            os.kill(pid, signal.SIGKILL)
        monitor.stop()
