"""Is a pause a hang?  Looks at every rank while the job runs, and disturbs nobody for it.

A rank that is overdue, or whose process is held, asks for a look.  Until the look says that it is
a hang there is no incident, no other phase, no evidence to be gathered: most pauses are ranks that
rightly wait for one that evaluates.  What the look found goes into the incident that it opens, so
that the verdict is not a second late.
"""

from collections.abc import Callable, Sequence
from typing import Final

from coordinator import own_faults
from coordinator.desk import Desk
from coordinator.events import Effect, Say
from coordinator.incidents import Finding, NodeFault
from coordinator.localization import Round
from scout.clock import SECOND, Duration, Instant, after, seconds
from scout.hang import RankSnapshot
from scout.snapshot import is_stuck
from sidecar.api import FaultReport, Inspect, RankStatus, StatusReport

LOOK_AGAIN_AFTER: Final = Duration(1 * SECOND)
"""Between two looks at the same pause; a rank that joins it is looked at once."""
OBSERVED_AGAIN_AFTER: Final = Duration(30 * SECOND)
"""Between two notes of one and the same hang that is only observed."""

Judge = Callable[[Sequence[NodeFault], Sequence[RankSnapshot]], Finding]


def watch_stall(
    desk: Desk, statuses: Sequence[StatusReport], judge: Judge, now: Instant
) -> list[Effect]:
    """Look where somebody is overdue or held; open an incident once it is a hang."""
    ranks = [rank for status in statuses for rank in status.ranks]
    paused = [rank for rank in ranks if rank.stalled or rank.held]
    if not paused:
        return _end(desk)
    look = desk.quiet
    if look is None:
        known = desk.paused == frozenset(rank.rank for rank in paused)
        if known and now < desk.look_again_at:
            return []
        look = desk.begin_quiet_look(now)
    effects: list[Effect] = []
    for view in desk.world():
        if view.link is not None and view.node not in look.asked:
            look.asked.add(view.node)
            question = Inspect(round_id=look.id, evidence_budget_s=0.0)
            effects += desk.send(view, question, now=now)
    if look.collected(set(desk.state.world) - desk.gone(now), now):
        effects += _judge(desk, look, paused, judge, now)
    return effects


def is_hang(finding: Finding, snapshots: Sequence[RankSnapshot], stall_ns: int) -> bool:
    """Return whether silence of progress is a hang that deserves a stop.

    A convicted culprit is one, and so is a job of which every rank is overdue by its own limit,
    whoever is to blame; anything else is a pause that one more look will tell apart.
    """
    if finding.culprit is not None:
        return True
    return finding.outcome != "agree" and all(is_stuck(it, stall_ns) for it in snapshots)


def _judge(
    desk: Desk, look: Round, paused: Sequence[RankStatus], judge: Judge, now: Instant
) -> list[Effect]:
    report = _report(paused)
    fault = NodeFault(node="", at_ns=desk.wall(now) - report.age_ns, report=report)
    seen = look.snapshots()
    finding = judge((fault,), seen)
    if is_hang(finding, seen, seconds(desk.settings.stall_timeout_s)):
        desk.fault("", report, now)
        desk.quiet = None
        if desk.round is None:  # stalls are observed only
            desk.paused = frozenset(rank.rank for rank in paused)
            desk.look_again_at = after(now, OBSERVED_AGAIN_AFTER)
            return []
        assert desk.round is not None, "an incident was opened"
        desk.round.begin_with(look)
        return []
    is_news = not desk.paused
    desk.quiet = None
    desk.paused = frozenset(rank.rank for rank in paused)
    desk.look_again_at = after(now, LOOK_AGAIN_AFTER)
    desk.waiting_for = finding.why
    text = f"progress paused, nobody convicted: {finding.why}"
    return [Say(level="INFO", text=text)] if is_news else []


def _end(desk: Desk) -> list[Effect]:
    was_paused = bool(desk.paused)
    if was_paused:
        desk.waiting_for = ""
    desk.quiet, desk.paused = None, frozenset()
    return [Say(level="INFO", text="every rank makes progress again")] if was_paused else []


def _report(paused: Sequence[RankStatus]) -> FaultReport:
    stalled = [rank for rank in paused if rank.stalled]
    return own_faults.stall(stalled) if stalled else own_faults.held(paused)
