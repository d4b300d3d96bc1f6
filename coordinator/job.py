"""The job's brain: one pass over what is, towards what should be.

Every event first updates what is known (who is connected, what they said, which faults and
checkpoints were told); then the present phase is looked at once more and does what is missing
(`coordinator.passes`).  Commands are sent again until their effect is seen, so any message may be
lost or doubled.  What a restarted coordinator must remember is persisted before the command that
depends on it leaves.  Who is guilty, how deep to restart, from which checkpoint and with which
ranks is decided by pure modules of their own.
"""

from collections.abc import Sequence
from typing import Final

from coordinator import node_health, own_faults, recovery
from coordinator.desk import Desk
from coordinator.events import (
    Accept,
    Dismiss,
    Effect,
    Event,
    HealthTold,
    LinkClosed,
    LinkOpened,
    LinkSpoke,
    OperatorAsked,
    Persist,
    Say,
)
from coordinator.journal_format import DurableState
from coordinator.membership import NodeView, Rejected
from coordinator.offenders import Strike, strikes_of
from coordinator.passes import go_on
from coordinator.phases import JobPhase
from coordinator.picture import furthest_step, picture
from coordinator.settings import JobSettings
from coordinator.view import JobView
from scout.clock import SECOND, Duration, Instant, after
from sidecar.api import (
    EvidenceReport,
    FaultKind,
    FaultReport,
    Hello,
    ProgressReport,
    StatusReport,
)

LOOK_AGAIN_AFTER: Final = Duration(1 * SECOND)
"""Longest time between two looks at the whole, whatever happens."""


class JobCore:
    """One job's decisions.  Drive it with `sidecar.drive`.

    ``state`` is fresh or comes from the journal; ``wall_offset_ns`` turns an `Instant` into wall
    clock nanoseconds, because incidents are read by people.
    """

    def __init__(
        self,
        settings: JobSettings,
        state: DurableState,
        wall_offset_ns: int,
        now: Instant,
        strikes: tuple[Strike, ...] = (),
    ) -> None:
        self._desk = Desk(settings, state, wall_offset_ns, now, strikes)
        self._looked_at = now
        self._seen: dict[str, tuple[str, int]] = {}
        """Node -> incarnation, and the newest of its faults that was taken in."""

    @property
    def state(self) -> DurableState:
        """The durable state."""
        return self._desk.state

    @property
    def world_size(self) -> int:
        """Number of global ranks."""
        return self._desk.settings.world_size

    def progress(self) -> tuple[int | None, bool]:
        """Return the furthest step of this generation, and whether any rank may tell steps.

        A node that has not been heard yet may, and so may workers that import still, where those
        of an earlier generation attached.
        """
        attached = self.state.tells_steps or any(view.status is None for view in self._desk.world())
        return furthest_step(self._desk.state, self._desk.members), attached

    # --- the core's contract ----------------------------------------------------------------

    def handle(self, event: Event, now: Instant) -> Sequence[Effect]:
        """Take one event, return the effects it asks for, in order."""
        effects = self._take(event, now)
        return self._go_on(effects, now)

    def handle_timer(self, now: Instant) -> Sequence[Effect]:
        """Take the passing of time."""
        return self._go_on([], now)

    def next_deadline(self) -> Instant | None:
        """Return when `handle_timer` wants to be called next."""
        desk, looked_at = self._desk, self._looked_at
        due = [after(looked_at, LOOK_AGAIN_AFTER)]
        due += [look.next_deadline(looked_at) for look in desk.looks()]
        if desk.not_before > looked_at:
            due.append(desk.not_before)
        if not desk.state.phase.terminal and (lease := desk.members.next_deadline()) is not None:
            due.append(lease)
        return min(due)

    def view(self, now: Instant) -> JobView:
        """Return what the job looks like from outside."""
        desk = self._desk
        return picture(
            desk.settings,
            desk.state,
            desk.members,
            step=furthest_step(desk.state, desk.members),
            phase_since=desk.phase_since,
            waiting_for=desk.waiting_for,
            unfit=lambda node: node_health.standing_against(desk, node),
            now_ns=desk.wall(now),
            now=now,
            pending_checkpoints=desk.ledger.pending(desk.settings.world_size),
            offenders=tuple(desk.standings(now).values()),
        )

    def _go_on(self, effects: list[Effect], now: Instant) -> Sequence[Effect]:
        self._looked_at = now
        effects += node_health.look(self._desk, now)
        desk = self._desk
        done = desk.memory.remembered([*effects, *go_on(desk, now)])
        for effect in done:
            if isinstance(effect, Persist) and effect.incident is not None:
                desk.strikes += strikes_of(effect.incident)
        return done

    # --- taking in what happened ------------------------------------------------------------

    def _take(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case LinkOpened():
                return self._opened(event, now)
            case LinkClosed():
                return self._closed(event, now)
            case LinkSpoke(link=link, message=StatusReport() as report):
                return self._told(link, report, now)
            case LinkSpoke(link=link, message=ProgressReport() | EvidenceReport() as report):
                self._desk.members.heard(link, now)
                for look in self._desk.looks():
                    look.take(report)
                return []
            case LinkSpoke():
                return []
            case OperatorAsked():
                return self._asked(event, now)
            case HealthTold():
                return node_health.take(self._desk, event)

    def _opened(self, event: LinkOpened, now: Instant) -> list[Effect]:
        desk, node = self._desk, event.hello.node
        before = desk.members.view(node)
        admission = desk.members.open(event.link, event.hello, now)
        if isinstance(admission, Rejected):
            return [Dismiss(link=event.link, reason=admission.reason, retry=admission.retry)]
        effects: list[Effect] = [Accept(link=event.link)]
        if admission.replaced is not None:
            reason = f"a newer connection speaks for {node}"
            effects.append(Dismiss(link=admission.replaced, reason=reason, retry=False))
        if admission.restarted and before is not None and node in desk.state.world:
            desk.lost(before, own_faults.SIDECAR_RESTARTED, now)
        effects.append(_joined(event.hello, before, restarted=admission.restarted))
        desk.send_again(node)
        for look in desk.looks():
            look.asked.discard(node)
        return effects

    def _closed(self, event: LinkClosed, now: Instant) -> list[Effect]:
        desk = self._desk
        view = desk.members.close(event.link, now)
        if not isinstance(view, NodeView):
            return []
        if desk.state.phase.terminal:
            return [Say(level="INFO", text=f"{view.node} has left")]
        text = f"{view.node} is not connected any more; it is waited for"
        return [Say(level="WARNING", text=f"{text} for {desk.settings.lease_s:g} s")]

    def _include(self, node: str) -> list[Effect]:
        against = node_health.standing_against(self._desk, node)
        if against is None:
            self._desk.include(node)
            return []
        return [Say(level="WARNING", text=f"{node} stays left out: {against}")]

    def _told(self, link: int, report: StatusReport, now: Instant) -> list[Effect]:
        desk = self._desk
        view = desk.members.status(link, report, now)
        if not isinstance(view, NodeView):
            return [Say(level="WARNING", text=view.reason)]
        conflicts = desk.checkpoints_told(report)
        if report.generation == desk.state.generation:
            desk.memory.labelled({it.rank: it.labels for it in report.ranks if it.labels})
            desk.script = report.script_version or desk.script
            desk.stepped |= any(rank.step is not None for rank in report.ranks)
            if any(rank.attached or rank.step is not None for rank in report.ranks):
                desk.memory.workers_tell_steps()
        incarnation, known = self._seen.get(view.node, ("", 0))
        if incarnation != report.incarnation:
            known = 0
        for fault in report.faults:
            if fault.fault_id > known:
                self._fault_told(view.node, fault, report.generation, now)
        newest = max((fault.fault_id for fault in report.faults), default=0)
        self._seen[view.node] = (report.incarnation, max(known, newest))
        return [Say(level="ERROR", text=text) for text in conflicts]

    def _fault_told(self, node: str, fault: FaultReport, generation: int, now: Instant) -> None:
        hardware = fault.kind is FaultKind.GPU_FATAL
        present = hardware or generation == self._desk.state.generation
        if present and node in self._desk.state.world:
            self._desk.fault(node, fault, now)

    def _asked(self, event: OperatorAsked, now: Instant) -> list[Effect]:
        desk, node = self._desk, event.node or ""
        text = f"{event.who} asked to {event.action}: {event.why}"
        said = Say(level="WARNING", text=text)
        waiting = desk.state.phase is JobPhase.WAITING
        outside = waiting or node not in desk.state.world
        if event.action == recovery.OperatorAction.EXCLUDE and outside:
            desk.exclude(node, text)
        elif event.action == recovery.OperatorAction.STOP and waiting:
            return [said, *desk.end(JobPhase.STOPPED, text, now)]
        elif event.action == recovery.OperatorAction.INCLUDE:
            return [said, *self._include(node)]
        else:
            desk.fault(node, own_faults.operator_asked(event.action, text), now)
        return [said]


def _joined(hello: Hello, before: NodeView | None, *, restarted: bool) -> Say:
    role = "spare " if hello.spare else ""
    how = "has joined"
    if before is not None and before.hello is not None:
        how = "is back with a new sidecar" if restarted else "is back"
    return Say(level="INFO", text=f"{role}{hello.node} on {hello.host} {how}")
