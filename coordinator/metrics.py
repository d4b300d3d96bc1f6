"""The coordinator's numbers, made from one picture of the job at each scrape.

Nothing is counted here: gauges come from the `JobView`, counters from the `History` of closed
incidents, the `Ledger` of the job's time and the `CommandTimes`.  Every bounded set of labels is
complete from the first scrape on, because an alert on a series that does not exist yet never
fires.

The picture is taken where the core runs; what it costs to write ten thousand nodes down is paid
in another thread, so that a scrape never holds up a recovery.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coordinator.command_times import CommandTimes
from coordinator.history import History
from coordinator.ledger import Ledger
from coordinator.metrics_incidents import incident_families
from coordinator.metrics_job import job_families
from coordinator.metrics_past import past_families
from coordinator.metrics_scout import scout_families
from coordinator.metrics_told import told_families
from coordinator.told_times import ToldTimes
from coordinator.view import JobView


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNumbers:
    """One moment of one job, whole; nothing in it changes any more.

    ``loop_lag`` holds finished families, because their library keeps them itself.
    """

    now_s: float
    view: JobView
    history: History
    ledger: Ledger
    commands: CommandTimes
    told: ToldTimes = field(default_factory=ToldTimes)
    refused: int = 0
    dropped: int = 0
    loop_lag: tuple[Metric, ...] = ()


class JobCollector(Collector):
    """Every metric of one moment."""

    def __init__(self, numbers: JobNumbers) -> None:
        self._numbers = numbers

    def describe(self) -> Iterable[Metric]:
        """Say nothing in advance: one scrape, one collector."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        numbers = self._numbers
        yield from job_families(numbers.view, numbers.now_s)
        yield from scout_families(numbers.view)
        yield from told_families(numbers.view.job, numbers.told)
        yield from past_families(
            numbers.view.job,
            history=numbers.history,
            ledger=numbers.ledger,
            commands=numbers.commands,
            refused=numbers.refused,
            dropped=numbers.dropped,
        )
        yield from incident_families(numbers.view, numbers.history.newest)
        yield from numbers.loop_lag


class AcceptError(ValueError):
    """No page can be made of what was asked for; the text says why."""


class Exposition:
    """The scrape page.  ``numbers`` is asked for the picture of the moment."""

    def __init__(self, numbers: Callable[[], JobNumbers]) -> None:
        self._numbers = numbers

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return the body and its content type in the format that ``accept`` asks for.

        Raises `AcceptError`.
        """
        return await asyncio.to_thread(render, self._numbers(), accept)


def render(numbers: JobNumbers, accept: str = "") -> tuple[bytes, str]:
    """Return the page of one moment and its content type.  Raises `AcceptError`."""
    try:
        encoder, content_type = choose_encoder(accept)
    except (TypeError, ValueError) as error:  # the library's words for a version that is none
        raise AcceptError(
            "the Accept header asks for no version of the metrics' format that exists; leave it out"
        ) from error
    registry = CollectorRegistry()
    registry.register(JobCollector(numbers))
    return encoder(registry), content_type
