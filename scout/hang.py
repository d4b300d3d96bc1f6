"""Who holds everybody up?  The pure judgement over one snapshot of every rank.

Input is what each node could see of its ranks from outside the training thread; output is a
`Verdict`.  It knows nothing of sockets, restarts or time-outs: whoever calls it has already
decided that progress stopped.

Evidence is asked in order of strength, and the first that names somebody ends the questions:
what the machine itself says of a process, then who went silent while most beat, then who has not
entered the collective that the others wait in.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from scout.clock import SECOND
from scout.consensus import exact
from scout.verdict import Agree, Attributed, Basis, Evidence, Inconclusive, Verdict

SILENCE_NS_MIN: Final = SECOND
"""A beat comes every 0.1 s; ten missed in a row are no scheduling delay."""

_SEEN: Final[Mapping[str, str]] = {
    "T": "its process is stopped by a signal",
    "t": "its process is stopped by a debugger",
    "D": "its process waits in the kernel and cannot be interrupted",
    "Z": "its process is dead and not collected",
    "X": "its process is gone",
}


class Phase(IntEnum):
    """What a rank was doing when it last published progress."""

    UNKNOWN = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    COLLECTIVE = 5
    CHECKPOINT = 6
    EVALUATE = 7
    COMPILE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """How far one rank got in one process group.

    ``name`` is the same on every member, ``ranks`` are its members' global ranks, ascending.
    ``seq`` counts the collectives that the rank entered in this group; ``fingerprint`` digests
    what the last of them was (operation, type, shape, root), 0 when not known, and ``op`` names
    it.  ``inside`` says that the rank has entered it and not come out.
    """

    name: str
    ranks: tuple[int, ...]
    seq: int
    fingerprint: int = 0
    op: str = ""
    inside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """One rank as its node sees it.  None is "not known", never "fine".

    ``step`` counts completed optimizer steps of this process's generation's training run as the
    page reports them; ``collective_seq`` is the default process group's sequence number.
    ``progress_age_ns`` and ``heartbeat_age_ns`` are ages at the moment of the snapshot;
    ``process_state`` is the letter of ``/proc/<pid>/stat`` (``T`` stopped, ``D`` uninterruptible,
    ``Z`` zombie) or ``X`` when the process is gone.  ``phase_limit_ns`` is how long the script
    declared that this phase may last, ``phase_started_age_ns`` how long ago it began.  ``groups``
    are the process groups that the rank is a member of.
    """

    rank: int
    node: str
    local_rank: int
    step: int | None = None
    phase: Phase = Phase.UNKNOWN
    collective_seq: int | None = None
    progress_age_ns: int | None = None
    heartbeat_age_ns: int | None = None
    process_state: str | None = None
    phase_limit_ns: int | None = None
    phase_started_age_ns: int | None = None
    groups: tuple[GroupPosition, ...] = ()


def judge(snapshots: Sequence[RankSnapshot], electorate: Collection[int], stall_ns: int) -> Verdict:
    """Name whoever holds the others up, from one snapshot of every rank.

    ``stall_ns`` is the silence of progress that led to the question.  `Agree` means that every
    rank still makes progress.  Ranks outside the electorate are not looked at.
    """
    members = sorted(set(electorate))
    known = {it.rank: it for it in snapshots if it.rank in members}
    ranks = [known[rank] for rank in members if rank in known]
    absent = tuple(rank for rank in members if rank not in known)
    if not ranks:
        return Inconclusive(why="no rank could be looked at")
    if all(_progresses(it, stall_ns) for it in ranks):
        if not absent:
            return Agree()
        evidence = (Evidence(surface="presence", ranks=absent, detail="no answer"),)
        return Inconclusive(why="every rank that answered makes progress", evidence=evidence)
    positions = _positions(ranks)
    direct = _direct(ranks, absent, positions, stall_ns)
    if direct:
        return _attribute_direct(direct, len(members))
    silent = _silent(ranks, members, stall_ns)
    return silent or _behind(ranks, positions, stall_ns)


_Position = tuple[int, int]


def _progresses(it: RankSnapshot, stall_ns: int) -> bool:
    return it.progress_age_ns is not None and it.progress_age_ns < stall_ns


def _is_stuck(it: RankSnapshot, stall_ns: int) -> bool:
    """A rank that held the others up stopped no later than they did, give or take a step.

    Half of ``stall_ns`` is that allowance: the ages of a hang differ by the length of a step.
    """
    return it.progress_age_ns is None or 2 * it.progress_age_ns >= stall_ns


# --- what the machine says ------------------------------------------------------------------


def _direct(
    ranks: Sequence[RankSnapshot],
    absent: tuple[int, ...],
    positions: Mapping[int, _Position],
    stall_ns: int,
) -> tuple[Evidence, ...]:
    """Return one piece of evidence for each rank that its machine convicts."""
    found = [
        Evidence(surface="process", ranks=(it.rank,), detail=f"{_SEEN[state]}, {_place(it)}")
        for it in ranks
        if (state := it.process_state) in _SEEN
        and state is not None
        and (state != "D" or _may_be_waited_for(it, positions, stall_ns))
    ]
    found += [
        Evidence(surface="presence", ranks=(rank,), detail="its node gave no answer about it")
        for rank in absent
    ]
    return tuple(sorted(found, key=lambda it: it.ranks))


def _may_be_waited_for(it: RankSnapshot, positions: Mapping[int, _Position], stall_ns: int) -> bool:
    """Waiting in the kernel can be a moment of an innocent rank's life: two things clear it."""
    mine = positions.get(it.rank)
    is_ahead = mine is not None and min(positions.values()) < mine
    return _is_stuck(it, stall_ns) and not is_ahead


def _attribute_direct(evidence: tuple[Evidence, ...], members: int) -> Verdict:
    ranks = tuple(rank for it in evidence for rank in it.ranks)
    if 2 * len(ranks) > max(members, 2):
        why = f"{len(ranks)} of {members} ranks stopped or vanished: the cause is common to them"
        return Inconclusive(why=why, evidence=evidence)
    first = evidence[0]
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return Attributed(
        ranks=ranks,
        basis=Basis.DIRECT,
        why=f"rank {first.ranks[0]}: {first.detail}{more}",
        evidence=evidence,
    )


# --- who went silent ------------------------------------------------------------------------


def _silent(
    ranks: Sequence[RankSnapshot], members: Sequence[int], stall_ns: int
) -> Attributed | None:
    """Return who stopped beating while a strict majority beats.

    A rank of which no beat was ever seen is not known to be silent, and is never named for it.
    """
    limit = max(SILENCE_NS_MIN, stall_ns // 2)
    beats = {
        it.rank: "beats"
        for it in ranks
        if it.heartbeat_age_ns is not None and it.heartbeat_age_ns <= limit
    }
    verdict = exact(beats, members, "heartbeat")
    quiet = [
        it
        for it in ranks
        if it.heartbeat_age_ns is not None
        and it.heartbeat_age_ns > limit
        and _is_stuck(it, stall_ns)
    ]
    if not isinstance(verdict, Attributed) or not quiet:
        return None
    evidence = tuple(
        Evidence(
            surface="heartbeat",
            ranks=(it.rank,),
            detail=f"silent for {(it.heartbeat_age_ns or 0) / SECOND:.1f} s, {_place(it)}",
        )
        for it in quiet
    )
    return Attributed(
        ranks=tuple(it.rank for it in quiet),
        basis=Basis.MAJORITY,
        why=f"{len(beats)} of {len(members)} ranks beat, rank {quiet[0].rank} is "
        + evidence[0].detail,
        evidence=evidence,
    )


# --- who is waited for ----------------------------------------------------------------------


def _positions(ranks: Sequence[RankSnapshot]) -> dict[int, _Position]:
    """Return how far each rank got: collectives entered, then steps completed.

    The collective comes first because every rank counts it alike, while a step is counted from
    wherever the rank's script began.  What not every rank tells orders nobody.
    """
    by_collective = all(it.collective_seq is not None for it in ranks)
    by_step = all(it.step is not None for it in ranks)
    if by_collective:
        return {it.rank: (it.collective_seq or 0, (it.step or 0) * by_step) for it in ranks}
    return {it.rank: (0, it.step or 0) for it in ranks} if by_step else {}


def _behind(
    ranks: Sequence[RankSnapshot], positions: Mapping[int, _Position], stall_ns: int
) -> Attributed | Inconclusive:
    """Return who has not entered what the others wait in.

    A rank inside a collective waits for every member that has not entered it, so the ranks at
    the lowest position wait for nobody.  This is causal evidence and needs no majority, but a
    lowest position that half of the ranks share says only that the job split.
    """
    evidence = tuple(
        Evidence(surface="position", ranks=(it.rank,), detail=_place(it)) for it in ranks
    )
    if not positions:
        untold = ", ".join(str(it.rank) for it in ranks if it.collective_seq is None)
        why = f"the position of some ranks is unknown ({untold})"
        return Inconclusive(why=why, evidence=evidence)
    lowest = min(positions.values())
    last = [it for it in ranks if positions[it.rank] == lowest]
    if len(last) == len(ranks):
        why = f"every rank stopped at the same position ({_place(ranks[0])})"
        return Inconclusive(why=why, evidence=evidence)
    if len(last) > 1 and 2 * len(last) >= len(ranks):
        why = f"{len(last)} of {len(ranks)} ranks share the lowest position ({_place(last[0])})"
        return Inconclusive(why=why, evidence=evidence)
    moving = [it.rank for it in last if not _is_stuck(it, stall_ns)]
    if moving:
        why = f"rank {moving[0]} is behind the others but still makes progress"
        return Inconclusive(why=why, evidence=evidence)
    ahead = next(it for it in ranks if positions[it.rank] != lowest)
    named = ", ".join(str(it.rank) for it in last)
    return Attributed(
        ranks=tuple(it.rank for it in last),
        basis=Basis.CAUSAL,
        why=f"the others wait for rank {named}: it is at {_place(last[0])}, "
        f"rank {ahead.rank} at {_place(ahead)}",
        evidence=evidence,
    )


def _place(it: RankSnapshot) -> str:
    """Say where a rank stopped, in words."""
    step = "no step yet" if it.step is None else f"step {it.step}"
    collective = "" if it.collective_seq is None else f", collective {it.collective_seq}"
    phase = "" if it.phase is Phase.UNKNOWN else f", last seen in {it.phase.name.lower()}"
    return step + collective + phase
