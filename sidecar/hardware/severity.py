"""The severity table: what one device's readings mean, metric by metric.

Each rule answers with a severity and the reason in one sentence.  Time enters only as rates that
were computed elsewhere; whether a verdict has held long enough is for `sidecar.hardware.health`.
Nothing here turns a missing reading into a verdict: a rule is asked only about a known value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from sidecar.hardware.readings import Metric, Severity
from sidecar.hardware.thresholds import HealthConfig

THROTTLED_BY_HARDWARE: Final[Mapping[int, str]] = MappingProxyType(
    {
        0x08: "hardware slowdown",
        0x20: "thermal slowdown by the driver",
        0x40: "thermal slowdown by the hardware",
        0x80: "power brake",
    }
)
"""NVML's clock event bits that speak of trouble; idle and power capping are everyday."""

RECOVERY_ACTIONS: Final[Mapping[int, tuple[Severity, str]]] = MappingProxyType(
    {
        0: (Severity.HEALTHY, "none"),
        1: (Severity.FATAL, "GPU reset"),
        2: (Severity.FATAL, "node reboot"),
        3: (Severity.FATAL, "drain of peer-to-peer traffic"),
        # Works on at reduced capacity; the reset can wait for the end of the job.
        4: (Severity.WARNING, "drain and GPU reset"),
        5: (Severity.WARNING, "recovery of the memory exchange domain"),
        6: (Severity.FATAL, "bus reset"),
        7: (Severity.FATAL, "system reboot"),
    }
)
FABRIC_STATES: Final[Mapping[int, str]] = MappingProxyType(
    {1: "not started", 2: "in progress", 3: "completed"}
)
FABRIC_COMPLETED: Final = 3
FABRIC_UNHEALTHY: Final[Mapping[int, str]] = MappingProxyType(
    {2: "unhealthy", 3: "limited in capacity"}
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """How bad, why, and for how long it must hold before it counts."""

    severity: Severity
    reason: str = ""
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one source knows of one device now.  ``known`` holds fresh values only.

    ``grown`` is a counter's growth since the first reading and ``per_min`` that of the last
    minute, both over all links; ``detail`` is the source's own remark.
    """

    config: HealthConfig
    known: Mapping[Metric, float]
    grown: Mapping[Metric, float]
    per_min: Mapping[Metric, float]
    detail: Mapping[Metric, str]


Rule: TypeAlias = Callable[[Facts, Metric, float], Judgement]

HEALTHY: Final = Judgement(Severity.HEALTHY)


def judge(facts: Facts, metric: Metric) -> Judgement:
    """Return what the known value of ``metric`` means; a metric without a rule is only shown."""
    rule = RULES.get(metric)
    return HEALTHY if rule is None else rule(facts, metric, facts.known[metric])


def _uncorrectable(facts: Facts, metric: Metric, value: float) -> Judgement:
    bad = Severity.FATAL if facts.config.fatal_on_uncorrectable_ecc else Severity.WARNING
    grown = facts.grown.get(metric, 0)
    if grown > 0:
        return Judgement(bad, f"{grown:.0f} new uncorrectable ECC errors")
    if value == 0:
        return HEALTHY
    handled = (
        facts.known.get(Metric.REMAP_FAILURE) == 0
        and facts.known.get(Metric.REMAP_PENDING) is not None
    )
    if handled:
        # The bad rows are out of use or will be after a reset; the count is history.
        return Judgement(
            Severity.WARNING,
            f"{value:.0f} uncorrectable ECC errors from before, handled by row remapping",
        )
    return Judgement(bad, f"{value:.0f} uncorrectable ECC errors since the last reset")


def _uncorrectable_ever(facts: Facts, metric: Metric, _value: float) -> Judgement:
    # The same error counts in both; the lifetime counter speaks where the other one cannot.
    grown = facts.grown.get(metric, 0)
    if grown <= 0 or Metric.ECC_UNCORRECTABLE_VOLATILE in facts.known:
        return HEALTHY
    bad = Severity.FATAL if facts.config.fatal_on_uncorrectable_ecc else Severity.WARNING
    return Judgement(bad, f"{grown:.0f} new uncorrectable ECC errors")


def _correctable(facts: Facts, metric: Metric, _value: float) -> Judgement:
    limit = facts.config.ecc_correctable_warn_per_min
    rate = facts.per_min.get(metric, 0)
    if rate < limit:
        return HEALTHY
    return Judgement(
        Severity.WARNING, f"correctable ECC errors at {rate:.0f} a minute, at or above {limit:g}"
    )


def _flag(severity: Severity, reason: str) -> Rule:
    def rule(_facts: Facts, _metric: Metric, value: float) -> Judgement:
        return Judgement(severity, reason) if value else HEALTHY

    return rule


def _remap_failure(facts: Facts, _metric: Metric, value: float) -> Judgement:
    if not value:
        return HEALTHY
    bad = Severity.FATAL if facts.config.fatal_on_remap_failure else Severity.WARNING
    return Judgement(bad, "a memory row could not be remapped")


def _nvlink(facts: Facts, metric: Metric, _value: float) -> Judgement:
    rate = facts.per_min.get(metric, 0)
    config = facts.config
    where = facts.detail.get(metric, "")
    words = f"NVLink errors at {rate:.0f} a minute{where}"
    if rate >= config.nvlink_errors_fatal_per_min and metric is Metric.NVLINK_ERRORS:
        return Judgement(
            Severity.FATAL, f"{words}, at or above {config.nvlink_errors_fatal_per_min:g}"
        )
    if rate >= config.nvlink_errors_warn_per_min:
        return Judgement(
            Severity.WARNING, f"{words}, at or above {config.nvlink_errors_warn_per_min:g}"
        )
    return HEALTHY


def _pcie_replay(facts: Facts, metric: Metric, _value: float) -> Judgement:
    rate, limit = facts.per_min.get(metric, 0), facts.config.pcie_replay_warn_per_min
    if rate < limit:
        return HEALTHY
    return Judgement(
        Severity.WARNING, f"PCIe replays at {rate:.0f} a minute, at or above {limit:g}"
    )


def _temperature(facts: Facts, _metric: Metric, value: float) -> Judgement:
    config = facts.config
    margin = facts.known.get(Metric.TEMPERATURE_MARGIN_C)
    shutdown = facts.known.get(Metric.TEMPERATURE_SHUTDOWN_C)
    if margin is None and shutdown is not None:
        margin = shutdown - value
    if margin is not None and margin <= config.temperature_fatal_margin_c:
        return Judgement(
            Severity.FATAL,
            f"{value:g} degrees Celsius, {margin:g} below shutdown",
            config.debounce_s,
        )
    if value >= config.temperature_warn_c:
        return Judgement(Severity.WARNING, f"{value:g} degrees Celsius", config.debounce_s)
    return HEALTHY


def _margin(facts: Facts, _metric: Metric, value: float) -> Judgement:
    config = facts.config
    if Metric.TEMPERATURE_C in facts.known or value > config.temperature_fatal_margin_c:
        return HEALTHY
    return Judgement(Severity.FATAL, f"{value:g} degrees below shutdown", config.debounce_s)


def _throttle(facts: Facts, _metric: Metric, value: float) -> Judgement:
    why = [text for bit, text in THROTTLED_BY_HARDWARE.items() if int(value) & bit]
    if not why:
        return HEALTHY
    return Judgement(
        Severity.WARNING, f"clocks held down: {', '.join(why)}", facts.config.throttle_debounce_s
    )


def _fabric_state(facts: Facts, _metric: Metric, value: float) -> Judgement:
    if int(value) == FABRIC_COMPLETED:
        return HEALTHY
    state = FABRIC_STATES.get(int(value), f"in state {value:g}")
    return Judgement(
        Severity.FATAL, f"the NVLink fabric is {state}", facts.config.fabric_debounce_s
    )


def _fabric_health(facts: Facts, _metric: Metric, value: float) -> Judgement:
    trouble = FABRIC_UNHEALTHY.get(int(value))
    if trouble is None:
        return HEALTHY
    return Judgement(
        Severity.WARNING, f"the NVLink fabric is {trouble}", facts.config.fabric_debounce_s
    )


def _recovery_action(_facts: Facts, _metric: Metric, value: float) -> Judgement:
    severity, action = RECOVERY_ACTIONS.get(
        int(value), (Severity.WARNING, f"action {value:g}, which is not known here")
    )
    if severity is Severity.HEALTHY:
        return HEALTHY
    return Judgement(severity, f"the driver asks for recovery: {action}")


def _lost(facts: Facts, metric: Metric, value: float) -> Judgement:
    if not value:
        return HEALTHY
    why = facts.detail.get(metric) or "the driver has lost the device"
    return Judgement(Severity.FATAL, why, facts.config.debounce_s)


def _missing(facts: Facts, metric: Metric, value: float) -> Judgement:
    if not value:
        return HEALTHY
    why = facts.detail.get(metric) or "the device is not listed any more"
    return Judgement(Severity.FATAL, why, facts.config.missing_debounce_s)


def _stuck(facts: Facts, metric: Metric, value: float) -> Judgement:
    config = facts.config
    reason = f"a query has not returned for {value:.0f} s"
    if facts.detail.get(metric):
        reason = f"{reason}: {facts.detail[metric]}"
    if config.query_stuck_fatal_s is not None and value >= config.query_stuck_fatal_s:
        return Judgement(Severity.FATAL, reason)
    return Judgement(Severity.WARNING, reason) if value >= config.query_stuck_warn_s else HEALTHY


RULES: Final[Mapping[Metric, Rule]] = MappingProxyType(
    {
        Metric.ECC_UNCORRECTABLE_VOLATILE: _uncorrectable,
        Metric.ECC_UNCORRECTABLE_AGGREGATE: _uncorrectable_ever,
        Metric.ECC_CORRECTABLE_VOLATILE: _correctable,
        Metric.SRAM_THRESHOLD_EXCEEDED: _flag(
            Severity.FATAL, "too many uncorrectable errors in on-chip memory"
        ),
        Metric.REMAP_PENDING: _flag(Severity.WARNING, "a row remap waits for a GPU reset"),
        Metric.REMAP_FAILURE: _remap_failure,
        Metric.NVLINK_ERRORS: _nvlink,
        Metric.NVLINK_CRC_FLIT: _nvlink,
        Metric.NVLINK_REPLAY: _nvlink,
        Metric.PCIE_REPLAY: _pcie_replay,
        Metric.TEMPERATURE_C: _temperature,
        Metric.TEMPERATURE_MARGIN_C: _margin,
        Metric.THROTTLE_REASONS: _throttle,
        Metric.FABRIC_STATE: _fabric_state,
        Metric.FABRIC_HEALTH: _fabric_health,
        Metric.RECOVERY_ACTION: _recovery_action,
        Metric.DEVICE_LOST: _lost,
        Metric.DEVICE_MISSING: _missing,
        Metric.QUERY_STUCK_S: _stuck,
        Metric.DRIVER_MISMATCH: _flag(
            Severity.WARNING,
            "the driver's library and kernel module differ; the node needs a reboot, "
            "running jobs go on",
        ),
    }
)
