"""The job's durable state, and every way it may change.

Whatever a restarted coordinator must know passes through here, so nothing can change without
being persisted, and always before the effects of the same pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from coordinator.events import Effect, Persist
from coordinator.incidents import Incident, IncidentPhase, NodeFault, Outcome
from coordinator.journal_format import DurableState
from coordinator.observing import Observation
from coordinator.phases import JobPhase, advance
from sidecar.api import CheckpointPointer, FaultKind

FAULTS_PER_INCIDENT_MAX: Final = 256
"""Reports kept of one incident; the first ones convict."""


_OUTCOMES: Final[Mapping[JobPhase, Outcome]] = MappingProxyType(
    {
        JobPhase.COMPLETED: Outcome.RECOVERED,
        JobPhase.FAILED: Outcome.FAILED,
        JobPhase.STOPPED: Outcome.STOPPED,
    }
)
"""What the job's end makes of an incident that was still open."""


class Memory:
    """One job's durable state.  ``state`` may be read; it changes by the methods only."""

    def __init__(self, state: DurableState) -> None:
        self.state = state
        self._dirty = state.generation == 0
        self._closed: list[Incident] = []

    @property
    def phase(self) -> JobPhase:
        """The job's phase."""
        return self.state.phase

    @property
    def incident(self) -> Incident | None:
        """The open incident."""
        return self.state.open_incident

    def change(self, state: DurableState) -> None:
        """Replace the whole state."""
        self.state = state
        self._dirty = True

    def enter(self, phase: JobPhase) -> None:
        """Go to ``phase``, which must be allowed to follow."""
        self.change(replace(self.state, phase=advance(self.state.phase, phase)))

    def world_given(self, world: tuple[str, ...], hosts: tuple[str, ...], now_ns: int) -> None:
        """Begin the next generation with these nodes at ``hosts``; ``now_ns`` is the wall clock."""
        changed = (world, hosts) != (self.state.world, self.state.hosts)
        self.change(
            replace(
                self.state,
                generation=self.state.generation + 1,
                topology_version=self.state.topology_version + changed,
                world=world,
                hosts=hosts,
                began_ns=self.state.began_ns or now_ns,
            )
        )

    def generation_seen(self, generation: int) -> None:
        """Never go back behind a generation that some node has obeyed."""
        if generation > self.state.generation:
            self.change(replace(self.state, generation=generation))

    def exclude(self, node: str, reason: str) -> None:
        """Give ``node`` no rank from now on."""
        self.change(replace(self.state, excluded={**self.state.excluded, node: reason}))

    def include(self, node: str) -> None:
        """Take the exclusion of ``node`` back."""
        left = {name: why for name, why in self.state.excluded.items() if name != node}
        self.change(replace(self.state, excluded=left))

    def checkpoints_complete(self, pointers: tuple[CheckpointPointer, ...]) -> None:
        """Remember what every rank confirmed."""
        self.change(replace(self.state, complete_checkpoints=pointers))

    def labelled(self, labels: Mapping[int, Mapping[str, str]]) -> None:
        """Remember where ranks stand in the parallel layout."""
        known = self.state.rank_labels
        fresh = {str(rank): dict(told) for rank, told in labels.items()}
        if any(known.get(rank) != told for rank, told in fresh.items()):
            self.change(replace(self.state, rank_labels={**known, **fresh}))

    def workers_tell_steps(self) -> None:
        """Remember that this job's workers attach and tell their steps."""
        if not self.state.tells_steps:
            self.change(replace(self.state, tells_steps=True))

    def observations_are(self, observations: tuple[Observation, ...]) -> None:
        """Remember what observed detectors said and what became of it."""
        if observations != self.state.observations:
            self.change(replace(self.state, observations=observations))

    def steps_verified(self, steps: tuple[int, ...]) -> None:
        """Keep which steps the ranks found good."""
        if steps != self.state.verified_steps:
            self.change(replace(self.state, verified_steps=steps))

    def over(self, phase: JobPhase, reason: str) -> None:
        """End the job and its open incident."""
        self.close(_OUTCOMES[phase])
        self.change(replace(self.state, outcome_reason=reason))
        self.enter(phase)

    # --- the open incident ------------------------------------------------------------------

    @property
    def stall_only(self) -> bool:
        """True while nothing but silence of progress speaks of a fault."""
        faults = () if self.incident is None else self.incident.faults
        return all(fault.report.kind is FaultKind.PROCESS_STALL for fault in faults)

    def open(self, fault: NodeFault, step: int | None) -> None:
        """Open an incident for its first fault; one that was still open is superseded by it."""
        if self.state.open_incident is not None and self.state.restarts:
            *earlier, last = self.state.restarts
            self.change(replace(self.state, restarts=(*earlier, replace(last, failed=True))))
        self.close(Outcome.SUPERSEDED)
        incident = Incident(
            id=f"{self.state.job}-{self.state.next_incident:04d}",
            job=self.state.job,
            generation=self.state.generation,
            topology_version=self.state.topology_version,
            trigger=fault.report.message,
            world=self.state.world,
            faults=(fault,),
            steps_at_fault=step,
        ).reached(IncidentPhase.FAULT, fault.at_ns)
        number = self.state.next_incident + 1
        self.change(replace(self.state, open_incident=incident, next_incident=number))

    def amend(self, incident: Incident) -> None:
        """Replace the open incident by what is known of it now."""
        if incident != self.state.open_incident:
            self.change(replace(self.state, open_incident=incident))

    def add_fault(self, fault: NodeFault) -> bool:
        """Add a report to the open incident.  Returns False when it is there or there is no room.

        A node's report is known by all but its age (its number begins anew with every start of
        the sidecar); those the coordinator made itself (number 0) by node, kind and reason.
        """
        incident = self.state.open_incident
        if incident is None or len(incident.faults) >= FAULTS_PER_INCIDENT_MAX:
            return False
        if any(_same(fault, known) for known in incident.faults):
            return False
        self.amend(replace(incident, faults=(*incident.faults, fault)))
        return True

    def stamp(self, phase: IncidentPhase, at_ns: int) -> None:
        """Note that the open incident reached ``phase``."""
        if self.state.open_incident is not None:
            self.amend(self.state.open_incident.reached(phase, at_ns))

    def close(self, outcome: Outcome) -> None:
        """Close the open incident, if there is one."""
        incident = self.state.open_incident
        if incident is not None:
            self._closed.append(replace(incident, outcome=outcome))
            self.change(replace(self.state, open_incident=None))

    def drop_incident(self) -> None:
        """Forget the open incident: nothing had happened after all."""
        self.change(
            replace(self.state, open_incident=None, next_incident=self.state.next_incident - 1)
        )

    # --- persistence ------------------------------------------------------------------------

    def remembered(self, effects: Sequence[Effect]) -> Sequence[Effect]:
        """Put what must be durable before everything else that is done."""
        if not self._dirty:
            return effects
        closed, self._closed, self._dirty = self._closed, [], False
        stored = [Persist(state=self.state, incident=incident) for incident in closed]
        last = Persist(state=self.state, incident=self.state.open_incident)
        return [*stored, last, *effects]


def _same(fault: NodeFault, known: NodeFault) -> bool:
    new, old = fault.report, known.report
    if fault.node != known.node or (new.kind, new.reason) != (old.kind, old.reason):
        return False
    return not (new.fault_id or old.fault_id) or replace(new, age_ns=0) == replace(old, age_ns=0)
