"""The pass that stops every node, and what is decided once they have stopped.

How deep a node is stopped follows from what is known by then; when more becomes known, it is
stopped deeper.  Who came back to the barrier alive is seen, not assumed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from coordinator import culprit, observing, recovery
from coordinator.desk import Desk, ranks_at_barrier
from coordinator.events import Effect, Say
from coordinator.incidents import Finding, Incident, IncidentPhase, NodeFault
from coordinator.membership import NodeView
from coordinator.phases import JobPhase
from coordinator.restart_depth import Depth
from scout.clock import Instant, after, seconds, since
from scout.hang import RankSnapshot
from sidecar.api import AgentState, Stop
from worker_shim.messages import RestartMode

BARRIER_MARGIN_S: Final = 10.0
"""What a node has, beyond the barrier's deadline, to end those who missed it."""


def stop_all(desk: Desk, now: Instant) -> list[Effect]:
    """Stop every node as deep as is needed, and decide once all have stopped."""
    incident = desk.memory.incident
    assert incident is not None, "stopping without an incident"
    # The one who broke may be the last to be heard: a node that is gone, or one on a slow link.
    finding = judge(desk, incident.world, incident.faults, incident.snapshots)
    incident = replace(incident, finding=finding)
    wanted = recovery.least_depth(
        desk.settings,
        desk.state,
        incident,
        desk.ledger,
        now_ns=desk.wall(now),
        script=desk.script,
        nodes_at_hand=desk.nodes_at_hand(now),
    )
    effects: list[Effect] = []
    generation, gone, pending = desk.state.generation, desk.gone(now), []
    for view in desk.world():
        status, mode = view.status, recovery.stop_mode(wanted, incident, view.node)
        if view.node in gone or (status is not None and _acknowledged(view, generation, mode)):
            continue
        pending.append(view.node)
        if view.link is not None and status is not None:
            effects += stop(desk, view, generation, now, mode)
    limit_s = max(desk.settings.stop_timeout_s, desk.settings.barrier_s + BARRIER_MARGIN_S)
    if pending and since(desk.phase_since, now) < seconds(limit_s):
        desk.waiting_for = f"{', '.join(pending)} to stop"
        return effects
    for node in pending:
        desk.exclude(node, "it did not confirm the stop in time")
    return [*effects, *_resolve(desk, incident, wanted, now)]


def _resolve(desk: Desk, incident: Incident, wanted: Depth, now: Instant) -> list[Effect]:
    desk.stamp(IncidentPhase.STOPPED, now)
    gone = desk.gone(now)
    if incident.finding is not None:
        seen = observing.stopped(desk.state.observations, incident.finding, desk.wall(now))
        desk.memory.observations_are(seen)
    resolution = recovery.resolve(
        desk.settings,
        desk.state,
        incident.reached(IncidentPhase.STOPPED, desk.wall(now)),
        desk.ledger,
        wanted=wanted,
        back={
            view.node: ranks_at_barrier(view)
            for view in desk.world()
            if view.node not in gone and view.excluded is None
        },
        stepped=desk.stepped,
        now_ns=desk.wall(now),
        script=desk.script,
        nodes_at_hand=desk.nodes_at_hand(now),
        fleet=len(desk.members.views()),
    )
    desk.memory.change(replace(resolution.state, open_incident=resolution.incident))
    for node, reason in desk.state.excluded.items():
        desk.members.exclude(node, reason)
    desk.stamp(IncidentPhase.DECIDED, now)
    decision = resolution.decision
    if decision.mode is None:
        wished = recovery.stopped_by_a_person(resolution.incident)
        return desk.end(JobPhase.STOPPED if wished else JobPhase.FAILED, decision.reason, now)
    desk.not_before = after(now, seconds(decision.backoff_s))
    desk.enter(JobPhase.WAITING, now)
    return [Say(level="WARNING", text=decision.reason)]


def stop(
    desk: Desk,
    view: NodeView,
    generation: int,
    now: Instant,
    mode: RestartMode = RestartMode.PROCESS,
) -> list[Effect]:
    """Return the sending of a stop to one node."""
    incident = desk.memory.incident
    command = Stop(
        generation=generation,
        restart_mode=mode,
        reason=incident.trigger if incident else "it runs a generation that is over",
        grace_s=desk.settings.stop_grace_s,
        barrier_s=desk.settings.barrier_s,
    )
    return desk.send(view, command, now=now)


def _acknowledged(view: NodeView, generation: int, mode: RestartMode) -> bool:
    status = view.status
    if status is None or status.state is not AgentState.READY:
        return False
    may_hold = mode is RestartMode.IN_PROCESS or not ranks_at_barrier(view)
    return status.stopped_generation >= generation and may_hold


def judge(
    desk: Desk,
    world: Sequence[str],
    faults: Sequence[NodeFault],
    snapshots: Sequence[RankSnapshot],
) -> Finding:
    """Name the culprit from all that is known now."""
    settings = desk.settings
    return culprit.judge(
        faults,
        snapshots,
        world,
        settings.nproc_per_node,
        seconds(settings.stall_timeout_s),
        exits=settings.restart.exits,
    )
