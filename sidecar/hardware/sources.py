"""Where readings come from: one small interface, and the sources that ship.

Decides nothing about health.  A source that cannot be read raises `SourceError`; what it could not
see it returns as unknown.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

from scout.clock import Instant
from sidecar.hardware.dcgm import DcgmExporterSource, SourceError
from sidecar.hardware.devices import Gpu
from sidecar.hardware.node_conditions import from_conditions, from_labels
from sidecar.hardware.nvml_probe import NvmlProbe
from sidecar.hardware.readings import (
    Device,
    Known,
    Metric,
    NotSupported,
    Reading,
    Severity,
    Unknown,
    Value,
)
from sidecar.logs.follow import FollowCounters, FollowedFile

__all__ = [
    "DcgmExporterSource",
    "FileSource",
    "HealthSource",
    "KernelLogSource",
    "NvmlSource",
    "SourceError",
    "WakingSource",
    "claim_of",
]

LINES_MAX: Final = 10_000
"""Lines of one read; a file that grows faster than that is caught up with at the next ones."""
FINDINGS_MAX: Final = 4096
"""Kernel findings kept between two reads: devices times codes, far more than a node has."""


class HealthSource(Protocol):
    """Something that can be asked about hardware.  ``name`` is unique among a monitor's sources."""

    @property
    def name(self) -> str:
        """How the source is called in events and metrics."""

    def read(self) -> Iterable[Reading]:
        """Return what is known now.  May block for seconds, but not for ever."""

    def close(self) -> None:
        """Let go of processes and files."""


@runtime_checkable
class WakingSource(Protocol):
    """A source that calls ``wake``, on any thread, when it should be read before its time."""

    wake: Callable[[], None] | None


class NvmlSource:
    """The devices of this node through NVIDIA's management library, queried in a helper process.

    ``device_index`` is the physical index, which ``CUDA_VISIBLE_DEVICES`` does not change; None
    means all devices.  Use one source for all of them where you can: it starts one helper process.
    """

    name = "nvml"

    def __init__(self, device_index: int | None = None, *, query_timeout_s: float = 10.0) -> None:
        if device_index is not None:
            self.name = f"nvml-{device_index}"
        self._probe = NvmlProbe(device_index, query_timeout_s=query_timeout_s)

    @property
    def wake(self) -> Callable[[], None] | None:
        """Called when the driver reports an error event."""
        return self._probe.wake

    @wake.setter
    def wake(self, wake: Callable[[], None] | None) -> None:
        self._probe.wake = wake

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The devices found so far, in the order of their PCI addresses."""
        return self._probe.gpus

    @property
    def helpers(self) -> tuple[int, ...]:
        """The helper processes that run, by id."""
        return self._probe.helpers

    def read(self) -> list[Reading]:
        """Ask every device once."""
        return self._probe.read()

    def close(self) -> None:
        """End the helper processes."""
        self._probe.close()


class KernelLogSource:
    """What a reader of the kernel log found, handed over line by line and read with the others.

    A storm is one reading with a count, so that a million lines cost as much as one.
    """

    def __init__(self, *, name: str = "kernel-log") -> None:
        self.name = name
        self.wake: Callable[[], None] | None = None
        self.dropped = 0
        self._lock = threading.Lock()
        self._told: dict[tuple[Device, Metric, float, Severity | None], Reading] = {}

    def tell(
        self,
        metric: Metric,
        device: Device,
        *,
        at: Instant,
        value: float = 1,
        claim: Severity | None = None,
        detail: str = "",
        count: int = 1,
    ) -> None:
        """Take one finding.  ``claim`` is set where the line says more than its code does.

        ``at`` is when the kernel wrote it, on this machine's monotonic clock.
        """
        key = (device, metric, value, claim)
        with self._lock:
            before = self._told.get(key)
            if before is None and len(self._told) >= FINDINGS_MAX:
                self.dropped += count
                return
            self._told[key] = Reading(
                source=self.name,
                device=device,
                metric=metric,
                value=Known(value),
                at=at,
                detail=detail if before is None else before.detail,
                claim=claim,
                count=count if before is None else before.count + count,
            )
        if before is None and self.wake is not None:
            self.wake()

    def read(self) -> list[Reading]:
        """Return what was told since the last call."""
        with self._lock:
            told, self._told = self._told, {}
        return list(told.values())

    def close(self) -> None:
        """Nothing is held."""


def claim_of(severity: str) -> Severity:
    """Return what the word of the error catalogue means for the device."""
    return _CLAIMS.get(severity, Severity.WARNING)


_CLAIMS: Final[Mapping[str, Severity]] = MappingProxyType(
    {
        "fatal": Severity.FATAL,
        "app": Severity.WARNING,
        "warning": Severity.WARNING,
        "follow_up": Severity.HEALTHY,
        "info": Severity.HEALTHY,
    }
)


class FileSource:
    """Readings that somebody else appends to a file, one JSON object a line.

    ``{"metric": "temperature_c", "value": 91, "gpu": 3}`` with ``uuid`` or ``pci`` beside or
    instead of ``gpu``, none of them for the node.  ``value`` null with ``reason`` is unknown,
    ``"unsupported": true`` not supported; ``severity`` is the writer's own verdict.  Lines
    ``{"labels": {…}}`` and ``{"conditions": […]}`` are a Kubernetes node's.  What stood in the
    file before it was opened is read too: a standing word must not be missed.
    """

    def __init__(self, path: Path | str, *, name: str = "file") -> None:
        self.name = name
        self.lines_bad = 0
        self.last_bad = ""
        self._file = FollowedFile(Path(path), FollowCounters())

    def read(self) -> list[Reading]:
        """Return the readings that were appended since the last call."""
        now = Instant(time.monotonic_ns())
        readings: list[Reading] = []
        count = 0
        while count < LINES_MAX:
            lines = self._file.read()
            count += len(lines)
            for line in lines:
                try:
                    readings.extend(_from_line(line, self.name, now))
                except (ValueError, TypeError, RecursionError) as error:
                    self.lines_bad += 1
                    self.last_bad = f"{error}: {line[:200]}"
            if not self._file.behind:
                break
        if self._file.missing:
            raise SourceError(f"{self._file.path} is not there or cannot be read")
        return readings

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _from_line(line: str, source: str, at: Instant) -> Iterator[Reading]:
    if not line.strip():
        return
    told = json.loads(line)
    if not isinstance(told, dict):
        raise ValueError("not an object")  # noqa: TRY004 - one kind of error for a bad line
    if isinstance(told.get("labels"), dict):
        yield from from_labels(told["labels"], source, at)
    if isinstance(told.get("conditions"), list):
        conditions = [entry for entry in told["conditions"] if isinstance(entry, dict)]
        yield from from_conditions(conditions, source, at)
    if "metric" not in told:
        if "labels" not in told and "conditions" not in told:
            raise ValueError("neither a metric nor labels nor conditions")
        return
    claim = told.get("severity")
    yield Reading(
        source=source,
        device=Device(
            index=_whole(told.get("gpu")), uuid=_text(told.get("uuid")), pci=_text(told.get("pci"))
        ),
        metric=Metric(told["metric"]),
        value=_value(told),
        at=at,
        link=_whole(told.get("link")),
        detail=str(told.get("detail", ""))[:500],
        claim=None if claim is None else Severity(claim),
        count=max(1, _whole(told.get("count")) or 1),
    )


def _value(told: Mapping[str, Any]) -> Value:
    if told.get("unsupported"):
        return NotSupported()
    value = told.get("value")
    if value is None:
        return Unknown(str(told.get("reason", "no value"))[:500])
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 64:
        raise ValueError("the value is not a number")
    return Known(value)


def _whole(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError("an index, link or count is not a whole number")
    return value


def _text(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value or len(value) > 100:  # noqa: PLR2004
        raise ValueError("a uuid or pci address is not a short text")
    return value
