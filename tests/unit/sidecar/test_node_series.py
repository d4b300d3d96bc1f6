"""A whole node as one scrape shows it: bounded, and without ghosts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from scout.clock import Instant, seconds
from scout.snapshot import Phase, RankSnapshot
from sidecar.api import AgentState, CheckpointConfirmation, RankStatus, StatusReport
from sidecar.hardware.health import HardwareHealth
from sidecar.hardware.kernel_log import KernelLogCounters
from sidecar.hardware.readings import METRICS, Device, Known, Metric, Reading
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.logs.numbers import Extracted
from sidecar.logs.tail import TailCounters
from sidecar.loop_lag import LoopLag
from sidecar.metrics import Exposition, NodeCollector, NodeCounters

SERIES_MAX = 450
GPUS = 8
RULES = 10
Page = dict[str, list[tuple[dict[str, str], float]]]


def rank(number: int) -> RankStatus:
    return RankStatus(
        rank=number,
        local_rank=number % GPUS,
        pid=number,
        step=40,
        progress_age_ns=seconds(0.5),
        stall_limit_ns=seconds(60),
        attached=True,
        labels={"tp": str(number % GPUS), "dp": "1", "kind": "a label of its own"},
    )


class FullNode:
    """Eight GPUs, eight ranks, ten log rules, everything known."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.counters = NodeCounters()
        self.numbers = ranks

    def snapshot(self) -> StatusReport:
        saved = CheckpointConfirmation(
            prefix="model", step=30, ranks=tuple(self.numbers), paths=("/c/30",)
        )
        return StatusReport(
            node="n0",
            incarnation="i",
            state=AgentState.RUNNING,
            generation=1,
            stopped_generation=0,
            topology_version=1,
            rendezvous_port=1,
            ranks=tuple(map(rank, self.numbers)),
            checkpoints=(saved,) if self.numbers else (),
        )

    def ipc_counters(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {}, {}

    def kernel_log_counters(self) -> tuple[KernelLogCounters, tuple[int, ...]]:
        return KernelLogCounters(), tuple(range(GPUS))

    def kernel_log_available(self) -> bool:
        return True

    def hardware_health(self) -> HealthSnapshot:
        health, now = HardwareHealth(), Instant(seconds(10))
        health.evaluate(
            [
                Reading(
                    source="nvml",
                    device=Device(index=gpu, uuid=f"GPU-{gpu}", pci=f"0000:{gpu}0:00"),
                    metric=metric,
                    value=Known(0),
                    at=now,
                )
                for gpu in range(GPUS)
                for metric in METRICS
                if metric not in (Metric.XID, Metric.KERNEL_FAULT, Metric.EXTERNAL)
            ],
            now,
        )
        return health.snapshot(now)

    def uplink_connected(self) -> bool:
        return True

    def log_counters(self) -> tuple[int, Mapping[str, int]]:
        return 100, {f"rule{number}": 1 for number in range(RULES)}

    def log_trouble(self) -> tuple[int, int]:
        return 0, 0

    def log_match_ages_s(self) -> Mapping[str, float]:
        return {f"rule{number}": 3.5 for number in range(RULES)}

    def log_series(self) -> Mapping[int, Mapping[str, Extracted]]:
        return {
            number: {
                name: Extracted(metric=name, value=1.0, step=3) for name in ("loss", "step_time")
            }
            for number in self.numbers
        }

    def log_severities(self) -> Mapping[str, int]:
        return {f"rule{number}": 1 for number in range(RULES)}

    def ranks(self) -> tuple[RankSnapshot, ...]:
        return tuple(
            RankSnapshot(rank=it, node="n0", local_rank=it % GPUS, phase=Phase.BACKWARD)
            for it in self.numbers
        )

    def loop_lag(self) -> tuple[Family, ...]:
        return LoopLag().families()


def scraped(node: FullNode) -> Page:
    text = Exposition(NodeCollector("job", "0", node, node)).text().decode()
    page: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return page


def test_a_node_with_eight_gpus_stays_within_its_budget_of_series() -> None:
    """Five hundred nodes would be too much for one Prometheus."""
    page = scraped(FullNode(range(8, 16)))
    count = sum(map(len, page.values()))
    assert 300 < count < SERIES_MAX, {name: len(rows) for name, rows in page.items()}


def test_a_rank_that_moved_leaves_no_series_behind() -> None:
    """A ghost would look like a rank that hangs, and somebody would be woken for it."""
    node = FullNode(range(8, 16))
    collector = Exposition(NodeCollector("job", "0", node, node))
    before = collector.text().decode()
    assert 'rank="15"' in before
    node.numbers = range(16, 24)
    after = collector.text().decode()
    assert 'rank="15"' not in after
    assert 'rank="23"' in after
    node.numbers = ()
    assert "rank=" not in collector.text().decode()


def test_a_rank_is_found_by_its_place_in_the_layout() -> None:
    """Ten ranks of one tensor-parallel group look like ten unrelated troubles."""
    page = scraped(FullNode(range(8, 16)))
    labels, value = page["outrider_rank_info"][2]
    assert value == 1
    assert labels == {
        "training_job": "job",
        "rank": "10",
        "local_rank": "2",
        "gpu": "2",
        "dp": "1",
        "tp": "2",
        "pp": "",
        "cp": "",
        "ep": "",
    }
    assert {value for _, value in page["outrider_rank_phase"]} == {float(Phase.BACKWARD)}
    assert {value for _, value in page["outrider_rank_checkpoint_step"]} == {30.0}


def test_changes_of_state_are_counted_and_start_at_zero() -> None:
    """An agent that flaps between two scrapes looks as if nothing had happened."""
    node = FullNode(())
    moves = {
        (it["from"], it["to"]): n for it, n in scraped(node)["outrider_agent_transitions_total"]
    }
    assert moves["running", "faulted"] == 0
    assert len(moves) > 10
    assert not any(moves.values())
    for state in (AgentState.READY, AgentState.READY, AgentState.RUNNING, AgentState.FAULTED):
        node.counters.reported(replace(node.snapshot(), state=state))
    moves = {
        (it["from"], it["to"]): n for it, n in scraped(node)["outrider_agent_transitions_total"]
    }
    assert {edge for edge, count in moves.items() if count == 1} == {
        ("init", "ready"),
        ("ready", "running"),
        ("running", "faulted"),
    }


def test_what_waits_at_the_barrier_and_what_rules_matched_last_is_shown() -> None:
    """A restart that waits for one rank looks like a hang; a rule without a match looks healthy."""
    node = FullNode(range(2))
    assert scraped(node)["outrider_ranks_at_barrier"] == [({"training_job": "job"}, 0)]
    report = node.snapshot()
    waiting = replace(report, ranks=(replace(report.ranks[0], at_barrier=True), report.ranks[1]))
    node.snapshot = lambda: waiting
    page = scraped(node)
    assert page["outrider_ranks_at_barrier"] == [({"training_job": "job"}, 1)]
    ages = {it["rule"]: age for it, age in page["outrider_log_rule_match_age_seconds"]}
    assert ages == {f"rule{number}": 3.5 for number in range(RULES)}
    assert page["outrider_log_read_errors_total"] == [({"training_job": "job"}, 0)]
    assert page["outrider_log_rules_refused_total"] == [({"training_job": "job"}, 0)]


def test_a_rule_s_last_match_is_the_look_that_found_it() -> None:
    """An age that grows while the rule matches sends people after a silence that is none."""
    counters = TailCounters()
    counters.rule_matches.update({"Step": 0, "Loss": 0})
    counters.lines = 1
    counters.looked(Instant(5))
    assert counters.matched_at == {}
    counters.rule_matches["Step"] += 2
    counters.lines = 3
    counters.looked(Instant(7))
    counters.looked(Instant(9))
    counters.lines = 4
    counters.looked(Instant(11))
    assert counters.matched_at == {"Step": Instant(7)}
