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

from scout.snapshot import RankSnapshot
from sidecar.api import AgentState, ExitCause, FaultKind, StatusReport
from sidecar.hardware.kernel_events import KernelKind
from sidecar.hardware.kernel_log import KernelLogCounters
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.hardware.xid import FATAL_CODES
from sidecar.hardware_metrics import hardware_families
from sidecar.lifecycle import IN_PROCESS_RESTART, PROCESS_RESTART
from sidecar.logs.numbers import Extracted
from sidecar.logs.verdicts import SEVERITY, LogState
from sidecar.rank_metrics import edges, rank_families
from sidecar.workers.ipc_server import ERROR_KINDS
from worker_shim.messages import WORKER_MESSAGES

JOB: Final = "training_job"
_Values: TypeAlias = dict[tuple[str, ...], float]
EXIT_REASONS: Final = ("clean", "error", "signal", "stopped")
"""``stopped`` is an exit that this sidecar asked for."""
OTHER_XID: Final = "other"
OTHER_KINDS: Final = tuple(
    kind for kind in KernelKind if kind not in (KernelKind.XID, KernelKind.LOG_GAP)
)
"""Kinds of kernel lines that have no counter of their own."""


EDGES: Final = edges((PROCESS_RESTART, IN_PROCESS_RESTART))
"""Every change of state that the tables allow."""


@dataclass(slots=True)
class NodeCounters:
    """What the daemon counts itself, because no shell does.  Counters only grow."""

    exits: Counter[str] = field(default_factory=Counter)
    faults: Counter[FaultKind] = field(default_factory=Counter)
    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """From one state to another, as the coordinator is told them."""
    events_dropped: int = 0
    messages_cut: int = 0
    _newest_fault: int = 0
    _state: AgentState = AgentState.INIT

    def exited(self, cause: ExitCause, *, asked_for: bool) -> None:
        """Count a worker's end."""
        if asked_for:
            reason = "stopped"
        elif cause.clean:
            reason = "clean"
        else:
            reason = "error" if cause.signal is None else "signal"
        self.exits[reason] += 1

    def cut(self) -> None:
        """Count a message that was too large for the coordinator."""
        self.messages_cut += 1

    def reported(self, report: StatusReport) -> None:
        """Count what earlier reports did not show: another state, faults with newer ids."""
        if report.state is not self._state:
            self.transitions[self._state.value, report.state.value] += 1
            self._state = report.state
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

    def kernel_log_counters(self) -> tuple[KernelLogCounters, tuple[int, ...]]:
        """Return what the kernel's log held, and the GPUs that are known."""

    def kernel_log_available(self) -> bool:
        """Return whether there is a kernel log to read."""

    def hardware_health(self) -> HealthSnapshot:
        """Return what is known of every device."""

    def uplink_connected(self) -> bool:
        """Return whether the coordinator is reached."""


class Live(Protocol):
    """What the shells have to say; `sidecar.live_numbers.LiveNumbers` in a daemon."""

    def log_counters(self) -> tuple[int, Mapping[str, int]]:
        """Return lines read, and matches by rule."""

    def log_trouble(self) -> tuple[int, int]:
        """Return reads of output that failed, and rules that could not be used."""

    def log_match_ages_s(self) -> Mapping[str, float]:
        """Return rule -> seconds since its last match, of rules that have matched."""

    def log_series(self) -> Mapping[int, Mapping[str, Extracted]]:
        """Return rank -> the metrics that its output holds."""

    def log_severities(self) -> Mapping[str, int]:
        """Return rule -> the worst that any rank of this node is by it."""

    def ranks(self) -> tuple[RankSnapshot, ...]:
        """Return what the pages of the running ranks say now."""

    def loop_lag(self) -> tuple[Metric, ...]:
        """Return how late this process's loop was."""


class NodeCollector(Collector):
    """The node's series, all with the label ``training_job``."""

    def __init__(self, job: str, version: str, sources: NodeSources, live: Live) -> None:
        self._job = job
        self._version = version
        self._sources = sources
        self._live = live

    def describe(self) -> Iterable[Metric]:
        """Say nothing in advance: the registry need not call `collect` to know us."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every series as it is now."""
        report = self._sources.snapshot()
        yield from self._agent(report)
        live = self._live
        gpus = self._sources.kernel_log_counters()[1]
        yield from rank_families(report, live.ranks(), gpus, self._gauge)
        yield from self._counters()
        yield from hardware_families(self._sources.hardware_health(), (JOB,), (self._job,))
        yield from live.loop_lag()

    def _agent(self, report: StatusReport) -> Iterator[Metric]:
        python = platform.python_version()
        yield self._gauge(
            "outrider_build_info",
            "Always 1; which version runs, on which Python.",
            ("component", "version", "python"),
            {("sidecar", self._version, python): 1},
        )
        yield self._gauge(
            "outrider_agent_state",
            f"State set: {' '.join(AgentState)}.",
            ("state",),
            {(state.value,): float(state is report.state) for state in AgentState},
        )
        for name, text, value in (
            ("generation", "Generation of the last start that was obeyed.", report.generation),
            (
                "stopped_generation",
                "Highest generation whose stop is complete.",
                report.stopped_generation,
            ),
            (
                "topology_version",
                "Topology version of the last start that was obeyed.",
                report.topology_version,
            ),
        ):
            yield self._gauge(f"outrider_agent_{name}", text, (), {(): value})
        for name, text, answer in (
            (
                "outrider_uplink_connected",
                "1 while the connection to the coordinator stands.",
                self._sources.uplink_connected(),
            ),
            (
                "outrider_kernel_log_available",
                "1 while there is a kernel log to read; 0 means that the hardware is not known.",
                self._sources.kernel_log_available(),
            ),
        ):
            yield self._gauge(name, text, (), {(): float(answer)})

    def _counters(self) -> Iterator[Metric]:
        sources = self._sources
        messages, errors = sources.ipc_counters()
        lines, matches = self._live.log_counters()
        yield self._counter(
            "outrider_worker_exits",
            "Worker processes that ended, by cause.",
            "reason",
            dict.fromkeys(EXIT_REASONS, 0) | sources.counters.exits,
        )
        yield self._counter(
            "outrider_node_faults",
            "Faults this node found by itself.",
            "kind",
            {kind.value: sources.counters.faults[kind] for kind in FaultKind},
        )
        moves = CounterMetricFamily(
            "outrider_agent_transitions",
            "Changes of the agent's state, from one to another.",
            labels=(JOB, "from", "to"),
        )
        for (before, after), count in (
            dict.fromkeys(EDGES, 0) | sources.counters.transitions
        ).items():
            moves.add_metric((self._job, before, after), count)
        yield moves
        yield self._counter(
            "outrider_ipc_messages",
            "Messages from workers.",
            "type",
            dict.fromkeys(WORKER_MESSAGES, 0) | dict(messages),
        )
        yield self._counter(
            "outrider_ipc_errors",
            "Worker messages and connections that were refused.",
            "reason",
            dict.fromkeys(ERROR_KINDS, 0) | dict(errors),
        )
        yield self._counter(
            "outrider_log_rule_matches", "Lines that matched a log rule.", "rule", matches
        )
        yield self._gauge(
            "outrider_log_rule_severity",
            f"Worst that any rank of the node is by a rule: {_named(SEVERITY)}.",
            ("rule",),
            {(rule,): float(worst) for rule, worst in self._live.log_severities().items()},
        )
        yield self._gauge(
            "outrider_log_rule_match_age_seconds",
            "How long ago a rule last matched a line; absent until its first match.",
            ("rule",),
            {(rule,): age for rule, age in self._live.log_match_ages_s().items()},
        )
        yield from self._log_series()
        yield from self._kernel_log()
        yield from self._totals(lines)

    def _totals(self, lines: int) -> Iterator[Metric]:
        unread, refused = self._live.log_trouble()
        for name, text, value in (
            ("outrider_log_lines", "Lines of worker output that were read.", lines),
            ("outrider_log_read_errors", "Reads of worker output that failed.", unread),
            ("outrider_log_rules_refused", "Log rules that could not be used.", refused),
            (
                "outrider_events_dropped",
                "Events that found the agent's inbox full.",
                self._sources.counters.events_dropped,
            ),
            (
                "outrider_messages_cut",
                "Messages too large for the coordinator, of which something was left out.",
                self._sources.counters.messages_cut,
            ),
        ):
            total = CounterMetricFamily(name, text, labels=(JOB,))
            total.add_metric((self._job,), value)
            yield total

    def _log_series(self) -> Iterator[Metric]:
        values: _Values = {}
        steps: _Values = {}
        for rank, series in self._live.log_series().items():
            for name, one in series.items():
                values[str(rank), name] = one.value
                if one.step is not None:
                    steps[str(rank), name] = float(one.step)
        yield self._gauge(
            "outrider_log_metric",
            "`loss`, `step_time` (seconds), `throughput` or `grad_norm`, as the rank's newest line"
            " prints it; absent until a rule's named group holds it.",
            ("rank", "metric"),
            values,
        )
        yield self._gauge(
            "outrider_log_metric_step",
            "The step of that line, or the last one named before it.",
            ("rank", "metric"),
            steps,
        )

    def _kernel_log(self) -> Iterator[Metric]:
        kernel, gpus = self._sources.kernel_log_counters()
        yield self._counter(
            "outrider_xid_records",
            "Xid lines, by how bad: fatal app follow_up warning info.",
            "severity",
            {severity.value: count for severity, count in kernel.xids.items()},
        )
        yield self._counter(
            "outrider_kernel_log_records",
            "Kernel lines other than Xids that speak of trouble, by kind.",
            "kind",
            {kind.value: kernel.kinds.get(kind, 0) for kind in OTHER_KINDS},
        )
        yield from self._gpu_xids(kernel.gpu_xids, gpus)
        gaps = CounterMetricFamily(
            "outrider_kernel_log_gaps",
            "Times that the kernel log lost records; what they said is not known.",
            labels=(JOB,),
        )
        gaps.add_metric((self._job,), kernel.gaps)
        yield gaps

    def _gpu_xids(
        self, counted: Mapping[tuple[int | None, int], int], gpus: Iterable[int]
    ) -> Iterator[Metric]:
        """Yield fatal ones by device, there from the start, and by code once there are any."""
        fatal = dict.fromkeys(map(str, gpus), 0)
        codes = {(gpu, OTHER_XID): 0 for gpu in fatal}
        for (index, code), count in counted.items():
            gpu = "unknown" if index is None else str(index)
            is_fatal = code in FATAL_CODES
            key = (gpu, str(code) if is_fatal else OTHER_XID)
            codes[key] = codes.get(key, 0) + count
            fatal[gpu] = fatal.get(gpu, 0) + (count if is_fatal else 0)
        yield self._counter(
            "outrider_gpu_fatal_xid_errors",
            "Xid lines of codes that take the device out of the job, by device (`unknown` for one"
            " that NVML does not list).",
            "gpu",
            fatal,
        )
        by_code = CounterMetricFamily(
            "outrider_gpu_xid_errors",
            "Xid lines by device and code; a fatal code appears with its first line, all others"
            " count as `other`.",
            labels=(JOB, "gpu", "xid"),
        )
        for (gpu, shown), count in codes.items():
            by_code.add_metric((self._job, gpu, shown), count)
        yield by_code

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


def _named(places: Mapping[LogState, int]) -> str:
    return ", ".join(f"{place} {state}" for state, place in places.items())


class Exposition:
    """The text that a scrape reads."""

    def __init__(self, collector: NodeCollector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return every series in the text format."""
        return generate_latest(self._registry)
