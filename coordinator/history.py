"""What the closed incidents of a job add up to: the numbers behind its counters.

A pure fold: the same incidents give the same numbers, whether they closed just now or were read
back from the journal, so that counters survive a restart of the coordinator.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from coordinator.histogram import Histogram
from coordinator.incidents import Incident, IncidentPhase, Outcome
from worker_shim.messages import RestartMode

MEASURED_PHASES: Final = tuple(IncidentPhase)[1:]
"""Each is measured from the milestone before it; the fault itself has none."""
INCIDENTS_SHOWN_MAX: Final = 5
"""Newest closed incidents whose details are kept for the metrics page."""
DEPTHS: Final = (*(mode.value for mode in RestartMode), "failed")
"""How deep a decision goes, mildest first."""
ESCALATIONS: Final = tuple(
    (before, after) for place, before in enumerate(DEPTHS) for after in DEPTHS[place + 1 :]
)
UNKNOWN: Final = "unknown"
"""What broke, where no report said it."""


@dataclass(slots=True)
class History:
    """Totals over every closed incident noted so far, each counted once."""

    faults: Counter[str] = field(default_factory=Counter)
    """By kind of the culprit, or of the first report when nobody was named."""
    outcomes: Counter[str] = field(default_factory=Counter)
    restarts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By mode and by what broke."""
    escalations: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Decisions that went deeper than the one before: from how deep to how deep."""
    verdicts: Counter[str] = field(default_factory=Counter)
    lost_steps: int = 0
    phases: dict[IncidentPhase, Histogram] = field(
        default_factory=lambda: {phase: Histogram() for phase in MEASURED_PHASES}
    )
    recoveries: dict[RestartMode, Histogram] = field(
        default_factory=lambda: {mode: Histogram() for mode in RestartMode}
    )
    """From the fault to the first step after it, of incidents that recovered."""
    newest: tuple[Incident, ...] = ()
    """The last `INCIDENTS_SHOWN_MAX`, oldest first."""
    _counted: set[str] = field(default_factory=set)
    _depth: str | None = None

    def note(self, incident: Incident) -> None:
        """Add ``incident`` once it is closed; open or known ones change nothing."""
        if incident.outcome is Outcome.OPEN or incident.id in self._counted:
            return
        self._counted.add(incident.id)
        self.newest = (*self.newest, incident)[-INCIDENTS_SHOWN_MAX:]
        self.outcomes[incident.outcome] += 1
        self.lost_steps += incident.steps_lost or 0
        kind = kind_of(incident)
        if kind is not None:
            self.faults[kind] += 1
        if incident.finding is not None:
            self.verdicts[incident.finding.outcome] += 1
        if incident.decision is not None:
            mode = incident.decision.mode
            if mode is not None:
                self.restarts[mode, kind or UNKNOWN] += 1
        if incident.depth in DEPTHS:
            self._note_depth(incident.depth)
        self._note_durations(incident)

    def copy(self) -> "History":
        """Return the same totals, apart from these, for somebody who reads them elsewhere."""
        return History(
            faults=self.faults.copy(),
            outcomes=self.outcomes.copy(),
            restarts=self.restarts.copy(),
            escalations=self.escalations.copy(),
            verdicts=self.verdicts.copy(),
            lost_steps=self.lost_steps,
            phases={phase: it.copy() for phase, it in self.phases.items()},
            recoveries={mode: it.copy() for mode, it in self.recoveries.items()},
            newest=self.newest,
        )

    def _note_depth(self, depth: str) -> None:
        before, self._depth = self._depth, depth
        if before is not None and (before, depth) in ESCALATIONS:
            self.escalations[before, depth] += 1

    def _note_durations(self, incident: Incident) -> None:
        for before, after in pairwise(milestones(incident)):
            took_s = max(0, after[1] - before[1]) / 1e9
            self.phases[after[0]].observe(took_s, incident=incident.id, at_ns=after[1])
        mode = None if incident.decision is None else incident.decision.mode
        ended_ns = incident.at(IncidentPhase.FIRST_STEP)
        span_s = incident.span_s(IncidentPhase.FAULT, IncidentPhase.FIRST_STEP)
        if incident.outcome is Outcome.RECOVERED and mode is not None and span_s is not None:
            self.recoveries[mode].observe(
                max(0.0, span_s), incident=incident.id, at_ns=ended_ns or 0
            )


def milestones(incident: Incident) -> list[tuple[IncidentPhase, int]]:
    """Return the reached milestones in the order of the phases, with their wall-clock ns."""
    reached = [(phase, incident.at(phase)) for phase in IncidentPhase]
    return [(phase, at_ns) for phase, at_ns in reached if at_ns is not None]


def kind_of(incident: Incident) -> str | None:
    """Return what broke: the culprit's kind, or that of the first report."""
    if incident.finding is not None and incident.finding.culprit is not None:
        return incident.finding.culprit.kind
    return incident.faults[0].report.kind if incident.faults else None
