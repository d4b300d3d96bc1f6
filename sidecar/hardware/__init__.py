"""Hardware health: what a reading means, and the sources readings come from.

The monitor is usable as a library: ``HardwareHealthMonitor(HealthConfig(), [NvmlSource()], f)``.
Names are loaded when they are asked for, so that the pure modules stay cheap to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sidecar.hardware.health import HealthCleared, HealthEvent
    from sidecar.hardware.monitor import HardwareHealthMonitor
    from sidecar.hardware.readings import (
        Device,
        Known,
        Metric,
        NotSupported,
        Reading,
        Severity,
        Unknown,
    )
    from sidecar.hardware.snapshot import HealthSnapshot
    from sidecar.hardware.sources import (
        DcgmExporterSource,
        FileSource,
        HealthSource,
        KernelLogSource,
        NvmlSource,
        SourceError,
    )
    from sidecar.hardware.thresholds import HealthConfig

__all__ = [
    "DcgmExporterSource",
    "Device",
    "FileSource",
    "HardwareHealthMonitor",
    "HealthCleared",
    "HealthConfig",
    "HealthEvent",
    "HealthSnapshot",
    "HealthSource",
    "KernelLogSource",
    "Known",
    "Metric",
    "NotSupported",
    "NvmlSource",
    "Reading",
    "Severity",
    "SourceError",
    "Unknown",
]

_HOMES: Final = {
    "health": ("HealthCleared", "HealthEvent"),
    "monitor": ("HardwareHealthMonitor",),
    "readings": ("Device", "Known", "Metric", "NotSupported", "Reading", "Severity", "Unknown"),
    "snapshot": ("HealthSnapshot",),
    "sources": (
        "DcgmExporterSource",
        "FileSource",
        "HealthSource",
        "KernelLogSource",
        "NvmlSource",
        "SourceError",
    ),
    "thresholds": ("HealthConfig",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
