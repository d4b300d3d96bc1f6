"""What the NVML helper's answers say, as readings.

Decides how an error, an absence and a silence are told apart: an error of one query leaves that
metric unknown, a driver that says "lost" makes the device lost, and a device that answers nothing
at all is missing.  Convicts nobody.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from scout.clock import Instant
from sidecar.hardware.readings import (
    Device,
    Known,
    Metric,
    NotSupported,
    Reading,
    Unknown,
    Value,
)

SOURCE: Final = "nvml"
DEVICE_METRICS: Final = (
    Metric.TEMPERATURE_C,
    Metric.TEMPERATURE_SHUTDOWN_C,
    Metric.TEMPERATURE_MARGIN_C,
    Metric.ECC_UNCORRECTABLE_VOLATILE,
    Metric.ECC_UNCORRECTABLE_AGGREGATE,
    Metric.ECC_CORRECTABLE_VOLATILE,
    Metric.ECC_CORRECTABLE_AGGREGATE,
    Metric.SRAM_THRESHOLD_EXCEEDED,
    Metric.REMAPPED_CORRECTABLE,
    Metric.REMAPPED_UNCORRECTABLE,
    Metric.REMAP_PENDING,
    Metric.REMAP_FAILURE,
    Metric.RECOVERY_ACTION,
    Metric.PCIE_REPLAY,
    Metric.POWER_W,
    Metric.THROTTLE_REASONS,
    Metric.FABRIC_STATE,
    Metric.FABRIC_HEALTH,
    Metric.NVLINK_REPLAY,
    Metric.NVLINK_RECOVERY,
    Metric.NVLINK_CRC_FLIT,
    Metric.NVLINK_CRC_DATA,
)
RESET_REQUIRED: Final = 16
GPU_IS_LOST: Final = 15
LIBRARY_MISMATCH: Final = 18
GPU_RESET: Final = 1
_NAMES: Final = {metric.value: metric for metric in DEVICE_METRICS}


def reading(
    device: Device,
    metric: Metric,
    value: float | Value,
    at: Instant,
    *,
    link: int | None = None,
    detail: str = "",
    count: int = 1,
) -> Reading:
    """Return a reading of this source."""
    known = Known(value) if isinstance(value, int | float) else value
    return Reading(
        source=SOURCE,
        device=device,
        metric=metric,
        value=known,
        at=at,
        link=link,
        detail=detail,
        count=count,
    )


def blind(device: Device, reason: str, at: Instant) -> Iterator[Reading]:
    """Yield that nothing is known of a device."""
    for metric in DEVICE_METRICS:
        yield reading(device, metric, Unknown(reason), at)


def lost(device: Device, reason: str, at: Instant) -> Iterator[Reading]:
    """Yield that the driver has lost a device."""
    yield reading(device, Metric.QUERY_STUCK_S, 0, at)
    yield reading(device, Metric.DEVICE_MISSING, 0, at)
    yield reading(device, Metric.DEVICE_LOST, 1, at, detail=f"the driver says: {reason}")
    yield from blind(device, f"the device is lost: {reason}", at)


def missing(device: Device, reason: str, at: Instant) -> Iterator[Reading]:
    """Yield that a device is not there any more."""
    yield reading(device, Metric.QUERY_STUCK_S, 0, at)
    yield reading(device, Metric.DEVICE_MISSING, 1, at, detail=reason)
    yield from blind(device, reason, at)


def answered(device: Device, answer: Mapping[str, Any], at: Instant) -> Iterator[Reading]:
    """Yield what one round of queries says about a device."""
    if answer["lost"]:
        yield from lost(device, answer["lost"], at)
        return
    values, errors, links = answer["values"], answer["errors"], answer["links"]
    if errors and not values and not links:
        code, text = next(iter(errors.values()))
        if code != RESET_REQUIRED:
            yield from missing(device, f"no query of the device is answered: {text}", at)
            return
    yield reading(device, Metric.QUERY_STUCK_S, 0, at)
    yield reading(device, Metric.DEVICE_LOST, 0, at)
    yield reading(device, Metric.DEVICE_MISSING, 0, at)
    for name, value in values.items():
        if name in _NAMES:
            yield reading(device, _NAMES[name], value, at)
    for name in answer["unsupported"]:
        if name in _NAMES:
            yield reading(device, _NAMES[name], NotSupported(), at)
    for name, (code, text) in errors.items():
        if name in _NAMES and not (name == Metric.RECOVERY_ACTION and code == RESET_REQUIRED):
            yield reading(device, _NAMES[name], Unknown(text), at)
    for name, by_link in links.items():
        for link, value in by_link.items():
            yield reading(device, _NAMES[name], value, at, link=int(link))
    wants_reset = next((text for code, text in errors.values() if code == RESET_REQUIRED), None)
    if wants_reset is not None and Metric.RECOVERY_ACTION not in values:
        yield reading(device, Metric.RECOVERY_ACTION, GPU_RESET, at, detail=wants_reset)


def xid(device: Device, code: int, instance: int | None, count: int, at: Instant) -> Reading:
    """Return an error event of a device."""
    where = "" if instance is None else f"on MIG GPU instance {instance}"
    return reading(device, Metric.XID, code, at, detail=where, count=count)
