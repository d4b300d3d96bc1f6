"""A dcgm-exporter's metrics page as a source of readings.

Decides which of the exporter's fields mean which metric and which labels name the device; labels
of pods and jobs are passed over, so their churn costs nothing here.  The exporter shows only the
last Xid: a change is an event, what stood there at the first scrape is history.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from scout.clock import Instant, after, seconds
from sidecar.hardware.pci import normalise_pci
from sidecar.hardware.readings import Device, Known, Metric, Reading, Unknown, Value

FIELDS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        "DCGM_FI_DEV_GPU_TEMP": Metric.TEMPERATURE_C,
        "DCGM_FI_DEV_SHUTDOWN_TEMP": Metric.TEMPERATURE_SHUTDOWN_C,
        "DCGM_FI_DEV_POWER_USAGE": Metric.POWER_W,
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": Metric.ECC_CORRECTABLE_VOLATILE,
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": Metric.ECC_UNCORRECTABLE_VOLATILE,
        "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": Metric.ECC_CORRECTABLE_AGGREGATE,
        "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": Metric.ECC_UNCORRECTABLE_AGGREGATE,
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": Metric.REMAPPED_CORRECTABLE,
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": Metric.REMAPPED_UNCORRECTABLE,
        "DCGM_FI_DEV_ROW_REMAP_PENDING": Metric.REMAP_PENDING,
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": Metric.REMAP_FAILURE,
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": Metric.NVLINK_CRC_FLIT,
        "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": Metric.NVLINK_CRC_DATA,
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": Metric.NVLINK_REPLAY,
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": Metric.NVLINK_RECOVERY,
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": Metric.PCIE_REPLAY,
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": Metric.THROTTLE_REASONS,
        "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": Metric.THROTTLE_REASONS,
        "DCGM_FI_DEV_XID_ERRORS": Metric.XID,
    }
)
BLANK_FROM: Final = float(0x7FFFFFF0)
"""DCGM writes "no value" as the largest numbers of 32 and 64 bits and as 2 to the 47th."""
PAGE_BYTES_MAX: Final = 16 << 20
"""An exporter's page is some hundred kilobytes even with a thousand pods on it."""
LABEL_CHARS_MAX: Final = 100
_CHUNK: Final = 1 << 16


class SourceError(Exception):
    """A source cannot be read now.  The text is one sentence."""


class DcgmExporterSource:
    """Readings from the metrics page at ``url``, each scrape within ``timeout_s``."""

    def __init__(self, url: str, *, timeout_s: float = 3.0, name: str = "dcgm-exporter") -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the exporter's address must begin with http:// or https://: {url}")
        self.name = name
        self._url = url
        self._timeout_s = timeout_s
        self._xids: dict[Device, float] = {}

    def read(self) -> list[Reading]:
        """Scrape once.  Raises `SourceError` when the page cannot be had or read."""
        text = self._page()
        now = Instant(time.monotonic_ns())
        try:
            values = dict(_values(text))
        except ValueError as error:
            raise SourceError(f"the page at {self._url} is no metrics page: {error}") from error
        if not values:
            raise SourceError(f"the page at {self._url} has no field of a GPU")
        return [
            Reading(source=self.name, device=device, metric=metric, value=value, at=now)
            for (device, metric), value in values.items()
            if metric is not Metric.XID or self._is_new_xid(device, value)
        ]

    def close(self) -> None:
        """Nothing is held between scrapes."""

    def _is_new_xid(self, device: Device, value: Value) -> bool:
        if not isinstance(value, Known):
            return False
        before = self._xids.get(device)
        self._xids[device] = value.value
        return before is not None and value.value not in (0, before)

    def _page(self) -> str:
        deadline = after(Instant(time.monotonic_ns()), seconds(self._timeout_s))
        page = b""
        try:
            with urllib.request.urlopen(self._url, timeout=self._timeout_s) as answer:  # noqa: S310
                while chunk := answer.read1(_CHUNK):
                    page += chunk
                    if len(page) > PAGE_BYTES_MAX:
                        raise SourceError(f"{self._url} sends above {PAGE_BYTES_MAX} bytes")
                    if time.monotonic_ns() > deadline:
                        raise SourceError(f"{self._url} took more than {self._timeout_s:g} s")
        except (OSError, urllib.error.URLError, ValueError) as error:
            raise SourceError(f"{self._url} cannot be scraped: {error}") from error
        return page.decode(errors="replace")


def _values(text: str) -> Iterator[tuple[tuple[Device, Metric], Value]]:
    # Most nodes have no exporter, and its parser takes memory.
    from prometheus_client.parser import (  # noqa: PLC0415
        text_string_to_metric_families,
    )

    highest: dict[tuple[Device, Metric], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser gives counters the suffix that the exporter leaves out.
            metric = FIELDS.get(sample.name.removesuffix("_total"))
            device = None if metric is None else _device(sample.labels)
            if metric is not None and device is not None:
                key = (device, metric)
                # MIG instances repeat the whole device's value, each under its own label.
                highest[key] = max(highest.get(key, 0.0), sample.value)
    for key, value in highest.items():
        yield key, Unknown("the exporter has no value") if value >= BLANK_FROM else Known(value)


def _device(labels: Mapping[str, str]) -> Device | None:
    index = labels.get("gpu", "")
    uuid = labels.get("UUID", "")[:LABEL_CHARS_MAX]
    device = Device(
        index=int(index) if index.isascii() and index.isdigit() and len(index) < 4 else None,  # noqa: PLR2004
        uuid=uuid or None,
        pci=normalise_pci(labels.get("pci_bus_id", "")),
    )
    return None if device.is_node else device
