"""What a health judge knows at one moment, as metrics and people read it.

Vocabulary only.  Every state carries its age, and a device is as well as the worst of what is
known of it: not knowing is worse than well and better than a warning.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sidecar.hardware.readings import Device, Metric, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricHealth:
    """One metric of one device.  Ages are seconds.

    ``value`` is the last number read, however old (``age_s``), and None while the source says that
    it cannot see; ``unknown_age_s`` is set while there is no current one.  ``links`` holds a
    counter per link, ``counts`` events per code.
    """

    metric: Metric
    source: str
    severity: Severity
    reason: str
    value: float | None
    supported: bool
    age_s: float | None
    state_age_s: float
    unknown_age_s: float | None
    links: Mapping[int, float]
    counts: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """One device, or the node itself."""

    device: Device
    severity: Severity
    metrics: tuple[MetricHealth, ...]

    def metric(self, metric: Metric) -> MetricHealth | None:
        """Return one metric, or None when no source ever spoke of it."""
        return next((row for row in self.metrics if row.metric is metric), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHealth:
    """One source.  ``age_s`` since its last good read; ``reading_for_s`` while a read goes on."""

    name: str
    age_s: float | None
    reading_for_s: float | None
    trouble: str
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSnapshot:
    """Every device ever seen, the node first, and the sources that see them.

    ``remarks`` speak of devices that are well, and may support what is found of the ranks on them.
    """

    devices: tuple[DeviceHealth, ...]
    sources: tuple[SourceHealth, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def node(self) -> DeviceHealth:
        """What is known of the node as a whole."""
        return self.devices[0]

    def gpu(self, index: int) -> DeviceHealth | None:
        """Return the device with this physical index."""
        return next((seen for seen in self.devices if seen.device.index == index), None)


_ORDER = tuple(Severity)


def roll_up(metrics: Iterable[MetricHealth]) -> Severity:
    """Return the worst of what is known; a device of which nothing is known is unknown.

    A metric that the hardware does not have says nothing either way.
    """
    telling = [
        row.severity for row in metrics if row.supported or row.severity is not Severity.UNKNOWN
    ]
    return max(telling, key=_ORDER.index, default=Severity.UNKNOWN)
