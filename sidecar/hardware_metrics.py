"""The hardware's health as series for Prometheus, computed from one snapshot.

Decides what each number is called.  What is not known now is left out: an absent series is an
alert's business, a zero would be a lie.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from sidecar.hardware.readings import Device, Metric, Severity
from sidecar.hardware.snapshot import DeviceHealth, HealthSnapshot

SEVERITIES: Final[Mapping[Severity, int]] = MappingProxyType(
    {severity: number for number, severity in enumerate(Severity)}
)
"""0 healthy, 1 unknown, 2 warning, 3 fatal: the larger, the worse."""

_Rows: TypeAlias = dict[tuple[str, ...], float]

ECC: Final = {
    "corrected": (Metric.ECC_CORRECTABLE_VOLATILE, Metric.ECC_CORRECTABLE_AGGREGATE),
    "uncorrected": (Metric.ECC_UNCORRECTABLE_VOLATILE, Metric.ECC_UNCORRECTABLE_AGGREGATE),
}
"""Since the driver was loaded; a device that does not count so is shown over its whole life."""
REMAPPED: Final = {
    "correctable": (Metric.REMAPPED_CORRECTABLE,),
    "uncorrectable": (Metric.REMAPPED_UNCORRECTABLE,),
}
NVLINK: Final = {
    "crc_data": (Metric.NVLINK_CRC_DATA,),
    "crc_flit": (Metric.NVLINK_CRC_FLIT,),
    "recovery": (Metric.NVLINK_RECOVERY,),
    "replay": (Metric.NVLINK_REPLAY,),
}
NOT_ANSWERS: Final = frozenset(
    {
        Metric.XID,
        Metric.XID_WATCH,
        Metric.KERNEL_FAULT,
        Metric.EXTERNAL,
        Metric.DEVICE_LOST,
        Metric.DEVICE_MISSING,
        Metric.QUERY_STUCK_S,
    }
)
"""What is said about a device and not by it."""

_COUNTERS: Final = (
    (
        "outrider_gpu_ecc_errors",
        (
            "Memory errors since the driver was loaded (over the device's life where it counts no"
            " other way): corrected uncorrected."
        ),
        "type",
        ECC,
    ),
    (
        "outrider_gpu_remapped_rows",
        "Memory rows replaced by spare ones after correctable and uncorrectable errors.",
        "cause",
        REMAPPED,
    ),
    (
        "outrider_gpu_nvlink_errors",
        "Errors on all NVLinks of a GPU together: crc_data crc_flit recovery replay.",
        "type",
        NVLINK,
    ),
    (
        "outrider_gpu_pcie_replays",
        "Transfers that had to be repeated on PCI Express.",
        "",
        {"": (Metric.PCIE_REPLAY,)},
    ),
)
_GAUGES: Final = (
    (
        "outrider_gpu_row_remap_pending",
        "1 while memory rows wait for a reset to be replaced by spare ones.",
        Metric.REMAP_PENDING,
    ),
    (
        "outrider_gpu_row_remap_failed",
        "1 when memory rows could not be replaced: the device has to be.",
        Metric.REMAP_FAILURE,
    ),
    ("outrider_gpu_temperature_celsius", "Temperature of a GPU.", Metric.TEMPERATURE_C),
    ("outrider_gpu_power_watts", "Power that a GPU draws.", Metric.POWER_W),
    (
        "outrider_gpu_temperature_margin_celsius",
        "Degrees left until a GPU switches itself off.",
        Metric.TEMPERATURE_MARGIN_C,
    ),
)


def hardware_families(
    snapshot: HealthSnapshot, fixed: tuple[str, ...], values: tuple[str, ...]
) -> Iterator[Family]:
    """Yield the series of every GPU, each with the labels ``fixed`` = ``values`` first."""
    gpus = [seen for seen in snapshot.devices if not seen.device.is_node]

    def gauge(name: str, text: str, labels: tuple[str, ...], rows: _Rows) -> Family:
        family = GaugeMetricFamily(name, text, labels=(*fixed, *labels))
        for key, value in rows.items():
            family.add_metric((*values, *key), value)
        return family

    yield gauge(
        "outrider_node_health_severity",
        "Worst of what is known of the node itself: 0 healthy, 1 unknown, 2 warning, 3 fatal.",
        (),
        {(): SEVERITIES[snapshot.node.severity]},
    )
    yield gauge(
        "outrider_gpu_health_severity",
        "Worst of what is known of a GPU: 0 healthy, 1 unknown, 2 warning, 3 fatal.",
        ("gpu",),
        {(gpu_label(seen.device),): SEVERITIES[seen.severity] for seen in gpus},
    )
    yield gauge(
        "outrider_gpu_info",
        "Always 1; which device has this index.",
        ("gpu", "uuid", "pci_bus_id"),
        {
            (gpu_label(seen.device), seen.device.uuid or "", seen.device.pci or ""): 1
            for seen in gpus
        },
    )
    for name, text, metric in _GAUGES:
        yield gauge(name, text, ("gpu",), _known(gpus, {"": (metric,)}))
    yield gauge(
        "outrider_gpu_health_age_seconds",
        "How long ago a GPU last answered a question; absent when it never did.",
        ("gpu",),
        {
            (gpu_label(seen.device),): age
            for seen in gpus
            if (age := answer_age_s(seen)) is not None
        },
    )
    for name, text, label, kinds in _COUNTERS:
        labels = ("gpu", label) if label else ("gpu",)
        family = CounterMetricFamily(name, text, labels=(*fixed, *labels))
        for key, value in _known(gpus, kinds).items():
            family.add_metric((*values, *key), value)
        yield family


def gpu_label(device: Device) -> str:
    """Return what a GPU is called in a label: its index, or the next best name."""
    if device.index is not None:
        return str(device.index)
    return device.pci or device.uuid or "unknown"


def answer_age_s(seen: DeviceHealth) -> float | None:
    """Return since when nothing newer is known from the device itself, None if it never spoke."""
    ages = (
        row.age_s if row.unknown_age_s is None else row.unknown_age_s
        for row in seen.metrics
        if row.supported and row.metric not in NOT_ANSWERS
    )
    return min((age for age in ages if age is not None), default=None)


def _known(gpus: Iterable[DeviceHealth], kinds: Mapping[str, tuple[Metric, ...]]) -> _Rows:
    rows: _Rows = {}
    for seen in gpus:
        for kind, metrics in kinds.items():
            value = _first(seen, metrics)
            if value is not None:
                rows[(gpu_label(seen.device), kind) if kind else (gpu_label(seen.device),)] = value
    return rows


def _first(seen: DeviceHealth, metrics: tuple[Metric, ...]) -> float | None:
    """Return the number of the first metric that the device has, None while it is not known."""
    for metric in metrics:
        row = seen.metric(metric)
        if row is not None and row.supported:
            return row.value if row.unknown_age_s is None else None
    return None
