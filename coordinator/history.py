"""What the closed incidents of a job add up to: the numbers behind its counters.

A pure fold: the same incidents give the same numbers, whether they closed just now or were read
back from the journal, so that counters survive a restart of the coordinator.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from coordinator.incidents import Incident, IncidentPhase, Outcome

BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""From "faster than a person sees" to "somebody was called"."""

MEASURED_PHASES: Final = tuple(IncidentPhase)[1:]
"""Each is measured from the milestone before it; the fault itself has none."""


@dataclass(slots=True)
class Histogram:
    """Durations in seconds, counted per bucket; the last bucket has no upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def observe(self, value_s: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BUCKETS_S, value_s)] += 1
        self.sum_s += value_s

    def cumulative(self) -> list[tuple[str, float]]:
        """Return ``(upper bound, count up to it)`` as the exposition format wants them."""
        bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


@dataclass(slots=True)
class History:
    """Totals over every closed incident noted so far, each counted once."""

    faults: Counter[str] = field(default_factory=Counter)
    """By kind of the culprit, or of the first report when nobody was named."""
    outcomes: Counter[str] = field(default_factory=Counter)
    restarts: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    lost_steps: int = 0
    phases: dict[IncidentPhase, Histogram] = field(
        default_factory=lambda: {phase: Histogram() for phase in MEASURED_PHASES}
    )
    recoveries: Histogram = field(default_factory=Histogram)
    """From the fault to the first step after it, of incidents that recovered."""
    _counted: set[str] = field(default_factory=set)

    def note(self, incident: Incident) -> None:
        """Add ``incident`` once it is closed; open or known ones change nothing."""
        if incident.outcome is Outcome.OPEN or incident.id in self._counted:
            return
        self._counted.add(incident.id)
        self.outcomes[incident.outcome] += 1
        self.lost_steps += incident.steps_lost or 0
        if (kind := kind_of(incident)) is not None:
            self.faults[kind] += 1
        if incident.finding is not None:
            self.verdicts[incident.finding.outcome] += 1
        if incident.decision is not None and incident.decision.mode is not None:
            self.restarts[incident.decision.mode] += 1
        self._note_durations(incident)

    def _note_durations(self, incident: Incident) -> None:
        for before, after in pairwise(milestones(incident)):
            self.phases[after[0]].observe(max(0, after[1] - before[1]) / 1e9)
        if incident.outcome is Outcome.RECOVERED:
            span_s = incident.span_s(IncidentPhase.FAULT, IncidentPhase.FIRST_STEP)
            if span_s is not None:
                self.recoveries.observe(max(0.0, span_s))


def milestones(incident: Incident) -> list[tuple[IncidentPhase, int]]:
    """Return the reached milestones in the order of the phases, with their wall-clock ns."""
    reached = [(phase, incident.at(phase)) for phase in IncidentPhase]
    return [(phase, at_ns) for phase, at_ns in reached if at_ns is not None]


def kind_of(incident: Incident) -> str | None:
    """Return what broke: the culprit's kind, or that of the first report."""
    if incident.finding is not None and incident.finding.culprit is not None:
        return incident.finding.culprit.kind
    return incident.faults[0].report.kind if incident.faults else None
