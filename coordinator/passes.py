"""One pass a phase: compare what is with what should be, and do what is missing.

A pass may run any number of times and asks for the same things again until it sees them done.
It returns effects in order; going to another phase makes the next pass run at once.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from coordinator import deadlines, observing, own_faults, recovery
from coordinator.desk import Desk, broken_device, is_idle, is_ready, ranks_at_barrier
from coordinator.events import Effect, Say
from coordinator.evidence import with_evidence
from coordinator.incident_text import recovered
from coordinator.incidents import Finding, IncidentPhase, Outcome
from coordinator.localization import Round
from coordinator.membership import NodeView
from coordinator.phases import JobPhase
from coordinator.picture import furthest_step, places
from coordinator.placing import assign_ranks
from coordinator.rank_assignment import Assignment
from coordinator.stall_watch import is_hang, watch_stall
from coordinator.stopping import judge, stop, stop_all
from scout.clock import SECOND, Duration, Instant, seconds, since
from sidecar.api import AgentState, Inspect, Shutdown

SURVIVORS_WAIT: Final = Duration(5 * SECOND)
"""How long a node that held a rank may take to become ready, or to dial in again, before it is
replaced.  A lost one is replaced at once."""
SPARES_HELD_BACK: Final = Duration(30 * SECOND)
"""At the first start spares are kept for faults; after this wait they may fill a gap."""
UNTOLD_STEPS_WAIT: Final = Duration(30 * SECOND)
"""Workers of a job that never told a step count as recovered when they have run for so long.

Where an earlier generation attached, imports may take any time up to the start-up deadline."""


def go_on(desk: Desk, now: Instant) -> list[Effect]:
    """Run the present phase's pass, and the following ones as far as the job gets at once."""
    effects: list[Effect] = []
    if not desk.state.phase.terminal:
        _note_losses(desk, now)
        overdue = deadlines.overdue(desk.settings, desk.state, desk.wall(now))
        if overdue is not None:
            effects += desk.end(JobPhase.FAILED, overdue, now)
    for _ in JobPhase:
        phase = desk.state.phase
        if not phase.terminal:
            effects += _tidy(desk, now)
        effects += _PASSES[phase](desk, now)
        if desk.state.phase is phase:
            break
    return effects


def _note_losses(desk: Desk, now: Instant) -> None:
    gone = desk.gone(now)
    for view in desk.world():
        if view.node in gone:
            desk.lost(view, own_faults.LEASE_EXPIRED, now)


def _tidy(desk: Desk, now: Instant) -> list[Effect]:
    """Look after the nodes that hold no rank: stop what still runs there, leave out the broken.

    Both are levels: a node may come back from wherever it was at any time, with old workers on
    it, and a broken device stays broken whatever else was going on when it was told.
    """
    effects: list[Effect] = []
    waiting = desk.state.phase is JobPhase.WAITING
    for view in desk.members.views():
        if view.status is None or (view.node in desk.state.world and not waiting):
            continue
        broken = broken_device(view.status)
        if broken is not None and view.excluded is None:
            text = desk.leave_out(view.node, broken.message)
            effects += [] if text is None else [Say(level="WARNING", text=text)]
        leftover = view.node not in desk.state.world and bool(ranks_at_barrier(view))
        if view.link is not None and (leftover or not is_idle(view)):
            generation = max(view.status.generation, desk.state.generation)
            effects += stop(desk, view, generation, now)
    return effects


# --- waiting for nodes, starting them -------------------------------------------------------


def _waiting(desk: Desk, now: Instant) -> list[Effect]:
    if now < desk.not_before:
        desk.waiting_for = "the back-off between two restarts"
        return []
    gone = desk.gone(now)
    busy = [
        view.node
        for view in desk.world()
        if view.node not in gone and view.excluded is None and not is_ready(view)
    ]
    waited = since(desk.phase_since, now)
    if busy and waited < SURVIVORS_WAIT:
        desk.waiting_for = f"{', '.join(busy)} to become ready"
        return []
    given = assign_ranks(
        desk, hold_spares=not desk.state.world and waited < SPARES_HELD_BACK, now=now
    )
    if isinstance(given, Assignment):
        _begin_generation(desk, given, now)
        return []
    desk.waiting_for = given.reason
    if waited >= seconds(desk.settings.wait_for_nodes_s):
        return desk.end(JobPhase.FAILED, given.reason, now)
    return []


def _begin_generation(desk: Desk, given: Assignment, now: Instant) -> None:
    incident = desk.memory.incident
    if incident is None:
        choices = desk.ledger.choose(desk.settings.world_size)
        chosen = recovery.pointers(choices)
        desk.memory.change(replace(desk.state, chosen_checkpoints=chosen))
    else:
        choices = incident.checkpoints
        desk.memory.amend(replace(incident, moves=given.moves))
        desk.stamp(IncidentPhase.ASSIGNED, now)
    for view in desk.members.views():
        if view.status is not None:  # no node may refuse the next generation as one it has seen
            seen = max(view.status.generation, view.status.stopped_generation)
            desk.memory.generation_seen(seen)
    desk.give_world(given.world, now)
    desk.ledger.begin(desk.state.generation, choices)
    desk.memory.checkpoints_complete(desk.ledger.pointers())
    desk.enter(JobPhase.STARTING, now)


def _spares_missing(desk: Desk, now: Instant) -> list[Effect]:
    """Say once a generation, when everybody had time to dial in, that spares are missing."""
    wanted, there = desk.settings.spares, desk.nodes_at_hand(now)
    told, desk.spares_counted_in = desk.spares_counted_in, desk.state.generation
    if there >= wanted or told == desk.state.generation:
        return []
    text = f"{there} of {wanted} spares stand by; start the others with `outrider run --spare`"
    return [Say(level="WARNING", text=text)]


def _starting(desk: Desk, now: Instant) -> list[Effect]:
    effects: list[Effect] = []
    started = 0
    for view in desk.world():
        if view.link is None or view.status is None:
            continue
        if view.status.generation == desk.state.generation:
            started += 1
        elif is_ready(view):
            effects += _start(desk, view, now)
        elif not is_idle(view):
            effects += stop(desk, view, view.status.generation, now)
    if started == desk.settings.nnodes:
        desk.stamp(IncidentPhase.STARTED, now)
        desk.enter(JobPhase.RUNNING, now)
    return effects


def _start(desk: Desk, view: NodeView, now: Instant) -> list[Effect]:
    world = desk.world()
    hellos = {item.node: item.hello for item in world if item.hello is not None}
    statuses = {item.node: item.status for item in world if item.status is not None}
    lacking = len(hellos) < desk.settings.nnodes or desk.state.world[0] not in statuses
    if lacking or view.status is None:
        return []  # a restarted coordinator does not know every node's address yet
    starts = recovery.start_commands(desk.settings, desk.state, hellos, statuses)
    known = None if desk.was_told(view.node) else desk.tables.get(view.status.table_digest)
    return desk.send(view, *recovery.from_table(starts[view.node], view.status, known), now=now)


# --- running, and looking for the culprit ---------------------------------------------------


def _running(desk: Desk, now: Instant) -> list[Effect]:
    known = [(view, view.status) for view in desk.world() if view.status is not None]
    if len(known) < desk.settings.nnodes:
        return []  # a restarted coordinator waits for its nodes to dial in
    for view, status in known:
        if status.state is AgentState.SHUTDOWN:
            desk.fault(view.node, own_faults.node_left(view.node), now)
            return []
        if status.generation != desk.state.generation:
            desk.lost(view, own_faults.SIDECAR_RESTARTED, now)
            return []
        if is_idle(view):
            desk.lost(view, own_faults.STOPPED_BY_OTHERS, now)
            return []
    statuses = [status for _, status in known]
    if all(status.state is AgentState.COMPLETED for status in statuses):
        return desk.end(JobPhase.COMPLETED, "every worker ended with exit status 0", now)
    ranks = [rank for status in statuses for rank in status.ranks]
    if all(rank.step is not None for rank in ranks):
        desk.stamp(IncidentPhase.FIRST_STEP, now)
        said = [*_recovered(desk), *_spares_missing(desk, now)]
        step = furthest_step(desk.state, desk.members)
        judged = observing.went_on(desk.state.observations, step, desk.wall(now))
        desk.memory.observations_are(judged)
        look = functools.partial(judge, desk, desk.state.world)
        return [*said, *watch_stall(desk, statuses, look, now)]
    if desk.state.tells_steps:
        _watch_start(desk, sum(rank.step is None for rank in ranks), now)
    elif since(desk.phase_since, now) >= UNTOLD_STEPS_WAIT:
        return _recovered(desk)
    return []


def _recovered(desk: Desk) -> list[Effect]:
    incident = desk.memory.incident
    desk.memory.close(Outcome.RECOVERED)
    return [] if incident is None else [Say(level="INFO", text=recovered(incident))]


def _watch_start(desk: Desk, silent: int, now: Instant) -> None:
    limit_s = desk.settings.startup_deadline_s
    if since(desk.phase_since, now) >= seconds(limit_s):
        report = own_faults.startup_timeout(silent, limit_s)
        desk.fault(desk.state.world[0], report, now)


def _localizing(desk: Desk, now: Instant) -> list[Effect]:
    asked, incident = desk.round, desk.memory.incident
    assert asked is not None, "localizing without a round"
    assert incident is not None, "localizing without an incident"
    effects: list[Effect] = []
    for view in desk.world():
        if view.link is not None and view.node not in asked.asked:
            asked.asked.add(view.node)
            effects += desk.send(view, _inspect(desk, asked), now=now)
    stall_only = desk.memory.stall_only
    knows = asked.is_known and stall_only
    if not (knows or asked.collected(set(desk.state.world) - desk.gone(now), now)):
        return effects
    snapshots = asked.snapshots()
    incident = replace(
        incident,
        snapshots=snapshots,
        log_tails=asked.log_tails(),
        places=places(incident.world, desk.settings.nproc_per_node, desk.members),
    )
    finding = judge(desk, incident.world, incident.faults, snapshots)
    if not stall_only and not asked.settled(finding, incident.faults, now):
        return effects
    if not stall_only and asked.look_again(finding):
        for node in desk.state.world:
            desk.send_again(node)
        return [*effects, *_localizing(desk, now)]
    stall_ns = seconds(desk.settings.stall_timeout_s)
    if stall_only and not is_hang(finding, snapshots, stall_ns):
        return [*effects, *_dismiss_stall(desk, finding, now)]
    incident = replace(incident, finding=finding).reached(IncidentPhase.LOCALIZED, desk.wall(now))
    desk.memory.amend(incident)
    if asked.hold_stop([view.node for view in desk.world() if view.link is not None], now):
        desk.waiting_for = "a last look at every rank"
        return effects
    desk.round = None
    desk.memory.amend(with_evidence(incident, asked.evidence, asked.owing()))
    desk.stamp(IncidentPhase.CAPTURED, now)
    desk.enter(JobPhase.STOPPING, now)
    return [*effects, Say(level="WARNING", text=f"stopping every node: {finding.why}")]


def _inspect(desk: Desk, asked: Round) -> Inspect:
    """Ask for a look that is back in time: a fifth of the budget is for the way.

    Evidence is asked for once.
    """
    budget_s = 0.0 if asked.is_second_look else desk.settings.evidence_budget_s * 0.8
    return Inspect(round_id=asked.id, evidence_budget_s=budget_s)


def _dismiss_stall(desk: Desk, finding: Finding, now: Instant) -> list[Effect]:
    desk.round = None
    desk.memory.drop_incident()
    desk.enter(JobPhase.RUNNING, now)
    return [Say(level="INFO", text=f"progress paused, nobody convicted: {finding.why}")]


# --- after the end --------------------------------------------------------------------------


def _over(desk: Desk, now: Instant) -> list[Effect]:
    failed = desk.state.phase is JobPhase.FAILED
    shutdown = Shutdown(reason=desk.state.outcome_reason, exit_code=int(failed))
    effects: list[Effect] = []
    for view in desk.members.views():
        if view.link is not None:
            effects += desk.send(view, shutdown, now=now)
    return effects


_PASSES: Final[Mapping[JobPhase, Callable[[Desk, Instant], list[Effect]]]] = MappingProxyType(
    {
        JobPhase.WAITING: _waiting,
        JobPhase.STARTING: _starting,
        JobPhase.RUNNING: _running,
        JobPhase.LOCALIZING: _localizing,
        JobPhase.STOPPING: stop_all,
        JobPhase.COMPLETED: _over,
        JobPhase.FAILED: _over,
        JobPhase.STOPPED: _over,
    }
)
