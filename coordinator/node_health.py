"""What follows for the job from what others say of a node.

A fatal word is a hardware fault: a node that holds ranks is stopped in an incident and left out,
any other is left out at once.  When the word is over, the node may come back, unless something
else speaks against it.  Runs at every pass, so nothing hangs on a message being heard once.
"""

from collections.abc import Iterable
from dataclasses import replace

from coordinator import own_faults
from coordinator.desk import Desk, broken_device
from coordinator.events import Effect, HealthTold, Say
from coordinator.health_events import HealthNotice, HealthSeverity, against, expired, news, told
from coordinator.phases import JobPhase
from scout.clock import Instant


def take(desk: Desk, event: HealthTold) -> list[Effect]:
    """Keep what was said, and let go of nodes that nothing speaks against any more."""
    word, state = event.word, desk.state
    standing = told(state.health, word)
    if standing == state.health:
        return []
    over = [notice for notice in state.health if notice not in standing]
    fresh = news(state.health, word)
    counts = dict(state.health_counts)
    for severity in [notice.severity for notice in fresh] or [HealthSeverity.HEALTHY]:
        counts[severity.value] = counts.get(severity.value, 0) + 1
    said: list[Effect] = [
        Say(level="WARNING", text=f"{notice.node}: {notice.words}") for notice in fresh
    ]
    desk.memory.change(replace(state, health=standing, health_counts=counts))
    return said + _let_go(desk, over)


def look(desk: Desk, now: Instant) -> list[Effect]:
    """Bring the job in line with what stands now."""
    state = desk.state
    if not state.health or state.phase.terminal:
        return []
    effects: list[Effect] = []
    standing, over = expired(state.health, desk.wall(now))
    if over:
        desk.memory.change(replace(state, health=standing))
        effects += _let_go(desk, over)
    for node in dict.fromkeys(notice.node for notice in standing):
        notice = against(standing, node)
        if notice is None or node in desk.state.excluded:
            continue
        if desk.state.phase is JobPhase.WAITING or node not in desk.state.world:
            text = desk.leave_out(node, notice.words)
            effects += [] if text is None else [Say(level="WARNING", text=text)]
        else:
            desk.fault(node, own_faults.told_unhealthy(notice.words), now)
    return effects


def standing_against(desk: Desk, node: str) -> str | None:
    """Return why ``node`` cannot be given ranks as things stand and what would change that."""
    notice = against(desk.state.health, node)
    if notice is not None:
        return f"{notice.words}; {notice.source} has to take that back (POST /v1/health-events)"
    view = desk.members.view(node)
    broken = None if view is None or view.status is None else broken_device(view.status)
    if broken is None:
        return None
    return f"its sidecar says {broken.message}; mend that and restart its sidecar"


def _let_go(desk: Desk, over: Iterable[HealthNotice]) -> list[Effect]:
    effects: list[Effect] = []
    for notice in over:
        node, why = notice.node, desk.state.excluded.get(notice.node)
        view = desk.members.view(node)
        status = None if view is None else view.status
        broken = status is not None and broken_device(status) is not None
        if why is None or notice.words not in why or broken:
            continue
        other = against(desk.state.health, node)
        desk.include(node)
        if other is not None:
            desk.exclude(node, other.words)
            continue
        text = f"{node} may be given ranks again: {notice.source} has nothing against it any more"
        effects.append(Say(level="WARNING", text=text))
    return effects
