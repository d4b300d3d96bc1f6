"""Reading the job's state for others: the outside view and the furthest step."""

from collections.abc import Callable, Sequence

from coordinator import observing
from coordinator.checkpoint_choice import PendingCheckpoint
from coordinator.incidents import RankPlace
from coordinator.journal_format import DurableState
from coordinator.membership import Membership, NodeView
from coordinator.offenders import Standing
from coordinator.restart_depth import is_charged
from coordinator.settings import JobSettings
from coordinator.view import JobView, NodeStatus
from scout.clock import SECOND, Instant, since


def picture(
    settings: JobSettings,
    state: DurableState,
    members: Membership,
    *,
    step: int | None,
    phase_since: Instant,
    waiting_for: str,
    unfit: Callable[[str], str | None],
    now_ns: int,
    now: Instant,
    pending_checkpoints: tuple[PendingCheckpoint, ...] = (),
    offenders: tuple[Standing, ...] = (),
) -> JobView:
    """Return the outside view of a job.  ``now_ns`` is the wall clock of ``now``.

    ``unfit`` says what speaks against a node at this moment, None when nothing does.
    """
    window_ns = round(settings.restart.window_s * SECOND)
    spent = sum(item.at_ns > now_ns - window_ns and is_charged(item) for item in state.restarts)
    group_ranks = {node: group_rank for group_rank, node in enumerate(state.world)}
    return JobView(
        job=settings.job,
        phase=state.phase,
        phase_age_s=since(phase_since, now) / SECOND,
        generation=state.generation,
        topology_version=state.topology_version,
        nnodes=settings.nnodes,
        nproc_per_node=settings.nproc_per_node,
        world=state.world,
        step=step,
        complete_checkpoints=state.complete_checkpoints,
        chosen_checkpoints=state.chosen_checkpoints,
        nodes=tuple(
            _node(view, group_ranks.get(view.node), unfit(view.node), now)
            for view in members.views()
        ),
        pending_checkpoints=pending_checkpoints,
        excluded=state.excluded,
        open_incident=state.open_incident,
        restarts_total=len(state.restarts),
        restart_budget_remaining=max(0, settings.restart.retries_max - spent),
        outcome_reason=state.outcome_reason,
        waiting_for=waiting_for,
        offenders=offenders,
        observed=state.observations,
        observed_scores=observing.scores(state.observations),
        health=state.health,
        health_counts=state.health_counts,
    )


def furthest_step(state: DurableState, members: Membership) -> int | None:
    """Return the furthest step that any rank of the present generation reported."""
    views = (members.view(node) for node in state.world)
    statuses = (view.status for view in views if view is not None and view.status is not None)
    return max(
        (
            rank.step
            for status in statuses
            if status.generation == state.generation
            for rank in status.ranks
            if rank.step is not None
        ),
        default=None,
    )


def places(world: Sequence[str], nproc: int, members: Membership) -> tuple[RankPlace, ...]:
    """Return where every rank of ``world`` runs.  A local rank uses the device of its place."""
    found: list[RankPlace] = []
    for group_rank, node in enumerate(world):
        view = members.view(node)
        hello = None if view is None else view.hello
        gpus = () if hello is None else hello.gpus
        found += [
            RankPlace(
                rank=group_rank * nproc + local_rank,
                node=node,
                host="" if hello is None else hello.host,
                local_rank=local_rank,
                gpu=gpus[local_rank] if local_rank < len(gpus) else None,
            )
            for local_rank in range(nproc)
        ]
    return tuple(found)


def _node(view: NodeView, group_rank: int | None, unfit: str | None, now: Instant) -> NodeStatus:
    status, hello = view.status, view.hello
    return NodeStatus(
        node=view.node,
        connected=view.link is not None,
        spare=view.spare,
        state=status.state if status else None,
        generation=status.generation if status else None,
        topology_version=status.topology_version if status else None,
        group_rank=group_rank,
        last_heard_age_s=since(view.last_heard, now) / SECOND,
        excluded=view.excluded,
        reason=status.reason if status else "",
        host=hello.host if hello else "",
        http_port=hello.http_port if hello else 0,
        ranks=status.ranks if status else (),
        unfit=unfit,
    )
