"""A driver that answers anything: numbers beyond reason, every error, and devices that vanish."""

import time
from pathlib import Path

import pytest
from hypothesis import strategies as st

from scout.clock import Instant
from sidecar.hardware.health import HardwareHealth, HealthConfig
from sidecar.hardware.nvml_probe import NvmlProbe
from sidecar.hardware.readings import Known, Metric, Reading, Severity
from tests.fakenvml.build import WELL, FakeNvml, compiler
from tests.fuzz.budget import fuzz

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

OWNERS = ("gpu0", "gpu1", "all", "gpu7", "gpu15")
KEYS = (*WELL, "field193", "field215", "field219", "remap_pending", "lost", "absent", "mig")
VALUES = st.one_of(
    st.integers(0, 200),
    st.sampled_from([-1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1]),
    st.integers(0, 30).map(lambda code: f"error:{code}"),
    st.just("error:999"),
)
CHANGES = st.dictionaries(
    st.tuples(st.sampled_from(OWNERS), st.sampled_from(KEYS)), VALUES, max_size=6
)
SCRIPTS = st.tuples(CHANGES, st.integers(0, 9), st.sampled_from([0, 0, 0, 1, 8]))
CONVICTING = frozenset({Metric.DEVICE_LOST, Metric.DEVICE_MISSING, Metric.QUERY_STUCK_S})
"""What convicts although the device gives no number: it is gone."""


def test_no_answer_of_the_driver_ends_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver that misbehaves is the one that the watch is for."""
    fake = FakeNvml(tmp_path, count=2)
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    well = dict(fake.rules)
    probe = NvmlProbe(query_timeout_s=5)
    health = HardwareHealth(HealthConfig(debounce_s=0, clear_after_s=0, missing_debounce_s=0))

    def check(script: tuple[dict[tuple[str, str], object], int, int]) -> None:
        changes, count, xids = script
        fake.rules = {**well, "node.count": count}
        for (owner, key), value in changes.items():
            fake.rules[f"{owner.removeprefix('gpu')}.{key}"] = value
        for number in range(xids):
            fake.events.append((number % 2, 13 + number))
        fake.events = fake.events[-200:]
        fake.write()
        readings = probe.read()
        assert readings
        assert all(isinstance(reading, Reading) for reading in readings)
        health.evaluate(readings, Instant(time.monotonic_ns()))
        known = {
            (str(reading.device), reading.metric)
            for reading in readings
            if isinstance(reading.value, Known)
        }
        for seen in health.snapshot(Instant(time.monotonic_ns())).devices:
            for row in seen.metrics:
                if row.severity is Severity.FATAL and row.value is None:
                    assert row.metric in CONVICTING or known

    try:
        fuzz(SCRIPTS, check)
    finally:
        probe.close()
    assert probe.helpers == ()
