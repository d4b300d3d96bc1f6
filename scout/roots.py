"""Which root of the wait-for graph is guilty, and which is rightly waited for.

A root is guilty when nothing but itself stops it and it is overdue by its own limit: the one
that was declared for its phase, that its node has learned, or else the job's.
"""

from collections.abc import Sequence
from typing import Final

from scout.clock import SECOND
from scout.scene import Scene, silence_ns, vector
from scout.snapshot import GroupPosition, RankSnapshot, collective, doing, limit_ns, place
from scout.verdict import Agree, Attributed, Basis, Evidence, Inconclusive, Verdict
from scout.wait_for import waits_in

SHOWN_MAX: Final = 8
"""Ranks written out in one sentence."""


def judge_roots(scene: Scene) -> Verdict | None:
    """Name the rank that is waited for and waits for nobody; None where nobody waits.

    Several roots are named together only where every rank has told its place in one and the same
    group: in a job of many groups a second root may wait for something that nobody can see.
    """
    roots = [scene.by_rank[rank] for rank in scene.waits.roots]
    guilty = [it for it in roots if stops_by_itself(it, scene)]
    one_group = len({(g.name, g.ranks) for it in scene.ranks for g in it.groups}) == 1
    if len(guilty) == 1 or (one_group and guilty and 2 * len(guilty) < len(scene.ranks)):
        return _attribute(guilty, scene)
    evidence = _waits(roots, scene)
    if guilty:
        named = ", ".join(str(it.rank) for it in guilty[:SHOWN_MAX])
        why = f"{len(guilty)} ranks are waited for and wait for nobody: {named}"
        return Inconclusive(why=why, evidence=evidence)
    patient = [it for it in roots if it.rank not in scene.stuck]
    if patient:
        return rightly_waited_for(patient[0], scene, evidence)
    if scene.waits.cycle:
        return _circle(scene)
    if roots:
        why = f"the others wait for rank {roots[0].rank}, and what that waits for is not known"
        return Inconclusive(why=why, evidence=evidence)
    return None


def rightly_waited_for(
    it: RankSnapshot, scene: Scene, evidence: tuple[Evidence, ...] = ()
) -> Agree:
    """Return that ``it``, for which the others wait, may still take its time."""
    age = it.progress_age_ns
    if it.phase_limit_ns is not None:
        limit = it.phase_limit_ns / SECOND
        reason = f"{doing(it.phase)}, which was declared to take up to {limit:.0f} s"
    elif it.stall_limit_ns is not None and age is not None:
        limit = limit_ns(it, scene.stall_ns) / SECOND
        reason = f"{doing(it.phase)} for {age / SECOND:.1f} s, and may take {limit:.1f} s"
    else:
        reason = "still making progress"
    return Agree(why=f"the others wait for rank {it.rank}, which is {reason}", evidence=evidence)


def stops_by_itself(it: RankSnapshot, scene: Scene) -> bool:
    """Return whether a rank that waits for nobody is stopped by nothing but itself.

    One inside a collective that everybody has entered waits for a network, one whose position is
    as old as its last beat may have moved on, and one that has got as far as anybody in a group
    may wait there for a member of unknown position.
    """
    if it.rank not in scene.stuck or any(group.inside for group in it.groups):
        return False
    if it.heartbeat_age_ns is not None and it.heartbeat_age_ns > silence_ns(it, scene):
        return False
    unknown = {other.rank for other in scene.ranks if not other.groups}
    unknown |= scene.mute | scene.absent.keys()
    if it.rank in unknown and len(unknown) < len(scene.members):
        return False  # the others tell where they stand, and this one does not
    return not any(
        unknown.intersection(group.ranks) and _is_foremost(group, scene) for group in waits_in(it)
    )


def _is_foremost(mine: GroupPosition, scene: Scene) -> bool:
    """Return whether a rank has entered as much of one group as anybody is known to have."""
    key = (mine.name, mine.ranks)
    return mine.seq > 0 and not any(
        group.seq > mine.seq
        for rank in mine.ranks
        if rank in scene.by_rank
        for group in scene.by_rank[rank].groups
        if (group.name, group.ranks) == key
    )


def _attribute(guilty: Sequence[RankSnapshot], scene: Scene) -> Attributed:
    named = ", ".join(str(it.rank) for it in guilty)
    evidence = _waits(guilty, scene)
    ranks = tuple(it.rank for it in guilty)
    others = tuple(item for item in vector(scene) if item.ranks[0] not in ranks)
    return Attributed(
        ranks=ranks,
        basis=Basis.CAUSAL,
        why=f"the others wait for rank {named}: {evidence[0].detail}",
        evidence=evidence + others,
    )


def _circle(scene: Scene) -> Inconclusive:
    circle = scene.waits.cycle
    told = ", which waits for ".join(f"rank {rank}" for rank in (*circle, circle[0]))
    return Inconclusive(
        why="ranks wait for one another in a circle: "
        + told.replace(", which waits for ", " waits for ", 1),
        evidence=tuple(
            Evidence(surface="wait", ranks=(rank,), detail=place(scene.by_rank[rank]))
            for rank in circle
        ),
    )


def _waits(ranks: Sequence[RankSnapshot], scene: Scene) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(surface="wait", ranks=(it.rank,), detail=_wait(it, scene)) for it in ranks
    )


def _wait(it: RankSnapshot, scene: Scene) -> str:
    """Say where a root stands, since when, and who stands in front of it."""
    age = it.progress_age_ns
    since = "" if age is None else f", for {age / SECOND:.1f} s"
    wait = scene.waits.waited_for.get(it.rank)
    if wait is None:
        return f"it is at {place(it)}{since}"
    at = wait.position
    return (
        f"it is at {place(it)}{since}, and has not entered {collective(at)}, "
        f"in which rank {wait.waiter} waits"
    )
