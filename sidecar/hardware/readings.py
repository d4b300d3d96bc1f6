"""The vocabulary of hardware health: which device, which metric, and what was read of it.

A reading is raw: what a source saw, when, or that it could not see.  "Not supported" and "unknown"
are values of their own, so that no number has to stand for them and nobody takes silence for
health.  What a reading means is judged in `sidecar.hardware.health`; this module judges nothing
and knows no source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from scout.clock import Instant


class Severity(StrEnum):
    """How bad a judged metric, device or node is."""

    HEALTHY = "healthy"
    UNKNOWN = "unknown"
    WARNING = "warning"
    FATAL = "fatal"


class Kind(StrEnum):
    """How the values of a metric are to be read."""

    COUNTER = "counter"
    """Only grows, until the device is reset."""
    GAUGE = "gauge"
    FLAG = "flag"
    """Zero or one."""
    CODE = "code"
    """One of a few numbers that each mean something."""
    MASK = "mask"
    """A set of bits."""
    EVENT = "event"
    """Something happened; each reading is one occurrence."""


class Metric(StrEnum):
    """Everything that is read of a device or of the node."""

    ECC_UNCORRECTABLE_VOLATILE = "ecc_uncorrectable_volatile"
    ECC_UNCORRECTABLE_AGGREGATE = "ecc_uncorrectable_aggregate"
    ECC_CORRECTABLE_VOLATILE = "ecc_correctable_volatile"
    ECC_CORRECTABLE_AGGREGATE = "ecc_correctable_aggregate"
    SRAM_THRESHOLD_EXCEEDED = "sram_threshold_exceeded"
    REMAPPED_CORRECTABLE = "remapped_correctable"
    REMAPPED_UNCORRECTABLE = "remapped_uncorrectable"
    REMAP_PENDING = "remap_pending"
    REMAP_FAILURE = "remap_failure"
    NVLINK_CRC_FLIT = "nvlink_crc_flit"
    NVLINK_CRC_DATA = "nvlink_crc_data"
    NVLINK_REPLAY = "nvlink_replay"
    NVLINK_RECOVERY = "nvlink_recovery"
    NVLINK_ERRORS = "nvlink_errors"
    """Recoveries and data errors together: what speaks against the endpoint, whichever link."""
    PCIE_REPLAY = "pcie_replay"
    TEMPERATURE_C = "temperature_c"
    TEMPERATURE_SHUTDOWN_C = "temperature_shutdown_c"
    TEMPERATURE_MARGIN_C = "temperature_margin_c"
    """Degrees left until the hardware switches itself off."""
    POWER_W = "power_w"
    THROTTLE_REASONS = "throttle_reasons"
    FABRIC_STATE = "fabric_state"
    FABRIC_HEALTH = "fabric_health"
    RECOVERY_ACTION = "recovery_action"
    XID = "xid"
    XID_WATCH = "xid_watch"
    """One while the driver's error events are listened to."""
    DEVICE_LOST = "device_lost"
    """One when the driver says that the device is gone."""
    DEVICE_MISSING = "device_missing"
    """One when a device that was there is not listed any more, or answers no query at all."""
    QUERY_STUCK_S = "query_stuck_s"
    """Seconds since a query of this device should have returned; zero when queries return."""
    DRIVER_MISMATCH = "driver_mismatch"
    NVML = "nvml"
    """One while the driver's management library answers on this node."""
    KERNEL_FAULT = "kernel_fault"
    """A kernel log line about hardware that is not an Xid; its reporter says how bad."""
    EXTERNAL = "external"
    """Somebody else's standing word; it says itself how bad, and holds until taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """``node_wide``: read per device, judged for the node, because no single device is to blame."""

    kind: Kind
    unit: str = ""
    node_wide: bool = False


def _info(kind: Kind, unit: str = "", *, node_wide: bool = False) -> MetricInfo:
    return MetricInfo(kind=kind, unit=unit, node_wide=node_wide)


METRICS: Final[Mapping[Metric, MetricInfo]] = MappingProxyType(
    {
        Metric.ECC_UNCORRECTABLE_VOLATILE: _info(Kind.COUNTER, "errors"),
        Metric.ECC_UNCORRECTABLE_AGGREGATE: _info(Kind.COUNTER, "errors"),
        Metric.ECC_CORRECTABLE_VOLATILE: _info(Kind.COUNTER, "errors"),
        Metric.ECC_CORRECTABLE_AGGREGATE: _info(Kind.COUNTER, "errors"),
        Metric.SRAM_THRESHOLD_EXCEEDED: _info(Kind.FLAG),
        Metric.REMAPPED_CORRECTABLE: _info(Kind.COUNTER, "rows"),
        Metric.REMAPPED_UNCORRECTABLE: _info(Kind.COUNTER, "rows"),
        Metric.REMAP_PENDING: _info(Kind.FLAG),
        Metric.REMAP_FAILURE: _info(Kind.FLAG),
        Metric.NVLINK_CRC_FLIT: _info(Kind.COUNTER, "errors"),
        Metric.NVLINK_CRC_DATA: _info(Kind.COUNTER, "errors"),
        Metric.NVLINK_REPLAY: _info(Kind.COUNTER, "errors"),
        Metric.NVLINK_RECOVERY: _info(Kind.COUNTER, "errors"),
        Metric.NVLINK_ERRORS: _info(Kind.COUNTER, "errors"),
        Metric.PCIE_REPLAY: _info(Kind.COUNTER, "replays"),
        Metric.TEMPERATURE_C: _info(Kind.GAUGE, "celsius"),
        Metric.TEMPERATURE_SHUTDOWN_C: _info(Kind.GAUGE, "celsius"),
        Metric.TEMPERATURE_MARGIN_C: _info(Kind.GAUGE, "celsius"),
        Metric.POWER_W: _info(Kind.GAUGE, "watts"),
        Metric.THROTTLE_REASONS: _info(Kind.MASK),
        Metric.FABRIC_STATE: _info(Kind.CODE, node_wide=True),
        Metric.FABRIC_HEALTH: _info(Kind.CODE, node_wide=True),
        Metric.RECOVERY_ACTION: _info(Kind.CODE),
        Metric.XID: _info(Kind.EVENT),
        Metric.XID_WATCH: _info(Kind.FLAG),
        Metric.DEVICE_LOST: _info(Kind.FLAG),
        Metric.DEVICE_MISSING: _info(Kind.FLAG),
        Metric.QUERY_STUCK_S: _info(Kind.GAUGE, "seconds"),
        Metric.DRIVER_MISMATCH: _info(Kind.FLAG),
        Metric.NVML: _info(Kind.FLAG),
        Metric.KERNEL_FAULT: _info(Kind.EVENT),
        Metric.EXTERNAL: _info(Kind.CODE),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU by whatever is known of it, or the node itself when nothing is.

    ``index`` is the physical (NVML) index, which is the order of PCI addresses and not what CUDA
    calls the device; ``pci`` is spelled as
    `sidecar.hardware.xid.normalise_pci` does.
    """

    index: int | None = None
    uuid: str | None = None
    pci: str | None = None

    @property
    def is_node(self) -> bool:
        """Whether this means the node and not one of its devices."""
        return self.index is None and self.uuid is None and self.pci is None

    def __str__(self) -> str:
        if self.is_node:
            return "node"
        name = "GPU" if self.index is None else f"GPU {self.index}"
        known = ", ".join(word for word in (self.pci, self.uuid) if word)
        return f"{name} ({known})" if known else name


NODE: Final = Device()


@dataclass(frozen=True, slots=True)
class Known:
    """A number that was read."""

    value: float


@dataclass(frozen=True, slots=True)
class NotSupported:
    """The device or its driver does not have this metric."""

    reason: str = "not supported"


@dataclass(frozen=True, slots=True)
class Unknown:
    """It should be there and could not be read."""

    reason: str


Value: TypeAlias = Known | NotSupported | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What ``source`` saw of ``metric`` at ``at``.

    ``link`` is set for a counter that exists once per link.  ``claim`` is the source's own verdict
    where the number alone does not decide (a kernel line that says "fatal", another agent's word).
    ``count`` is how many events of one kind this reading stands for.
    """

    source: str
    device: Device
    metric: Metric
    value: Value
    at: Instant
    link: int | None = None
    detail: str = ""
    claim: Severity | None = None
    count: int = 1
