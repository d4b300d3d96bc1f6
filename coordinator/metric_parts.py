"""How a family of series is put together: the leaves that every part of the metrics page uses."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Exemplar

from coordinator.histogram import Histogram
from coordinator.wording import one_line

JOB: Final = "training_job"
REASON_CHARS_MAX: Final = 80
"""Longest reason in a label: enough for a person, too short to carry a log line."""
EXEMPLAR_LABEL: Final = "incident"
EXEMPLAR_CHARS_MAX: Final = 110
"""OpenMetrics allows an exemplar's labels 128 characters altogether."""

Samples: TypeAlias = Sequence[tuple[tuple[str, ...], float]]


def gauge(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """Return a gauge with one series for every pair of label values and number."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


def total(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """Return a counter; ``name`` stands without ``_total``."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


def state_set(
    name: str, text: str, label: str, *, job: str, states: Iterable[str], state: str
) -> Metric:
    """Return one series per state, of which exactly one is 1."""
    samples = [((job, one), float(one == state)) for one in states]
    return gauge(name, text, (JOB, label), samples)


def histogram(
    name: str, text: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], Histogram]
) -> Metric:
    """Return a histogram whose buckets carry their newest incident as an exemplar."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, one in rows.items():
        family.add_metric(values, _buckets(one), one.sum_s)
    return family


def short(text: str) -> str:
    """Return foreign ``text`` fit for a label."""
    return one_line(text, REASON_CHARS_MAX)


def number(value: int | None) -> str:
    """Return a number as a label, empty where there is none."""
    return "" if value is None else str(value)


def _buckets(one: Histogram) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    found: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    for place, (bound, count) in enumerate(one.cumulative()):
        example = one.examples.get(place)
        if example is None:
            found.append((bound, count))
            continue
        labels = {EXEMPLAR_LABEL: one_line(example.incident, EXEMPLAR_CHARS_MAX)}
        at_s = example.at_ns / 1e9 if example.at_ns else None
        found.append((bound, count, Exemplar(labels, example.value_s, at_s)))
    return found
