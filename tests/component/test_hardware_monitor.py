"""The monitor with real threads, and the sources that need no device."""

import asyncio
import http.server
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sidecar.hardware
from scout.clock import Instant
from sidecar.events import HardwareFinding
from sidecar.hardware import (
    DcgmExporterSource,
    Device,
    FileSource,
    HardwareHealthMonitor,
    HealthCleared,
    HealthConfig,
    HealthEvent,
    KernelLogSource,
    Known,
    Metric,
    NotSupported,
    NvmlSource,
    Reading,
    Severity,
    SourceError,
    Unknown,
)
from sidecar.hardware.readings import NODE
from sidecar.hardware.watch import HardwareWatch, watch_hardware
from tests.fakenvml.build import FakeNvml, compiler

pytestmark = pytest.mark.component

PATIENCE_S = 60.0
QUICK = HealthConfig(poll_interval_s=0.05, debounce_s=0, clear_after_s=0)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never seen: {what}"
        time.sleep(0.01)


class Told:
    """A source that repeats what it is told to say."""

    def __init__(self, name: str = "told") -> None:
        self.name = name
        self.value: float | None = 0
        self.reads = 0
        self.closed = False
        self.error: Exception | None = None
        self.blocked: threading.Event | None = None

    def read(self) -> list[Reading]:
        self.reads += 1
        if self.blocked is not None:
            self.blocked.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        value = Unknown("no answer") if self.value is None else Known(self.value)
        return [
            Reading(
                source=self.name,
                device=Device(index=2),
                metric=Metric.REMAP_FAILURE,
                value=value,
                at=Instant(time.monotonic_ns()),
            )
        ]

    def close(self) -> None:
        self.closed = True


def test_the_monitor_is_used_as_the_guide_shows() -> None:
    """A program written for it would not start."""
    heard: list[HealthEvent] = []
    source = Told()
    monitor = HardwareHealthMonitor(QUICK, [source], on_event=heard.append)
    monitor.start()
    until(lambda: source.reads > 2, "polling")
    source.value = 1
    until(lambda: heard, "the fault")
    reads = source.reads
    until(lambda: source.reads > reads + 2, "polling on")
    monitor.stop()
    assert source.closed
    assert [(event.device.index, event.metric, event.value) for event in heard] == [
        (2, Metric.REMAP_FAILURE, 1)
    ]
    assert heard[0].severity is Severity.FATAL


def test_a_recovery_is_told_and_a_relapse_is_a_new_event() -> None:
    """A device that was repaired stays out, or breaks again unseen."""
    heard: list[object] = []
    source = Told()
    monitor = HardwareHealthMonitor(QUICK, [source], heard.append, on_clear=heard.append)
    for value in (0, 1, 1, 0, 0, 1):
        source.value = value
        monitor.poll_once()
    assert [type(outcome) for outcome in heard] == [HealthEvent, HealthCleared, HealthEvent]


def test_poll_once_returns_the_new_fatal_events() -> None:
    """A caller with a loop of its own would have to start threads."""
    source = Told()
    monitor = HardwareHealthMonitor(QUICK, [source], on_event=lambda _event: None)
    assert monitor.poll_once() == ()
    source.value = 1
    assert [event.metric for event in monitor.poll_once()] == [Metric.REMAP_FAILURE]
    assert monitor.poll_once() == ()


@pytest.mark.parametrize("error", [SourceError("gone"), RuntimeError("a bug of its own")])
def test_a_source_that_fails_is_shown_with_its_reason_and_stops_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad source would silence all others, or fail without a word."""
    bad, good = Told("bad"), Told("good")
    bad.error = error
    monitor = HardwareHealthMonitor(QUICK, [bad, good], on_event=lambda _event: None)
    with caplog.at_level(logging.WARNING):
        monitor.poll_once()
        monitor.poll_once()
    first, second = monitor.snapshot().sources
    assert (first.name, first.failures, first.age_s) == ("bad", 2, None)
    assert str(error) in first.trouble
    assert (second.trouble, second.failures) == ("", 0)
    assert len(caplog.records) == 1, "said once, not at every poll"


def test_a_callback_that_fails_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    """The caller's mistake about one device would leave the others unwatched."""

    def fail(_event: HealthEvent) -> None:
        raise ZeroDivisionError

    source = Told()
    source.value = 1
    cleared: list[HealthCleared] = []
    monitor = HardwareHealthMonitor(QUICK, [source], fail, on_clear=cleared.append)
    monitor.poll_once()
    source.value = 0
    monitor.poll_once()
    assert cleared
    assert "callback" in caplog.text


def test_a_source_that_never_returns_blinds_itself_alone() -> None:
    """A hung network file system would hide a broken device."""
    stuck, good = Told("stuck"), Told("good")
    stuck.blocked = threading.Event()
    heard: list[HealthEvent] = []
    monitor = HardwareHealthMonitor(QUICK, [stuck, good], on_event=heard.append)
    monitor.start()
    try:
        good.value = 1
        until(lambda: heard, "the other source's fault")
        seen = next(entry for entry in monitor.snapshot().sources if entry.name == "stuck")
        assert seen.reading_for_s is not None
        assert seen.age_s is None
    finally:
        stuck.blocked.set()
        monitor.stop()


def test_a_source_that_calls_is_read_before_its_time() -> None:
    """A fault in the kernel log would wait for the next poll."""
    kernel = KernelLogSource()
    heard: list[HealthEvent] = []
    slow = HealthConfig(poll_interval_s=PATIENCE_S * 10)
    monitor = HardwareHealthMonitor(slow, [kernel], on_event=heard.append)
    monitor.start()
    try:
        until(lambda: monitor.snapshot().sources[0].age_s is not None, "the first read")
        kernel.tell(
            Metric.KERNEL_FAULT,
            Device(pci="0000:3b:00"),
            at=Instant(time.monotonic_ns()),
            claim=Severity.FATAL,
            detail="PCIe Bus Error: severity=Uncorrected (Fatal)",
        )
        until(lambda: heard, "the fault")
    finally:
        monitor.stop()
    assert "Uncorrected" in heard[0].message


def test_two_sources_of_one_name_are_refused() -> None:
    """The readings of one would be taken for the other's."""
    with pytest.raises(ValueError, match="name of its own"):
        HardwareHealthMonitor(QUICK, [Told(), Told()], on_event=lambda _event: None)


def test_every_public_name_can_be_imported() -> None:
    """A name in the documentation that is not there."""
    for name in sidecar.hardware.__all__:
        assert getattr(sidecar.hardware, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        _ = sidecar.hardware.nothing_of_the_sort


# --- files ------------------------------------------------------------------------------------


def test_a_file_of_readings_is_followed_line_by_line(tmp_path: Path) -> None:
    """What another program found on this node would not be heard."""
    path = tmp_path / "health.jsonl"
    source = FileSource(path)
    with pytest.raises(SourceError, match="not there"):
        source.read()
    path.write_text('{"metric": "temperature_c", "value": 91, "gpu": 3}\n{"metric": "xid", "val')
    (first,) = source.read()
    assert (first.device, first.metric, first.value) == (
        Device(index=3),
        Metric.TEMPERATURE_C,
        Known(91),
    )
    with path.open("a") as file:
        file.write('ue": 79, "pci": "0000:3b:00", "count": 5}\n')
        file.write('{"metric": "ecc_uncorrectable_volatile", "unsupported": true, "gpu": 1}\n')
        file.write('{"metric": "temperature_c", "value": null, "reason": "asleep", "gpu": 1}\n')
        file.write('{"metric": "external", "value": 1, "severity": "fatal", "detail": "retire"}\n')
    event, absent, unknown, word = source.read()
    assert (event.value, event.count, event.device.pci) == (Known(79), 5, "0000:3b:00")
    assert absent.value == NotSupported()
    assert unknown.value == Unknown("asleep")
    assert (word.device, word.claim) == (NODE, Severity.FATAL)
    assert source.read() == []


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        '{"value": 1}',
        '{"metric": "no such metric", "value": 1}',
        '{"metric": "temperature_c", "value": "hot"}',
        '{"metric": "temperature_c", "value": true}',
        '{"metric": "temperature_c", "value": NaN}',
        '{"metric": "temperature_c", "value": 1e300}',
        '{"metric": "temperature_c", "value": 1, "gpu": -1}',
        '{"metric": "temperature_c", "value": 1, "gpu": "3"}',
        '{"metric": "temperature_c", "value": 1, "uuid": ""}',
        '{"metric": "temperature_c", "value": 1, "severity": "bad"}',
        "[" * 100_000,
    ],
)
def test_a_bad_line_is_counted_and_the_next_one_is_read(tmp_path: Path, line: str) -> None:
    """One typing error would end the watch, or be taken for a reading."""
    path = tmp_path / "health.jsonl"
    path.write_text(line + '\n{"metric": "pcie_replay", "value": 1, "gpu": 0}\n')
    source = FileSource(path)
    assert [reading.metric for reading in source.read()] == [Metric.PCIE_REPLAY]
    assert source.lines_bad >= 1, "a line beyond the limit is several"
    assert source.last_bad


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=5))
def test_arbitrary_bytes_in_the_file_raise_nothing(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    """A torn write would end the watch over the hardware."""
    path = tmp_path_factory.mktemp("bytes") / "health.jsonl"
    path.write_bytes(b"")
    source = FileSource(path)
    for chunk in chunks:
        with path.open("ab") as file:
            file.write(chunk)
        assert all(isinstance(reading, Reading) for reading in source.read())
    source.close()


@pytest.mark.parametrize(
    ("told", "severity"),
    [
        ({"labels": {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}}, "healthy"),
        (
            {
                "labels": {
                    "sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReboot"
                }
            },
            "fatal",
        ),
        ({"labels": {"sagemaker.amazonaws.com/deep-health-check-status": "Failed"}}, "fatal"),
        ({"labels": {"sagemaker.amazonaws.com/deep-health-check-status": "InProgress"}}, "warning"),
        (
            {
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {
                        "type": "NvidiaErrorTerminate",
                        "status": "True",
                        "reason": "XidHardwareFailure",
                    },
                ]
            },
            "fatal",
        ),
        (
            {
                "conditions": [
                    {"type": "NvidiaErrorReboot", "status": "True", "reason": "XidUserAppError"}
                ]
            },
            "healthy",
        ),
        ({"conditions": [{"type": "NvidiaErrorReboot", "status": "False"}]}, "healthy"),
    ],
)
def test_what_kubernetes_says_of_a_node_is_understood(
    tmp_path: Path, told: dict[str, object], severity: str
) -> None:
    """A node that another agent has condemned would get the next job."""
    path = tmp_path / "node.jsonl"
    path.write_text(json.dumps(told) + "\n")
    (reading,) = FileSource(path).read()
    assert (reading.metric, reading.device) == (Metric.EXTERNAL, NODE)
    assert reading.claim is not None
    assert reading.claim.value == severity


# --- dcgm-exporter ----------------------------------------------------------------------------


@pytest.fixture
def page() -> Iterator[tuple[str, list[bytes]]]:
    body = [b""]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body[0])

        def log_message(self, *_arguments: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/metrics", body
    server.shutdown()
    server.server_close()
    thread.join()


EXPORTED = b"""# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a",pci_bus_id="00000000:3B:00.0",device="nvidia0"} 41
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-b",pci_bus_id="00000000:5D:00.0",device="nvidia1"} 43
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a",pci_bus_id="00000000:3B:00.0"} 31
DCGM_FI_DEV_XID_ERRORS{gpu="1",UUID="GPU-b",pci_bus_id="00000000:5D:00.0"} 0
# TYPE DCGM_FI_DEV_PCIE_REPLAY_COUNTER counter
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{gpu="0",UUID="GPU-a"} 7
# TYPE DCGM_FI_DEV_ECC_DBE_VOL_TOTAL counter
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0",UUID="GPU-a"} 9223372036854775794
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a"} 80000
"""


def test_an_exporters_page_is_read_by_device(page: tuple[str, list[bytes]]) -> None:
    """A node whose only telemetry is the exporter would be unwatched."""
    url, body = page
    body[0] = EXPORTED
    source = DcgmExporterSource(url)
    first = {(r.device.index, r.metric): r for r in source.read()}
    assert first[0, Metric.TEMPERATURE_C].device == Device(index=0, uuid="GPU-a", pci="0000:3b:00")
    assert first[0, Metric.PCIE_REPLAY].value == Known(7)
    assert isinstance(first[0, Metric.ECC_UNCORRECTABLE_VOLATILE].value, Unknown)
    assert (0, Metric.XID) not in first, "an Xid from before the first scrape is history"
    body[0] = EXPORTED.replace(b'5D:00.0"} 0', b'5D:00.0"} 79')
    events = [r for r in source.read() if r.metric is Metric.XID]
    assert [(r.device.index, r.value) for r in events] == [(1, Known(79))]
    assert not [r for r in source.read() if r.metric is Metric.XID], "told once"


@pytest.mark.parametrize("text", [b"", b"<html>no</html>", b"\xff\xfe{", b'a{b="c} 1\n'])
def test_a_page_that_is_none_is_said_to_be_none(page: tuple[str, list[bytes]], text: bytes) -> None:
    """A proxy's error page would be read as eight devices in good health."""
    url, body = page
    body[0] = text
    with pytest.raises(SourceError):
        DcgmExporterSource(url).read()


def test_an_exporter_that_is_not_there_is_said_to_be_not_there() -> None:
    """Nothing read would look like nothing wrong."""
    with pytest.raises(SourceError, match="cannot be scraped"):
        DcgmExporterSource("http://127.0.0.1:9/metrics", timeout_s=1).read()
    with pytest.raises(ValueError, match="http"):
        DcgmExporterSource("file:///etc/passwd")


# --- the daemon's watch -----------------------------------------------------------------------


def test_the_watch_turns_a_fault_into_a_finding_on_the_event_loop() -> None:
    """The agent would be called from another thread, and its state torn."""
    source = Told()
    found: list[HardwareFinding] = []
    threads: set[int] = set()

    def emit(finding: HardwareFinding) -> None:
        threads.add(threading.get_ident())
        found.append(finding)

    async def watch() -> None:
        watching = HardwareWatch(QUICK, [source], emit)
        task = asyncio.create_task(watching.run())
        source.value = 1
        deadline = time.monotonic() + PATIENCE_S
        while not found:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        device = watching.snapshot().gpu(2)
        assert device is not None
        assert device.severity is Severity.FATAL
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(watch())
    assert threads == {threading.get_ident()}
    assert source.closed
    (finding,) = found
    assert (finding.gpu, finding.reason) == (2, "RemapFailure")
    assert "could not be remapped" in finding.message


@pytest.mark.skipif(compiler() is None, reason="no C compiler to build the library with")
def test_the_watch_convicts_a_device_that_nvml_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part works and the whole does not."""
    fake = FakeNvml(tmp_path)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    found: list[HardwareFinding] = []

    async def watch() -> None:
        source = NvmlSource()
        config = HealthConfig(poll_interval_s=0.2)
        task = asyncio.create_task(watch_hardware(config, [source], found.append))
        deadline = time.monotonic() + PATIENCE_S
        while not source.gpus:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        fake.set(gpu6_remap_failure=1)
        while not found:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.helpers == ()

    asyncio.run(watch())
    assert [(finding.gpu, finding.reason) for finding in found] == [(6, "RemapFailure")]
