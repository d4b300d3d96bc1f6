"""What the machine itself says of a process: stopped, dead, stuck in the kernel, unreachable.

Direct evidence needs no majority.  Where most ranks are convicted at once the cause is common to
them, and nobody is named.
"""

from collections.abc import Mapping
from typing import Final

from scout.scene import Position, Scene, positions_of, presence
from scout.snapshot import RankSnapshot, place
from scout.verdict import Attributed, Basis, Evidence, Inconclusive, Verdict

_SEEN: Final[Mapping[str, str]] = {
    "T": "its process is stopped by a signal",
    "t": "its process is stopped by a debugger",
    "D": "its process waits in the kernel and cannot be interrupted",
    "Z": "its process is dead and not collected",
    "X": "its process is gone",
}


def judge_machines(scene: Scene) -> Verdict | None:
    """Return the verdict over the ranks that their machines convict, each by one evidence."""
    positions = positions_of(scene.ranks)
    found = [
        Evidence(surface="process", ranks=(it.rank,), detail=f"{_SEEN[state]}, {place(it)}")
        for it in scene.ranks
        if (state := it.process_state) in _SEEN
        and state is not None
        and (state != "D" or _may_be_waited_for(it, scene, positions))
    ]
    if not found and not scene.absent:
        return None
    evidence = tuple(sorted((*found, *presence(scene)), key=lambda it: it.ranks))
    ranks = tuple(rank for it in evidence for rank in it.ranks)
    members = len(scene.members)
    if 2 * len(ranks) > max(members, 2):
        why = f"{len(ranks)} of {members} ranks stopped or vanished: the cause is common to them"
        return Inconclusive(why=why, evidence=evidence)
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    why = f"rank {ranks[0]}: {evidence[0].detail}{more}"
    return Attributed(ranks=ranks, basis=Basis.DIRECT, why=why, evidence=evidence)


def _may_be_waited_for(it: RankSnapshot, scene: Scene, positions: Mapping[int, Position]) -> bool:
    """Waiting in the kernel can be a moment of an innocent rank's life: three things clear it."""
    mine = positions.get(it.rank)
    is_ahead = mine is not None and min(positions.values()) < mine
    waits = it.rank in scene.waits.waiters
    return it.rank in scene.stuck and not is_ahead and not waits
