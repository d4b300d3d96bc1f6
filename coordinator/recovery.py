"""From a finding to the next start: the part of a recovery that is decided once everyone stopped.

Pure functions over the durable state; `coordinator.job` calls them in order and sends what they
return.  Nothing here waits, and nothing here knows who is connected beyond what it is handed.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from coordinator import backoff, culprit, escalation, offenders, poison
from coordinator.checkpoint_choice import CheckpointLedger
from coordinator.escalation import Back
from coordinator.incidents import CheckpointChoice, Decision, Finding, Incident, NodeFault
from coordinator.journal_format import DurableState, Restart
from coordinator.restart_depth import Depth, depth
from coordinator.settings import JobSettings
from coordinator.trusted_steps import not_trusted
from sidecar.api import (
    CheckpointPointer,
    Command,
    FaultKind,
    Hello,
    RankHost,
    Start,
    StatusReport,
    Update,
)
from worker_shim.messages import SCOUT_ENV, RestartMode, most_severe

RESTARTS_KEPT_MAX: Final = 256
"""Restart history kept: more than any budget's window can hold."""


class OperatorAction(StrEnum):
    """What a person may ask of a job; the ``reason`` of an operator's fault report."""

    RESTART = "restart"
    STOP = "stop"
    EXCLUDE = "exclude"
    INCLUDE = "include"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What will be done about an incident, and the durable state that remembers it."""

    decision: Decision
    choices: tuple[CheckpointChoice, ...]
    state: DurableState
    incident: Incident


def least_depth(
    settings: JobSettings,
    state: DurableState,
    incident: Incident,
    ledger: CheckpointLedger,
    *,
    now_ns: int,
    script: str = "",
    nodes_at_hand: int = 0,
) -> Depth:
    """Return how deep the restart after ``incident`` must go, as far as is known by now.

    A person's restart is one of processes, unless something else asks for more.
    """
    asked = any(item.report.kind is FaultKind.OPERATOR for item in incident.faults)
    modes = [item.report.restart_mode for item in incident.faults]
    sighting = poison.sighting_of(incident, state.chosen_checkpoints, script, now_ns)
    _, choices = _choose(
        settings, state, incident, ledger, sighting=sighting, nodes_at_hand=nodes_at_hand
    )
    return depth(
        settings.restart.levels,
        state.restarts,
        escalation.cause_of(None if asked else incident.finding, newest_step(choices)),
        most_severe(RestartMode.PROCESS if asked else None, *modes),
        now_ns,
    )


def stop_mode(wanted: Depth, incident: Incident, node: str) -> RestartMode:
    """Return the mode in which ``node`` is stopped for a restart of ``wanted`` depth.

    A node-local restart ends the processes of the nodes that asked for it and of no other.
    """
    match wanted.mode:
        case None:
            return RestartMode.PROCESS  # the job is over
        case RestartMode.LOCAL_PROCESS:
            local = {
                fault.node
                for fault in incident.faults
                if fault.report.restart_mode is RestartMode.LOCAL_PROCESS
            }
            return RestartMode.PROCESS if node in local else RestartMode.IN_PROCESS
        case mode:
            return mode


def resolve(
    settings: JobSettings,
    state: DurableState,
    incident: Incident,
    ledger: CheckpointLedger,
    *,
    wanted: Depth,
    back: Mapping[str, tuple[int, ...]],
    stepped: bool,
    now_ns: int,
    script: str = "",
    nodes_at_hand: int = 0,
    fleet: int = 0,
) -> Resolution:
    """Choose checkpoint and restart mode for ``incident``; ``now_ns`` is the wall clock.

    ``wanted`` is the `least_depth` that every node was stopped for, ``back`` holds the ranks that
    stand at their barrier, by node.  ``script`` is the version of what ran, ``nodes_at_hand`` the
    number of nodes that stand by, ``fleet`` that of all nodes.
    """
    finding = incident.finding
    sighting = poison.sighting_of(incident, state.chosen_checkpoints, script, now_ns)
    ruling, choices = _choose(
        settings, state, incident, ledger, sighting=sighting, nodes_at_hand=nodes_at_hand
    )
    step = newest_step(choices)
    asked = [item for item in incident.faults if item.report.kind is FaultKind.OPERATOR]
    judged = None if asked else finding
    decision = escalation.decide(
        settings.restart,
        state.restarts,
        judged,
        wanted,
        now_ns,
        back=Back(world_size=settings.world_size, ranks=back),
        faults=incident.faults,
        checkpoint_step=step,
        stepped=stepped,
    )
    if asked:
        decision = _as_asked(decision, asked)
    decision = _as_ruled(decision, ruling, choices)
    cause, node = escalation.cause_of(judged, step), _culprit_node(finding)
    if not asked:
        decision = _unbroken(decision, state, settings, fleet)
        decision = _paused(decision, settings, state, incident, cause)
    spent = _spent(state, decision, node=node, cause=cause, now_ns=now_ns)
    at_fault = incident.steps_at_fault
    lost = None if at_fault is None else max(0, at_fault - (step or 0))
    return Resolution(
        decision=decision,
        choices=choices,
        state=_remembering(spent, sighting, choices),
        incident=replace(incident, decision=decision, checkpoints=choices, steps_lost=lost),
    )


def _spent(
    state: DurableState, decision: Decision, *, node: str | None, cause: str, now_ns: int
) -> DurableState:
    """Return the state that also knows of this restart and of whom it leaves out."""
    excluded = {**state.excluded, **dict.fromkeys(decision.exclude_nodes, decision.reason)}
    restarts = state.restarts
    if decision.mode is not None:
        restart = Restart(at_ns=now_ns, mode=decision.mode, node=node, cause=cause)
        restarts = (*restarts, restart)[-RESTARTS_KEPT_MAX:]
    return replace(state, excluded=excluded, restarts=restarts)


def _remembering(
    state: DurableState,
    sighting: poison.Sighting | None,
    choices: tuple[CheckpointChoice, ...],
) -> DurableState:
    """Return the state that also knows what was seen and from where the job goes on."""
    seen = state.sightings if sighting is None else (*state.sightings, sighting)
    return replace(
        state,
        sightings=seen[-poison.SIGHTINGS_KEPT_MAX :],
        chosen_checkpoints=pointers(choices),
        verified_steps=tuple(
            step for step in state.verified_steps if step <= (newest_step(choices) or 0)
        ),
        complete_checkpoints=tuple(
            pointer
            for pointer in state.complete_checkpoints
            if pointer.step <= _kept(choices, pointer.prefix)
        ),
    )


def _choose(
    settings: JobSettings,
    state: DurableState,
    incident: Incident,
    ledger: CheckpointLedger,
    *,
    sighting: poison.Sighting | None,
    nodes_at_hand: int,
) -> tuple[poison.Ruling, tuple[CheckpointChoice, ...]]:
    """Choose without what repetition speaks against."""
    damaged_at = culprit.damaged_at(incident.faults)
    doubted = not_trusted(state, incident.faults, ledger.pointers())
    plain = ledger.choose(settings.world_size, not_after=damaged_at, demoted=doubted)
    if sighting is None:
        return poison.Ruling(), plain
    older = ledger.choose(
        settings.world_size,
        not_after=damaged_at,
        demoted=doubted | {(it.prefix, it.step): "given up" for it in sighting.checkpoint},
    )
    ruling = poison.judge(
        state.sightings,
        sighting,
        older=bool(older) and all(choice.step is not None for choice in older),
        nodes_at_hand=nodes_at_hand,
    )
    if not ruling.demoted:
        return ruling, plain
    demoted = doubted | {(it.prefix, it.step): ruling.reason for it in ruling.demoted}
    return ruling, ledger.choose(settings.world_size, not_after=damaged_at, demoted=demoted)


def _as_ruled(
    decision: Decision, ruling: poison.Ruling, choices: Sequence[CheckpointChoice]
) -> Decision:
    """Return the decision with what repetition speaks against."""
    if decision.mode is None:
        return decision
    if ruling.stop:
        return replace(decision, mode=None, reason=f"{ruling.reason} ({decision.reason})")
    lost = {it.prefix for it in ruling.demoted}
    if any(choice.step is None for choice in choices if choice.prefix in lost):
        text = f"no checkpoint is left that can be loaded; {ruling.reason} ({decision.reason})"
        return replace(decision, mode=None, reason=text)
    nodes = tuple(dict.fromkeys([*decision.exclude_nodes, *ruling.blamed]))
    return replace(decision, exclude_nodes=nodes, reason=decision.reason + poison.told(ruling))


def _paused(
    decision: Decision, settings: JobSettings, state: DurableState, incident: Incident, cause: str
) -> Decision:
    """Return the decision with its wait before the next start."""
    if decision.mode is None:
        return decision
    draw = backoff.draw(incident.job, incident.id)
    before = backoff.repeated(state.restarts, cause)
    return replace(decision, backoff_s=backoff.pause_s(settings.restart.backoff, before, draw))


def _unbroken(
    decision: Decision, state: DurableState, settings: JobSettings, fleet: int
) -> Decision:
    """Return the decision without the nodes that the breaker keeps in."""
    wanted = decision.exclude_nodes
    judged = offenders.breaker(wanted, state.excluded, fleet, settings.offenders)
    if not judged.refused:
        return decision
    reason = f"{decision.reason}; {judged.reason}"
    return replace(decision, exclude_nodes=judged.allowed, reason=reason)


def newest_step(choices: Sequence[CheckpointChoice]) -> int | None:
    """Return the newest chosen step over all prefixes, or None."""
    return max((choice.step for choice in choices if choice.step is not None), default=None)


def pointers(choices: Sequence[CheckpointChoice]) -> tuple[CheckpointPointer, ...]:
    """Return the choices that name a checkpoint, as workers are told."""
    return tuple(
        CheckpointPointer(
            prefix=choice.prefix, step=choice.step, path=choice.path, others=choice.others
        )
        for choice in choices
        if choice.step is not None and choice.path is not None
    )


def start_commands(
    settings: JobSettings,
    state: DurableState,
    hellos: Mapping[str, Hello],
    statuses: Mapping[str, StatusReport],
) -> dict[str, Start]:
    """Return the start of ``state``'s generation for every node of its world."""
    hosts = state.hosts or tuple(hellos[node].host for node in state.world)
    return {
        node: Start(
            generation=state.generation,
            topology_version=state.topology_version,
            group_rank=group_rank,
            nnodes=settings.nnodes,
            master_addr=hosts[0],
            master_port=statuses[state.world[0]].rendezvous_port,
            fault_count=len(state.restarts),
            node_hosts=hosts,
            checkpoints=state.chosen_checkpoints,
            log_rules=settings.log_rules,
            env={} if settings.scout is None else {SCOUT_ENV: json.dumps(dict(settings.scout))},
            stall_timeout_s=settings.stall_timeout_s,
            stall_timeout_min_s=settings.stall_timeout_min_s,
            stall_factor=settings.stall_factor,
            observed=tuple(sorted(settings.observed)),
        )
        for group_rank, node in enumerate(state.world)
    }


def from_table(
    start: Start, status: StatusReport, known: tuple[str, ...] | None
) -> tuple[Command, ...]:
    """Return how a node is told of ``start``: of its table of hosts only what is not there yet.

    ``known`` is the table that stands there by the node's own word, None where it is not known or
    a shorter word was not understood.
    """
    short = replace(start, node_hosts=(), hosts_known=True)
    if known == start.node_hosts and status.table_version == start.topology_version:
        return (short,)
    if not known or status.table_version >= start.topology_version:
        return (start,)
    changed = tuple(
        RankHost(rank=rank, host=host)
        for rank, host in enumerate(start.node_hosts)
        if known[rank : rank + 1] != (host,)
    )
    update = Update(
        generation=start.generation,
        topology_version=start.topology_version,
        base_topology_version=status.table_version,
        group_rank=start.group_rank,
        nnodes=start.nnodes,
        master_addr=start.master_addr,
        master_port=start.master_port,
        fault_count=start.fault_count,
        changed=changed,
    )
    return (update, short)


def _as_asked(decision: Decision, asked: Sequence[NodeFault]) -> Decision:
    """Return what people asked for, in place of what would have been decided."""
    stop = _asked_to_stop(asked)
    if stop is not None:
        return Decision(mode=None, reason=stop.report.message)
    excluded = [it.node for it in asked if it.report.reason == OperatorAction.EXCLUDE]
    reason = "; ".join(it.report.message for it in asked)
    return replace(decision, reason=reason, exclude_nodes=tuple(excluded))


def stopped_by_a_person(incident: Incident) -> bool:
    """Return whether the job ends because somebody asked for its end."""
    return _asked_to_stop(incident.faults) is not None


def _asked_to_stop(faults: Sequence[NodeFault]) -> NodeFault | None:
    return next(
        (
            it
            for it in faults
            if (it.report.kind, it.report.reason) == (FaultKind.OPERATOR, OperatorAction.STOP)
        ),
        None,
    )


def _kept(choices: Sequence[CheckpointChoice], prefix: str) -> int:
    """Return the newest step of ``prefix`` that stays valid after going back."""
    chosen = next((choice for choice in choices if choice.prefix == prefix), None)
    return -1 if chosen is None or chosen.step is None else chosen.step


def _culprit_node(finding: Finding | None) -> str | None:
    return None if finding is None or finding.culprit is None else finding.culprit.node
