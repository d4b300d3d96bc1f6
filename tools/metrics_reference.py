"""Writes the tables of docs/metrics.md from the collectors, or checks that they are the same.

A family's help text is its meaning, so a scrape and the reference cannot differ.

python -m tools.metrics_reference            write
python -m tools.metrics_reference --check    compare
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric

from coordinator.command_times import CommandTimes
from coordinator.history import History
from coordinator.ledger import Ledger
from coordinator.metrics import JobCollector, JobNumbers
from coordinator.phases import JobPhase
from coordinator.view import JobView
from scout.clock import Instant
from scout.snapshot import RankSnapshot
from sidecar.api import AgentState, StatusReport
from sidecar.hardware.health import HardwareHealth
from sidecar.hardware.kernel_log import KernelLogCounters
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.logs.numbers import Extracted
from sidecar.loop_lag import LoopLag
from sidecar.metrics import NodeCollector, NodeCounters
from tools.generated import write_or_compare

PAGE: Final = Path(__file__).resolve().parent.parent / "docs/metrics.md"
JOB: Final = "training_job"
SUFFIXES: Final[Mapping[str, str]] = {"counter": "_total", "info": "_info"}

TABLE: Final = "<!-- {name} -->\n(?:.*\n)*?<!-- end -->"
"""Where the table of a component stands in the page."""


class FreshNode:
    """A sidecar that has seen nothing yet."""

    def __init__(self) -> None:
        self.counters = NodeCounters()

    def snapshot(self) -> StatusReport:
        """Return a node that has just begun."""
        return StatusReport(
            node="",
            incarnation="",
            state=AgentState.INIT,
            generation=0,
            stopped_generation=0,
            topology_version=0,
            rendezvous_port=0,
        )

    def ipc_counters(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return nothing."""
        return {}, {}

    def log_counters(self) -> tuple[int, Mapping[str, int]]:
        """Return nothing."""
        return 0, {}

    def log_trouble(self) -> tuple[int, int]:
        """Return nothing."""
        return 0, 0

    def log_match_ages_s(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def log_series(self) -> Mapping[int, Mapping[str, Extracted]]:
        """Return nothing."""
        return {}

    def log_severities(self) -> Mapping[str, int]:
        """Return nothing."""
        return {}

    def ranks(self) -> tuple[RankSnapshot, ...]:
        """Return nobody."""
        return ()

    def loop_lag(self) -> tuple[Metric, ...]:
        """Return an empty histogram."""
        return LoopLag().families()

    def kernel_log_counters(self) -> tuple[KernelLogCounters, tuple[int, ...]]:
        """Return nothing."""
        return KernelLogCounters(), ()

    def kernel_log_available(self) -> bool:
        """Return no."""
        return False

    def hardware_health(self) -> HealthSnapshot:
        """Return a node of which nothing is known."""
        return HardwareHealth().snapshot(Instant(0))

    def uplink_connected(self) -> bool:
        """Return no."""
        return False


def fresh_job() -> JobView:
    """Return a job of which nothing is known but its name."""
    return JobView(
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


def coordinator_families() -> list[Metric]:
    """Return every family of a coordinator that has seen nothing yet."""
    numbers = JobNumbers(
        now_s=0.0,
        view=fresh_job(),
        history=History(),
        ledger=Ledger.begin(0),
        commands=CommandTimes(),
        loop_lag=LoopLag().families(),
    )
    return list(JobCollector(numbers).collect())


def sidecar_families() -> list[Metric]:
    """Return every family of a sidecar that has seen nothing yet."""
    node = FreshNode()
    return list(NodeCollector("job", "0", node, node).collect())


def page(text: str) -> str:
    """Return the reference ``text`` with its tables as the collectors give them."""
    for name, families, without in (
        ("coordinator", coordinator_families(), ()),
        ("sidecar", sidecar_families(), (JOB,)),
    ):
        table = "\n".join([f"<!-- {name} -->", *_table(families, without), "<!-- end -->"])
        place = re.search(TABLE.format(name=name), text)
        assert place is not None, f"docs/metrics.md has no place for the table of the {name}"
        text = text[: place.start()] + table + text[place.end() :]
    return text


def _table(families: Iterable[Metric], without: Sequence[str]) -> list[str]:
    rows = ["| Name | Type | Labels | Meaning |", "|---|---|---|---|"]
    for family in families:
        name = f"{family.name}{SUFFIXES.get(family.type, '')}"
        kind = "gauge" if family.type == "info" else family.type
        labels = [label for label in _labels(family) if label not in without]
        shown = ", ".join(f"`{label}`" for label in labels)
        meaning = family.documentation.replace("|", "\\|")
        rows.append(f"| `{name}` | {kind} | {shown} | {meaning} |")
    return rows


def _labels(family: Metric) -> list[str]:
    """Return a family's labels; one without a sample yet knows them all the same."""
    labels = dict.fromkeys(getattr(family, "_labelnames", ()))
    for sample in family.samples:
        labels.update(dict.fromkeys(sample.labels))
    return [label for label in labels if label != "le"]


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare; return the exit status."""
    files = {PAGE: page(PAGE.read_text(encoding="utf-8"))}
    return write_or_compare(argv, "tools.metrics_reference", "metrics-reference", files)


if __name__ == "__main__":
    sys.exit(main())
