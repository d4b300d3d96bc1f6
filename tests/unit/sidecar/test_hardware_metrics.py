"""Hardware health as a scrape shows it."""

from scout.clock import Instant, seconds
from sidecar.hardware.health import HardwareHealth
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
from sidecar.hardware_metrics import hardware_families

GPU = Device(index=3, uuid="GPU-3", pci="0000:30:00")


def at(second: float) -> Instant:
    return Instant(seconds(second))


def reading(metric: Metric, value: float | Value, second: float = 1, **more: object) -> Reading:
    known = Known(value) if isinstance(value, int | float) else value
    told = {"source": "nvml", "device": GPU, "metric": metric, "value": known, "at": at(second)}
    return Reading(**{**told, **more})


def scraped(readings: list[Reading], now: float = 1) -> dict[str, dict[tuple[str, ...], float]]:
    """Name -> labels without the node's own -> value."""
    health = HardwareHealth()
    health.evaluate(readings, at(now))
    families = hardware_families(health.snapshot(at(now)), ("training_job",), ("j",))
    return {
        family.name: {tuple(s.labels.values())[1:]: s.value for s in family.samples}
        for family in families
    }


def test_a_number_that_was_read_is_shown_under_the_devices_index() -> None:
    """The person on call would not find the device that fails."""
    page = scraped(
        [
            reading(Metric.ECC_CORRECTABLE_VOLATILE, 7),
            reading(Metric.ECC_UNCORRECTABLE_VOLATILE, 2),
            reading(Metric.REMAP_PENDING, 1),
            reading(Metric.REMAP_FAILURE, 0),
            reading(Metric.REMAPPED_UNCORRECTABLE, 4),
            reading(Metric.NVLINK_CRC_DATA, 5, link=0),
            reading(Metric.NVLINK_CRC_DATA, 6, link=1),
            reading(Metric.PCIE_REPLAY, 9),
            reading(Metric.TEMPERATURE_C, 61),
            reading(Metric.TEMPERATURE_MARGIN_C, 34),
        ],
        now=4,
    )
    assert page["outrider_gpu_info"] == {("3", "GPU-3", "0000:30:00"): 1}
    assert page["outrider_gpu_ecc_errors"] == {("3", "corrected"): 7, ("3", "uncorrected"): 2}
    assert page["outrider_gpu_row_remap_pending"] == {("3",): 1}
    assert page["outrider_gpu_row_remap_failed"] == {("3",): 0}
    assert page["outrider_gpu_remapped_rows"] == {("3", "uncorrectable"): 4}
    assert page["outrider_gpu_nvlink_errors"] == {("3", "crc_data"): 11}
    assert page["outrider_gpu_pcie_replays"] == {("3",): 9}
    assert page["outrider_gpu_temperature_celsius"] == {("3",): 61}
    assert page["outrider_gpu_temperature_margin_celsius"] == {("3",): 34}
    assert page["outrider_gpu_health_age_seconds"] == {("3",): 3}


def test_what_is_not_known_is_absent_and_not_zero() -> None:
    """A blind sidecar would look like a healthy device."""
    page = scraped(
        [
            reading(Metric.TEMPERATURE_C, 61),
            reading(Metric.TEMPERATURE_C, Unknown("no answer"), second=2),
            reading(Metric.PCIE_REPLAY, NotSupported()),
        ],
        now=5,
    )
    assert page["outrider_gpu_temperature_celsius"] == {}
    assert page["outrider_gpu_pcie_replays"] == {}
    assert page["outrider_gpu_ecc_errors"] == {}
    assert page["outrider_gpu_health_severity"] == {("3",): 1}
    assert page["outrider_gpu_health_age_seconds"] == {("3",): 3}


def test_a_number_that_went_stale_is_not_shown_any_more() -> None:
    """A monitor that hangs would show the last good temperature for ever."""
    page = scraped([reading(Metric.TEMPERATURE_C, 61)], now=120)
    assert page["outrider_gpu_temperature_celsius"] == {}
    assert page["outrider_gpu_health_age_seconds"] == {("3",): 119}


def test_the_worst_of_a_device_is_its_severity() -> None:
    """An alert on the number would miss the fault beside ten healthy metrics."""
    fatal = [reading(Metric.REMAP_FAILURE, 1), reading(Metric.REMAP_PENDING, 0)]
    assert scraped(fatal)["outrider_gpu_health_severity"] == {("3",): 3}
    warning = [reading(Metric.REMAP_PENDING, 1), reading(Metric.REMAP_FAILURE, 0)]
    assert scraped(warning)["outrider_gpu_health_severity"] == {("3",): 2}
    assert scraped([reading(Metric.REMAP_PENDING, 0)])["outrider_gpu_health_severity"] == {
        ("3",): 0
    }


def test_counts_over_a_life_stand_in_only_where_there_are_no_others() -> None:
    """The counter would jump between two meanings."""
    both = [
        reading(Metric.ECC_CORRECTABLE_VOLATILE, 1),
        reading(Metric.ECC_CORRECTABLE_AGGREGATE, 900),
        reading(Metric.ECC_UNCORRECTABLE_VOLATILE, NotSupported()),
        reading(Metric.ECC_UNCORRECTABLE_AGGREGATE, 5),
    ]
    assert scraped(both)["outrider_gpu_ecc_errors"] == {
        ("3", "corrected"): 1,
        ("3", "uncorrected"): 5,
    }
    blind = [*both, reading(Metric.ECC_CORRECTABLE_VOLATILE, Unknown("no answer"))]
    assert ("3", "corrected") not in scraped(blind)["outrider_gpu_ecc_errors"]


def test_a_device_that_only_the_kernel_named_is_known_by_its_address() -> None:
    """Two devices without an index would be one series, and the scrape refused."""
    found = [
        reading(Metric.XID, 79, device=Device(pci=pci), claim=Severity.FATAL, source="kernel-log")
        for pci in ("0000:3b:00", "0000:4b:00")
    ]
    page = scraped(found)
    assert set(page["outrider_gpu_health_severity"]) == {("0000:3b:00",), ("0000:4b:00",)}
    assert page["outrider_gpu_health_age_seconds"] == {}, "it never answered"
