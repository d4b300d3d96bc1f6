"""An incident as one row of a list: what the API answers and the command shows."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.history import kind_of
from coordinator.incidents import Incident, IncidentPhase, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSummary:
    """One line of an incident list.  ``at_ns`` is wall clock, nanoseconds since the epoch."""

    id: str
    at_ns: int | None
    generation: int
    trigger: str
    outcome: Outcome
    verdict: str | None
    kind: str | None
    node: str | None
    rank: int | None
    gpu: int | None
    reason: str
    mode: str | None
    recovery_s: float | None
    steps_lost: int | None


def summary(incident: Incident) -> IncidentSummary:
    """Return the line of ``incident`` in a list."""
    finding, decision = incident.finding, incident.decision
    culprit = None if finding is None else finding.culprit
    return IncidentSummary(
        id=incident.id,
        at_ns=incident.at(IncidentPhase.FAULT) or incident.at(IncidentPhase.DETECTED),
        generation=incident.generation,
        trigger=incident.trigger,
        outcome=incident.outcome,
        verdict=None if finding is None else finding.outcome,
        kind=kind_of(incident),
        node=None if culprit is None else culprit.node,
        rank=None if culprit is None else culprit.rank,
        gpu=None if culprit is None else culprit.gpu,
        reason=(culprit.reason if culprit else "") or (finding.why if finding else ""),
        mode=None if decision is None or decision.mode is None else decision.mode,
        recovery_s=incident.span_s(IncidentPhase.FAULT, IncidentPhase.FIRST_STEP),
        steps_lost=incident.steps_lost,
    )


class NotOneIncidentError(Exception):
    """No incident is meant, or several are; the text says which there are."""

    def __init__(self, text: str, *, several: bool) -> None:
        super().__init__(text)
        self.several = several


def pick(wanted: str, ids: Sequence[str]) -> str:
    """Return the one of ``ids`` (oldest first) that ``wanted`` names.

    An id, any unique beginning of one, or ``last``.  Raises `NotOneIncidentError`.
    """
    fitting = list(ids[-1:]) if wanted == "last" else [it for it in ids if it.startswith(wanted)]
    if wanted in fitting:
        return wanted
    if not ids:
        text = "nothing has stopped the job so far: there is no incident"
        raise NotOneIncidentError(text, several=False)
    if not fitting:
        text = f"no incident {wanted!r}; `outrider incidents` lists them"
        raise NotOneIncidentError(text, several=False)
    if len(fitting) > 1:
        some = ", ".join(fitting[:5])
        text = f"{wanted!r} fits {len(fitting)} incidents: {some} ..."
        raise NotOneIncidentError(text, several=True)
    return fitting[0]
