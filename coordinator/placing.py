"""Which of the nodes at hand get the ranks: what is known of each, put together for the assignment.

It reads the desk and changes nothing.  How gaps are filled is `coordinator.rank_assignment`'s.
"""

from coordinator.desk import Desk, is_ready
from coordinator.membership import NodeView
from coordinator.offenders import penalty, to_avoid
from coordinator.rank_assignment import Assignment, NotPossible, assign
from coordinator.topology import Topology
from scout.clock import Instant
from worker_shim.messages import RestartMode


def assign_ranks(desk: Desk, *, hold_spares: bool, now: Instant) -> Assignment | NotPossible:
    """Give the ranks to the nodes that are ready; spares only where ``hold_spares`` is false."""
    ready = [view for view in desk.members.usable(now) if is_ready(view)]
    ready = _exchanged(desk, ready)
    at_hand = [view for view in ready if not (hold_spares and view.spare)]
    policy, nnodes = desk.settings.offenders, desk.settings.nnodes
    records = desk.standings(now)
    avoided = to_avoid(records, [view.node for view in at_hand], nnodes, policy)
    usable = [view for view in at_hand if view.node not in avoided]
    return assign(
        desk.state.world,
        [view.node for view in usable if not view.spare],
        [view.node for view in usable if view.spare],
        nnodes,
        unusable={**avoided, **desk.state.excluded},
        topology=_topology(desk),
        penalties={view.node: penalty(records, view.node) for view in usable},
    )


def _exchanged(desk: Desk, ready: list[NodeView]) -> list[NodeView]:
    """Leave out, for a job restart, the node that broke the job, if there is another for it."""
    incident = desk.memory.incident
    if incident is None or incident.decision is None or incident.finding is None:
        return ready
    culprit = incident.finding.culprit
    if incident.decision.mode is not RestartMode.JOB or culprit is None:
        return ready
    others = [view for view in ready if view.node != culprit.node]
    return others if len(others) >= desk.settings.nnodes else ready


def _topology(desk: Desk) -> Topology:
    """Return every label that is known of ranks and nodes."""
    return Topology(
        ranks={int(rank): labels for rank, labels in desk.state.rank_labels.items()},
        nodes={
            view.node: view.hello.labels for view in desk.members.views() if view.hello is not None
        },
        nproc=desk.settings.nproc_per_node,
    )
