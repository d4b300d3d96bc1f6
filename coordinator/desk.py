"""What the phases of a job work with: what is known, what was sent, and how to note changes.

No phase logic stands here.  `coordinator.job` fills it from events, `coordinator.passes` reads it
and goes on from where the job is.
"""

from collections.abc import Sequence
from typing import Final

from coordinator import observing, own_faults
from coordinator.checkpoint_choice import CheckpointLedger
from coordinator.events import Effect, Finished, Send
from coordinator.incidents import IncidentPhase, NodeFault
from coordinator.journal_format import DurableState
from coordinator.localization import Round
from coordinator.membership import Membership, NodeView
from coordinator.memory import Memory
from coordinator.offenders import Standing, Strike, breaker, standings
from coordinator.phases import JobPhase
from coordinator.picture import furthest_step
from coordinator.settings import JobSettings
from coordinator.trusted_steps import verified_by
from scout.clock import SECOND, Duration, Instant, after, seconds, since
from sidecar.api import AgentState, Command, FaultKind, FaultReport, StatusReport
from sidecar.rank_table import digest_of

REDIAL_WAIT_MAX: Final = Duration(7 * SECOND)
"""Longest pause of a sidecar between two tries to reach its coordinator, and a margin: a restarted
coordinator counts nobody's lease before everybody had a try."""
SPOKEN_WITHIN: Final = Duration(50_000_000)
"""A worker's own report is one message and travels for milliseconds; 50 ms are for a busy node."""
TABLES_KEPT_MAX: Final = 4
"""A node that is further behind is told the whole table."""
RESEND_AFTER: Final = Duration(1 * SECOND)
"""A command whose effect has not been seen is sent again after this time."""

_NEVER_FOLLOW: Final = frozenset({FaultKind.GPU_FATAL, FaultKind.OPERATOR})
"""Faults that no stop brings about."""


class Desk:
    """The working state of one job's coordinator."""

    def __init__(
        self,
        settings: JobSettings,
        state: DurableState,
        wall_offset_ns: int,
        now: Instant,
        strikes: tuple[Strike, ...] = (),
    ) -> None:
        self.settings = settings
        self.memory = Memory(state)
        self.members = Membership(
            job=settings.job,
            nproc_per_node=settings.nproc_per_node,
            lease_ns=seconds(settings.lease_s),
        )
        for node, reason in state.excluded.items():
            self.members.exclude(node, reason)
        self.members.expect(state.world, after(now, REDIAL_WAIT_MAX))
        self.ledger = CheckpointLedger.restored(state.complete_checkpoints, state.generation)
        self.round: Round | None = None
        self.stepped = bool(state.complete_checkpoints)
        self.quiet: Round | None = None
        """A look at a pause, while the job runs."""
        self.paused: frozenset[int] = frozenset()
        """The ranks that paused when it was last looked, and nobody was convicted."""
        self.look_again_at = now
        self.strikes: tuple[Strike, ...] = strikes
        self._kept_in: set[str] = set()
        """Nodes that the breaker kept in, and that was said."""
        self.spares_counted_in = 0
        """The generation in which missing spares were looked for last."""
        self.script = ""
        """Version of the script that the present generation runs, as its nodes told."""
        self.not_before = now
        self.phase_since = now
        self.waiting_for = ""
        self.tables: dict[str, tuple[str, ...]] = {digest_of(state.hosts): state.hosts}
        """The newest tables of hosts, by digest: what a node may still have."""
        self._wall_offset_ns = wall_offset_ns
        self._sent: dict[str, Instant] = {}
        self._rounds = 0
        if state.phase is JobPhase.LOCALIZING:
            # Every sidecar dials in again first; who has not within a lease is lost.
            self.round = self._new_round(now, settings.lease_s)

    @property
    def state(self) -> DurableState:
        """The durable state."""
        return self.memory.state

    def wall(self, now: Instant) -> int:
        """Return ``now`` as wall clock nanoseconds since the epoch."""
        return now + self._wall_offset_ns

    # --- faults and incidents ---------------------------------------------------------------

    def fault(self, node: str, report: FaultReport, now: Instant) -> None:
        """Take a fault into the open incident, or open one."""
        fault = NodeFault(node=node, at_ns=self.wall(now) - report.age_ns, report=report)
        if report.kind in self.settings.observed:
            step = furthest_step(self.state, self.members)
            self.memory.observations_are(observing.noted(self.state.observations, fault, step))
            return
        phase = self.state.phase
        if phase in (JobPhase.STARTING, JobPhase.RUNNING):
            self.memory.open(fault, furthest_step(self.state, self.members))
            self.stamp(IncidentPhase.DETECTED, now)
            self.round = self._new_round(now, self.settings.inspect_timeout_s)
            self.enter(JobPhase.LOCALIZING, now)
        elif phase is JobPhase.LOCALIZING or (
            phase is JobPhase.STOPPING and not self._follows_from_the_stop(fault)
        ):
            self.memory.add_fault(fault)

    def lost(self, view: NodeView, why: str, now: Instant) -> None:
        """Take the loss of a node as a fault; ``view`` is how it was last known.

        It is dated to its last word: when its connection broke may be noticed much later.
        """
        silent_ns = since(view.last_heard, now)
        self.fault(view.node, own_faults.node_lost(view.node, why, silent_ns), now)

    def stamp(self, phase: IncidentPhase, now: Instant) -> None:
        """Note that the open incident reached ``phase``."""
        self.memory.stamp(phase, self.wall(now))

    def exclude(self, node: str, reason: str) -> None:
        """Give ``node`` no rank from now on."""
        self.members.exclude(node, reason)
        self.memory.exclude(node, reason)

    def include(self, node: str) -> None:
        """Let ``node`` be given ranks again."""
        self.members.readmit(node)
        self.memory.include(node)

    def _follows_from_the_stop(self, fault: NodeFault) -> bool:
        """Return True for what broke only because everything was being stopped."""
        incident = self.memory.incident
        stopped_from = None if incident is None else incident.at(IncidentPhase.CAPTURED)
        late = stopped_from is not None and fault.at_ns > stopped_from
        return late and fault.report.kind not in _NEVER_FOLLOW

    def looks(self) -> Sequence[Round]:
        """Return the rounds that are under way."""
        return [it for it in (self.round, self.quiet) if it is not None]

    def begin_quiet_look(self, now: Instant) -> Round:
        """Begin to look at a pause; every node is asked anew."""
        self.quiet = self._new_round(now, self.settings.inspect_timeout_s)
        self._sent.clear()
        return self.quiet

    def _new_round(self, now: Instant, wait_s: float) -> Round:
        self._rounds += 1
        return Round(
            id=self._rounds,
            settle_until=after(now, seconds(self.settings.settle_s)),
            spoken_until=after(now, min(SPOKEN_WITHIN, seconds(self.settings.settle_s))),
            deadline=after(now, seconds(wait_s)),
            evidence_wait=seconds(self.settings.evidence_budget_s),
        )

    # --- what is remembered of nodes ----------------------------------------------------------

    def standings(self, now: Instant) -> dict[str, Standing]:
        """Return the record of every node that has strikes."""
        return standings(self.strikes, self.settings.offenders, self.wall(now))

    def leave_out(self, node: str, reason: str) -> str | None:
        """Exclude ``node`` because a detector says so; return a sentence to say, if there is one.

        Nothing happens while the detector is only observed, or when too much of the fleet is left
        out already.
        """
        if FaultKind.GPU_FATAL in self.settings.observed:
            return None
        fleet = len(self.members.views())
        judged = breaker([node], self.state.excluded, fleet, self.settings.offenders)
        if judged.refused:
            fresh = node not in self._kept_in
            self._kept_in.add(node)
            return judged.reason if fresh else None
        self._kept_in.discard(node)
        self.exclude(node, reason)
        return f"{node} is left out: {reason}"

    # --- checkpoints ------------------------------------------------------------------------

    def checkpoints_told(self, report: StatusReport) -> tuple[str, ...]:
        """Take in what a node's ranks saved; return what is wrong with it, each thing once."""
        nproc, group_rank = self.settings.nproc_per_node, report.group_rank
        if group_rank is not None:
            ranks = tuple(range(group_rank * nproc, (group_rank + 1) * nproc))
            for declared in report.checkpoint_types:
                kind = declared.checkpoint_type
                self.ledger.declare(declared.prefix, kind, ranks, declared.ranks)
        if report.generation == self.memory.state.generation:
            self.memory.steps_verified(verified_by(report, self.memory.state.verified_steps))
        for item in report.checkpoints:
            self.ledger.confirm(
                item.prefix,
                item.step,
                item.ranks,
                item.paths,
                generation=report.generation,
                kind=item.checkpoint_type,
            )
        if self.ledger.complete(self.settings.world_size):
            self.memory.checkpoints_complete(self.ledger.pointers())
        return self.ledger.conflicts()

    # --- phases and commands ----------------------------------------------------------------

    def enter(self, phase: JobPhase, now: Instant) -> None:
        """Go to ``phase``; every command of it is still to be sent."""
        self.memory.enter(phase)
        self._entered(now)

    def end(self, phase: JobPhase, reason: str, now: Instant) -> list[Effect]:
        """End the job."""
        self.memory.over(phase, reason)
        self._entered(now)
        return [Finished(outcome=str(phase), reason=reason)]

    def send(self, view: NodeView, *commands: Command, now: Instant) -> list[Effect]:
        """Return the sending of this phase's commands, unless they were sent a moment ago."""
        assert view.link is not None, "a command needs a connection"
        sent = self._sent.get(view.node)
        if sent is not None and now < after(sent, RESEND_AFTER):
            return []
        self._sent[view.node] = now
        return [Send(link=view.link, command=command) for command in commands]

    def was_told(self, node: str) -> bool:
        """Return whether ``node`` was sent this phase's command over its connection."""
        return node in self._sent

    def send_again(self, node: str) -> None:
        """Forget what was sent to ``node``: it has a new connection."""
        self._sent.pop(node, None)

    def _entered(self, now: Instant) -> None:
        self.phase_since = now
        self.waiting_for = ""
        self.quiet, self.paused = None, frozenset()
        self._sent.clear()

    # --- nodes ------------------------------------------------------------------------------

    def give_world(self, world: tuple[str, ...], now: Instant) -> None:
        """Begin the next generation with these nodes, all of which have presented themselves."""
        hellos = [view.hello for view in map(self.members.view, world) if view is not None]
        hosts = tuple(hello.host for hello in hellos if hello is not None)
        assert len(hosts) == len(world), "ranks are given to nodes that are there"
        self.memory.world_given(world, hosts, self.wall(now))
        self.tables.pop(digest_of(hosts), None)
        self.tables[digest_of(hosts)] = hosts
        while len(self.tables) > TABLES_KEPT_MAX:
            del self.tables[next(iter(self.tables))]

    def world(self) -> list[NodeView]:
        """Return the nodes that hold ranks, in the order of their group rank."""
        views = (self.members.view(node) for node in self.state.world)
        return [view for view in views if view is not None]

    def nodes_at_hand(self, now: Instant) -> int:
        """Return how many nodes could take the place of one that holds a rank."""
        return sum(view.node not in self.state.world for view in self.members.usable(now))

    def gone(self, now: Instant) -> frozenset[str]:
        """Return the nodes that count as lost."""
        return frozenset(view.node for view in self.members.lost(now))


def is_ready(view: NodeView) -> bool:
    """Return True when a start sent to this node now would be obeyed."""
    status = view.status
    return status is not None and status.state is AgentState.READY and status.rendezvous_port > 0


def is_idle(view: NodeView) -> bool:
    """Return True when no worker runs on this node: never started, or stopped since."""
    status = view.status
    return status is not None and (
        status.generation == 0 or status.generation <= status.stopped_generation
    )


def ranks_at_barrier(view: NodeView) -> tuple[int, ...]:
    """Return the ranks of this node whose process waits for a start, alive."""
    ranks = () if view.status is None else view.status.ranks
    return tuple(rank.rank for rank in ranks if rank.at_barrier)


def broken_device(status: StatusReport) -> FaultReport | None:
    """Return what the node says of a device that is broken for good, or None."""
    return next((fault for fault in status.faults if fault.kind is FaultKind.GPU_FATAL), None)
