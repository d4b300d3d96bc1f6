"""Who holds everybody up?  The pure judgement over one snapshot of every rank.

Input is what each node could see of its ranks from outside the training thread; output is a
`Verdict`.  It knows nothing of sockets, restarts or time-outs: whoever calls it has already
decided that progress stopped.

Questions are asked in order of strength, and the first that names somebody ends them:

- who is stopped, or asleep in the kernel, while somebody waits for it (direct, and the only one
  that waits for nobody's limit);
- what the machine itself says of a process (direct);
- who is in another collective than the strict majority of its group (symmetric);
- who is waited for and waits for nobody, over all groups (causal);
- who went silent while a strict majority beats, or hangs in a stage that most are clear of
  (symmetric).

A rank that others wait for is guilty only when it is overdue by its own limit: the one that was
declared for its phase, that its node has learned, or else the job's.  Until then waiting for it
is what the others should do.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

from scout.clock import SECOND
from scout.consensus import exact
from scout.desync import desync
from scout.direct import judge_machines
from scout.held import judge_held
from scout.roots import judge_roots, rightly_waited_for, stops_by_itself
from scout.scene import Scene, positions_of, presence, silence_ns, vector
from scout.snapshot import GroupPosition, Phase, RankSnapshot, doing, is_overdue, place
from scout.stages import stalled_stage
from scout.verdict import Agree, Attributed, Basis, Evidence, Inconclusive, Verdict

__all__ = ["GroupPosition", "Phase", "RankSnapshot", "judge"]


def judge(snapshots: Sequence[RankSnapshot], electorate: Collection[int], stall_ns: int) -> Verdict:
    """Name whoever holds the others up, from one snapshot of every rank.

    ``stall_ns`` is the silence of progress that led to the question.  `Agree` means that every
    rank makes progress, or waits for one that does or may still take its time.  Ranks outside
    the electorate are not looked at.
    """
    scene = Scene.of(snapshots, electorate, stall_ns)
    if not scene.ranks:
        return Inconclusive(why="no rank could be looked at", evidence=presence(scene))
    held = judge_held(scene.ranks, scene.members)
    if held is not None:
        return held
    if not any(is_overdue(it, stall_ns) for it in scene.ranks):
        if not scene.absent:
            return Agree()
        why = "every rank that answered makes progress"
        return Inconclusive(why=why, evidence=presence(scene))
    machines = judge_machines(scene)
    if isinstance(machines, Attributed) and set(machines.ranks) <= scene.absent.keys():
        # Nobody answers for them; yet somebody else may hold up all that do answer.
        root = judge_roots(scene)
        return root if isinstance(root, Attributed) else machines
    return machines or _compared(scene)


# --- what comparing says --------------------------------------------------------------------


def _compared(scene: Scene) -> Verdict:
    """Ask one question after the other; the first reason for naming nobody is kept."""
    grouped = any(it.groups for it in scene.ranks)
    unclear: Inconclusive | None = None
    for question in _BY_GROUP if grouped else _BY_ONE_NUMBER:
        answer = question(scene)
        match answer:
            case Attributed() if 2 * len(answer.ranks) > max(len(scene.members), 2):
                why = f"{len(answer.ranks)} of {len(scene.members)} ranks alike: {answer.why}"
                unclear = unclear or Inconclusive(why=why, evidence=answer.evidence)
            case Attributed() | Agree():
                return answer
            case Inconclusive():
                unclear = unclear or answer
    return unclear or _together(scene)


def _other_collective(scene: Scene) -> Verdict | None:
    return desync(it for it in scene.ranks if it.rank in scene.stuck)


def _silent(scene: Scene) -> Attributed | None:
    """Return who stopped beating while a strict majority beats.

    A rank of which no beat was ever seen is not known to be silent, and is never named for it.
    """
    heard = [it for it in scene.ranks if it.heartbeat_age_ns is not None]
    beats = {
        it.rank: "beats" for it in heard if (it.heartbeat_age_ns or 0) <= silence_ns(it, scene)
    }
    verdict = exact(beats, scene.members, "heartbeat")
    quiet = [it for it in heard if it.rank not in beats and it.rank in scene.stuck]
    if not isinstance(verdict, Attributed) or not quiet:
        return None
    evidence = tuple(
        Evidence(
            surface="heartbeat",
            ranks=(it.rank,),
            detail=f"silent for {(it.heartbeat_age_ns or 0) / SECOND:.1f} s, {place(it)}",
        )
        for it in quiet
    )
    return Attributed(
        ranks=tuple(it.rank for it in quiet),
        basis=Basis.MAJORITY,
        why=f"{len(beats)} of {len(scene.members)} ranks beat, rank {quiet[0].rank} is "
        + evidence[0].detail,
        evidence=evidence,
    )


def _in_stage(scene: Scene) -> Attributed | None:
    """Return who hangs in a stage of its own, and not in something that it waits for there."""
    positions = positions_of(scene.ranks)
    lowest = min(positions.values(), default=None)
    alone = [
        it.rank
        for it in scene.ranks
        if is_overdue(it, scene.stall_ns)
        and it.rank not in scene.waits.waiters
        and positions.get(it.rank) == lowest
        and stops_by_itself(it, scene)
    ]
    return stalled_stage(scene.ranks, scene.members, alone)


def _behind(scene: Scene) -> Verdict | None:
    """Return who has not entered what the others wait in, where ranks tell one number each.

    A lowest position that half of the ranks share says only that the job split.
    """
    ranks, positions = scene.ranks, positions_of(scene.ranks)
    evidence = vector(scene)
    if not positions:
        untold = ", ".join(str(it.rank) for it in ranks if it.collective_seq is None)
        why = f"the position of some ranks is unknown ({untold})"
        return Inconclusive(why=why, evidence=evidence)
    lowest = min(positions.values())
    last = [it for it in ranks if positions[it.rank] == lowest]
    if len(last) == len(ranks):
        return None
    if len(last) > 1 and 2 * len(last) >= len(ranks):
        why = f"{len(last)} of {len(ranks)} ranks share the lowest position ({place(last[0])})"
        return Inconclusive(why=why, evidence=evidence)
    patient = [it for it in last if it.rank not in scene.stuck]
    if patient:
        return rightly_waited_for(patient[0], scene, evidence)
    ahead = next(it for it in ranks if positions[it.rank] != lowest)
    named = ", ".join(str(it.rank) for it in last)
    return Attributed(
        ranks=tuple(it.rank for it in last),
        basis=Basis.CAUSAL,
        why=f"the others wait for rank {named}: it is at {place(last[0])}, "
        f"rank {ahead.rank} at {place(ahead)}",
        evidence=evidence,
    )


def _behind_in_one_group(scene: Scene) -> Verdict | None:
    """Steps order ranks that all share one group; in many groups they run apart on purpose."""
    groups = {(group.name, group.ranks) for it in scene.ranks for group in it.groups}
    return _behind(scene) if len(groups) == 1 else None


def _together(scene: Scene) -> Inconclusive:
    """Say what is common to ranks of which none stands out."""
    ranks, positions = scene.ranks, positions_of(scene.ranks)
    where = "at the same position" if len(set(positions.values())) == 1 else "and none stands out"
    why = f"every rank stopped {where} ({place(ranks[0])})"
    phases = {it.phase for it in ranks}
    inside = {(g.op, g.seq, g.name) for it in ranks for g in it.groups if g.inside}
    if len(inside) == 1 and all(any(g.inside for g in it.groups) for it in ranks):
        why += "; all of them are inside the same collective: look at the network"
    elif len(phases) == 1 and not phases & {Phase.UNKNOWN, Phase.COLLECTIVE}:
        why += f"; all of them are {doing(phases.pop())}: look at what they share, such as storage"
    return Inconclusive(why=why, evidence=vector(scene))


_Question: TypeAlias = Callable[[Scene], Verdict | None]
_BY_GROUP: Final[tuple[_Question, ...]] = (
    _other_collective,
    judge_roots,
    _silent,
    _behind_in_one_group,
    _in_stage,
)
_BY_ONE_NUMBER: Final[tuple[_Question, ...]] = (_silent, _behind, _in_stage)
