"""One device through the eyes of one source: its last readings, counters, events and states.

Decides which readings are fresh enough to speak of now and sums what exists once per link.  What
the numbers mean is judged elsewhere.
"""

from dataclasses import dataclass, field
from typing import Final

from scout.clock import Instant, seconds, since
from sidecar.hardware.occurrences import Occurrences
from sidecar.hardware.readings import Known, Metric, Severity, Value
from sidecar.hardware.severity import Facts
from sidecar.hardware.thresholds import HealthConfig
from sidecar.hardware.tracks import Track
from sidecar.hardware.trend import Growth

SUMMED: Final = {
    Metric.NVLINK_RECOVERY: Metric.NVLINK_ERRORS,
    Metric.NVLINK_CRC_DATA: Metric.NVLINK_ERRORS,
}
"""What speaks against an NVLink endpoint, whichever of its links it was."""


@dataclass(slots=True)
class Seen:
    """The last reading of one metric (of one link, where there are links)."""

    value: Value
    at: Instant
    detail: str
    claim: Severity | None
    unknown_since: Instant | None


@dataclass(slots=True)
class View:
    """One device through the eyes of one source."""

    seen: dict[Metric, dict[int | None, Seen]] = field(default_factory=dict)
    growth: dict[tuple[Metric, int | None], Growth] = field(default_factory=dict)
    events: dict[Metric, Occurrences] = field(default_factory=dict)
    tracks: dict[Metric, Track] = field(default_factory=dict)


def facts_of(view: View, config: HealthConfig, now: Instant) -> Facts:
    """Return what is known now: readings that are too old are left out, links are summed."""
    stale = seconds(config.unknown_after_s)
    known: dict[Metric, float] = {}
    grown: dict[Metric, float] = {}
    per_min: dict[Metric, float] = {}
    details: dict[Metric, str] = {}
    worst_link: dict[Metric, tuple[float, int]] = {}
    for metric, by_link in view.seen.items():
        for link, seen in by_link.items():
            if not isinstance(seen.value, Known) or since(seen.at, now) > stale:
                continue
            known[metric] = known.get(metric, 0) + seen.value.value
            details[metric] = seen.detail
            growth = view.growth.get((metric, link))
            if growth is None:
                continue
            rate = growth.per_minute(now)
            for counted in {metric, SUMMED.get(metric, metric)}:
                grown[counted] = grown.get(counted, 0) + growth.since_baseline
                per_min[counted] = per_min.get(counted, 0) + rate
                if link is not None:
                    worst_link[counted] = max(worst_link.get(counted, (0.0, link)), (rate, link))
                if counted is not metric:
                    known[counted] = known.get(counted, 0) + seen.value.value
    for metric, (_rate, link) in worst_link.items():
        details[metric] = f", most of them on link {link}"
    return Facts(config=config, known=known, grown=grown, per_min=per_min, detail=details)


def value_of(view: View, metric: Metric) -> float | None:
    """Return the last number of a metric over all its links, or the last event's code."""
    events = view.events.get(metric)
    if events is not None and events.by_code:
        return float(max(events.by_code.items(), key=lambda item: item[1].last)[0])
    parts = [part for part, total in SUMMED.items() if total is metric]
    known = [
        seen.value.value
        for part in (metric, *parts)
        for seen in view.seen.get(part, {}).values()
        if isinstance(seen.value, Known)
    ]
    return sum(known) if known else None
