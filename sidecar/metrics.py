"""What the node tells Prometheus, computed at each scrape.

A collector over the core's snapshot and the shells' counters: nothing is copied in advance, so a
series never outlives what it speaks of.  Every bounded label is exported from the first scrape,
because an increase from nothing fires no alert.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar.api import AgentState, ExitCause, FaultKind, StatusReport
from sidecar.hardware.kernel_events import KernelKind
from sidecar.hardware.kernel_log import KernelLogCounters
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.hardware.xid import FATAL_CODES
from sidecar.hardware_metrics import hardware_families
from sidecar.logs.numbers import Extracted
from sidecar.workers.ipc_server import ERROR_KINDS
from worker_shim.messages import WORKER_MESSAGES

JOB: Final = "training_job"
_Values: TypeAlias = dict[tuple[str, ...], float]
EXIT_REASONS: Final = ("clean", "error", "signal", "stopped")
"""``stopped`` is an exit that this sidecar asked for."""
OTHER_XID: Final = "other"
XIDS_SHOWN: Final = (*map(str, sorted(FATAL_CODES)), OTHER_XID)
OTHER_KINDS: Final = tuple(
    kind for kind in KernelKind if kind not in (KernelKind.XID, KernelKind.LOG_GAP)
)
"""Kinds of kernel lines that have no counter of their own."""


@dataclass(slots=True)
class NodeCounters:
    """What the daemon counts itself, because no shell does.  Counters only grow."""

    exits: Counter[str] = field(default_factory=Counter)
    faults: Counter[FaultKind] = field(default_factory=Counter)
    events_dropped: int = 0
    _newest_fault: int = 0

    def exited(self, cause: ExitCause, *, asked_for: bool) -> None:
        """Count a worker's end."""
        if asked_for:
            reason = "stopped"
        elif cause.clean:
            reason = "clean"
        else:
            reason = "error" if cause.signal is None else "signal"
        self.exits[reason] += 1

    def reported(self, report: StatusReport) -> None:
        """Count the faults that earlier reports did not show; their ids only grow."""
        for fault in report.faults:
            if fault.fault_id > self._newest_fault:
                self.faults[fault.kind] += 1
        self._newest_fault = max(
            (fault.fault_id for fault in report.faults), default=self._newest_fault
        )


class NodeSources(Protocol):
    """Where the numbers come from."""

    counters: NodeCounters

    def snapshot(self) -> StatusReport:
        """Return the node's state."""

    def ipc_counters(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return messages by type and errors by kind."""

    def log_counters(self) -> tuple[int, Mapping[str, int]]:
        """Return lines read, and matches by rule."""

    def log_series(self) -> Mapping[int, Mapping[str, Extracted]]:
        """Return rank -> the metrics that its output holds."""

    def kernel_log_counters(self) -> tuple[KernelLogCounters, tuple[int, ...]]:
        """Return what the kernel's log held, and the GPUs that are known."""

    def kernel_log_available(self) -> bool:
        """Return whether there is a kernel log to read."""

    def hardware_health(self) -> HealthSnapshot:
        """Return what is known of every device."""

    def uplink_connected(self) -> bool:
        """Return whether the coordinator is reached."""


class NodeCollector(Collector):
    """The node's series, all with the label ``training_job``."""

    def __init__(self, job: str, version: str, sources: NodeSources) -> None:
        self._job = job
        self._version = version
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        """Say nothing in advance: the registry need not call `collect` to know us."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every series as it is now."""
        report = self._sources.snapshot()
        yield from self._agent(report)
        yield from self._ranks(report)
        yield from self._counters()
        yield from hardware_families(self._sources.hardware_health(), (JOB,), (self._job,))

    def _agent(self, report: StatusReport) -> Iterator[Metric]:
        python = platform.python_version()
        yield self._gauge(
            "outrider_build_info",
            "Always 1; names the version.",
            ("component", "version", "python"),
            {("sidecar", self._version, python): 1},
        )
        yield self._gauge(
            "outrider_agent_state",
            "1 for the state that the node's agent is in, 0 for every other.",
            ("state",),
            {(state.value,): float(state is report.state) for state in AgentState},
        )
        for name, text, value in (
            ("generation", "Generation of the last start obeyed.", report.generation),
            (
                "stopped_generation",
                "Highest generation whose stop is complete.",
                report.stopped_generation,
            ),
            (
                "topology_version",
                "Topology version of the last start obeyed.",
                report.topology_version,
            ),
        ):
            yield self._gauge(f"outrider_agent_{name}", text, (), {(): value})
        for name, text, answer in (
            (
                "outrider_uplink_connected",
                "1 while the coordinator is reached.",
                self._sources.uplink_connected(),
            ),
            (
                "outrider_kernel_log_available",
                "1 while there is a kernel log to read; 0 means hardware is not known.",
                self._sources.kernel_log_available(),
            ),
        ):
            yield self._gauge(name, text, (), {(): float(answer)})

    def _ranks(self, report: StatusReport) -> Iterator[Metric]:
        steps: _Values = {(str(r.rank),): float(r.step) for r in report.ranks if r.step is not None}
        yield self._gauge(
            "outrider_rank_step", "Optimizer steps that a rank completed.", ("rank",), steps
        )
        progress: _Values = {
            (str(r.rank),): r.progress_age_ns / 1e9
            for r in report.ranks
            if r.progress_age_ns is not None
        }
        yield self._gauge(
            "outrider_rank_progress_age_seconds",
            "How long ago a rank last moved.",
            ("rank",),
            progress,
        )
        stalled: _Values = {(str(r.rank),): float(r.stalled) for r in report.ranks}
        yield self._gauge(
            "outrider_rank_stalled",
            "1 while a rank is silent for longer than its stall limit.",
            ("rank",),
            stalled,
        )
        limits = [r for r in report.ranks if r.stall_limit_ns is not None]
        yield self._gauge(
            "outrider_stall_deadline_seconds",
            "Silence after which a rank counts as stalled in the phase that it is in.",
            ("rank",),
            {(str(r.rank),): (r.stall_limit_ns or 0) / 1e9 for r in limits},
        )
        yield self._gauge(
            "outrider_stall_deadline_armed",
            "1 when that time was learned or declared, 0 while it is the job's longest.",
            ("rank",),
            {(str(r.rank),): float(r.stall_armed) for r in limits},
        )

    def _counters(self) -> Iterator[Metric]:
        sources = self._sources
        messages, errors = sources.ipc_counters()
        lines, matches = sources.log_counters()
        yield self._counter(
            "outrider_worker_exits",
            "Worker processes that ended.",
            "reason",
            dict.fromkeys(EXIT_REASONS, 0) | sources.counters.exits,
        )
        yield self._counter(
            "outrider_node_faults",
            "Faults that this node found.",
            "kind",
            {kind.value: sources.counters.faults[kind] for kind in FaultKind},
        )
        yield self._counter(
            "outrider_ipc_messages",
            "Messages accepted from workers.",
            "type",
            dict.fromkeys(WORKER_MESSAGES, 0) | dict(messages),
        )
        yield self._counter(
            "outrider_ipc_errors",
            "Messages and connections refused.",
            "reason",
            dict.fromkeys(ERROR_KINDS, 0) | dict(errors),
        )
        yield self._counter(
            "outrider_log_rule_matches", "Log lines that a rule matched.", "rule", matches
        )
        yield from self._log_series()
        yield from self._kernel_log()
        for name, text, value in (
            ("outrider_log_lines", "Lines of worker output that were judged.", lines),
            (
                "outrider_events_dropped",
                "Events that found the core's inbox full.",
                sources.counters.events_dropped,
            ),
        ):
            total = CounterMetricFamily(name, text, labels=(JOB,))
            total.add_metric((self._job,), value)
            yield total

    def _log_series(self) -> Iterator[Metric]:
        values: _Values = {}
        steps: _Values = {}
        for rank, series in self._sources.log_series().items():
            for name, one in series.items():
                values[str(rank), name] = one.value
                if one.step is not None:
                    steps[str(rank), name] = float(one.step)
        yield self._gauge(
            "outrider_log_metric",
            "A metric as the rank's newest line prints it; step_time in seconds.",
            ("rank", "metric"),
            values,
        )
        yield self._gauge(
            "outrider_log_metric_step", "The step of that line.", ("rank", "metric"), steps
        )

    def _kernel_log(self) -> Iterator[Metric]:
        kernel, gpus = self._sources.kernel_log_counters()
        yield self._counter(
            "outrider_xid_records",
            "GPU error records in the kernel log.",
            "severity",
            {severity.value: count for severity, count in kernel.xids.items()},
        )
        yield self._counter(
            "outrider_kernel_log_records",
            "Other records in the kernel log that speak of trouble.",
            "kind",
            {kind.value: kernel.kinds.get(kind, 0) for kind in OTHER_KINDS},
        )
        # Every fatal code of every GPU is there from the start; the rest is one series a GPU.
        errors = {(gpu, code): 0 for gpu in map(str, gpus) for code in XIDS_SHOWN}
        for (gpu, code), count in kernel.gpu_xids.items():
            shown = str(code) if code in FATAL_CODES else OTHER_XID
            key = ("unknown" if gpu is None else str(gpu), shown)
            errors[key] = errors.get(key, 0) + count
        by_gpu = CounterMetricFamily(
            "outrider_gpu_xid_errors", "GPU error records by device.", labels=(JOB, "gpu", "xid")
        )
        for (gpu_name, code_name), count in errors.items():
            by_gpu.add_metric((self._job, gpu_name, code_name), count)
        yield by_gpu
        gaps = CounterMetricFamily(
            "outrider_kernel_log_gaps", "Times that the kernel log lost records.", labels=(JOB,)
        )
        gaps.add_metric((self._job,), kernel.gaps)
        yield gaps

    def _gauge(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(JOB, *labels))
        for key, value in values.items():
            family.add_metric((self._job, *key), value)
        return family

    def _counter(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(JOB, label))
        for key, value in values.items():
            family.add_metric((self._job, key), value)
        return family


class Exposition:
    """The text that a scrape reads."""

    def __init__(self, collector: NodeCollector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return every series in the text format."""
        return generate_latest(self._registry)
