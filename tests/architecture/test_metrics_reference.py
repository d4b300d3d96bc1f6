"""docs/metrics.md lists what the code exports, and the code exports what it lists."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.metrics_core import Metric

from coordinator.history import History
from coordinator.metrics import JobCollector
from coordinator.phases import JobPhase
from coordinator.view import JobView
from scout.clock import Instant
from sidecar.api import AgentState, StatusReport
from sidecar.hardware.health import HardwareHealth
from sidecar.hardware.kernel_log import KernelLogCounters
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.logs.numbers import Extracted
from sidecar.metrics import NodeCollector, NodeCounters

ROOT = Path(__file__).resolve().parents[2]
Series = dict[str, tuple[str, frozenset[str]]]


def documented(section: str) -> Series:
    """Name -> type and labels, as the reference lists them for one component."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    part = text.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(outrider_\w+)` \| (\w+) \|(.*?)\| (.+) \|$", part, re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `outrider_", part, re.MULTILINE))
    assert all(meaning.endswith(".") for *_, meaning in rows)
    return {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows
    }


def exported(families: Iterable[Metric]) -> Series:
    """Name -> type and labels, as a scrape would show them."""
    suffixes = {"counter": "_total", "info": "_info"}
    series: Series = {}
    for family in families:
        # A family without a sample yet knows its labels all the same.
        labels = set(getattr(family, "_labelnames", ()))
        labels.update(*(sample.labels for sample in family.samples))
        kind = "gauge" if family.type == "info" else family.type
        name = f"{family.name}{suffixes.get(family.type, '')}"
        series[name] = (kind, frozenset(labels - {"le"}))
    return series


def test_the_coordinator_exports_what_the_reference_lists() -> None:
    """Whoever builds an alert reads the reference, not the code."""
    nothing_yet = JobView(
        job="job",
        phase=JobPhase.WAITING,
        phase_age_s=0.0,
        generation=0,
        topology_version=0,
        nnodes=1,
        nproc_per_node=1,
        world=(),
        step=None,
        complete_checkpoints=(),
        chosen_checkpoints=(),
        nodes=(),
        excluded={},
        open_incident=None,
        restarts_total=0,
        restart_budget_remaining=1,
        outcome_reason="",
        waiting_for="",
    )
    collector = JobCollector(
        view=lambda: nothing_yet, history=History(), refused=lambda: 0, dropped=lambda: 0
    )
    assert exported(collector.collect()) == documented("Coordinator")


class FreshNode:
    """A sidecar that has seen nothing yet."""

    counters = NodeCounters()

    def snapshot(self) -> StatusReport:
        return StatusReport(
            node="n0",
            incarnation="i",
            state=AgentState.INIT,
            generation=0,
            stopped_generation=0,
            topology_version=0,
            rendezvous_port=0,
        )

    def ipc_counters(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {}, {}

    def log_counters(self) -> tuple[int, Mapping[str, int]]:
        return 0, {}

    def log_series(self) -> Mapping[int, Mapping[str, Extracted]]:
        return {}

    def kernel_log_counters(self) -> tuple[KernelLogCounters, tuple[int, ...]]:
        return KernelLogCounters(), ()

    def kernel_log_available(self) -> bool:
        return False

    def hardware_health(self) -> HealthSnapshot:
        return HardwareHealth().snapshot(Instant(0))

    def uplink_connected(self) -> bool:
        return False


def test_the_sidecar_exports_what_the_reference_lists() -> None:
    """A panel over a series that nobody exports stays empty without a word."""
    collector = NodeCollector("job", "0", FreshNode())
    series = {
        name: (kind, labels - {"training_job"})
        for name, (kind, labels) in exported(collector.collect()).items()
    }
    assert series == documented("Sidecar")
