"""One rank as its node sees it, and what its ages mean.

Vocabulary of every judgement over a hang: phases, group positions, snapshots, and the one
definition of "overdue" that the node's own watch and the judgement share.  It judges nobody.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from scout.clock import SECOND

SLACK_NS_MAX: Final = 2 * SECOND
"""Whoever held the others up stopped no later than they did, give or take a step."""

OUTSIDE_PYTHON: Final = "issued outside Python"
"""The ``op`` of a collective that C++ issued, as DDP's reducer and FSDP do."""


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

    A point-to-point channel is a group of two with a name of its own for each direction: both
    ends count the messages, and ``op`` is "send" on one end and "recv" on the other.
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

    ``held_ns`` is for how long the process has been stopped by a signal or in one and the same
    uninterruptible sleep, None while it is not; ``usual_silence_ns`` is the longest silence that
    is remembered of this rank in this phase, once the phase has been seen often enough.

    ``stall_limit_ns`` is the silence after which this rank counts as stalled, where its node knows
    better than the job's one number.  ``seen_age_ns`` is set on a snapshot that is only a memory:
    the rank gave no answer this time, and was last seen so long ago.
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
    stall_limit_ns: int | None = None
    held_ns: int | None = None
    usual_silence_ns: int | None = None
    seen_age_ns: int | None = None


def limit_ns(it: RankSnapshot, stall_ns: int) -> int:
    """Return the silence after which ``it`` counts as stalled; ``stall_ns`` is the job's."""
    return stall_ns if it.stall_limit_ns is None else it.stall_limit_ns


def is_overdue(it: RankSnapshot, stall_ns: int, slack_ns: int = 0) -> bool:
    """Return whether a rank has been silent for its limit, ``slack_ns`` forgiven.

    A limit that the script declared for its phase takes the place of any other; a phase that
    outlasts it and still publishes is slow, not stalled.  A rank of which no progress is known
    is taken for overdue: nothing speaks for it.
    """
    age = it.progress_age_ns
    if age is None:
        return True
    limit = limit_ns(it, stall_ns)
    if it.phase_limit_ns is None:
        return age >= limit - slack_ns
    in_phase = age if it.phase_started_age_ns is None else it.phase_started_age_ns
    return in_phase >= it.phase_limit_ns and age >= min(limit, it.phase_limit_ns)


def is_stuck(it: RankSnapshot, stall_ns: int) -> bool:
    """Return whether a rank may be what holds up ranks that are overdue already.

    The ages of a hang differ by about a step between the rank that stopped and those that wait
    for it, so a quarter of the limit, at most `SLACK_NS_MAX`, is forgiven.
    """
    return is_overdue(it, stall_ns, min(limit_ns(it, stall_ns) // 4, SLACK_NS_MAX))


_DOING: Final = {
    Phase.DATA: "fetching data",
    Phase.CHECKPOINT: "in checkpoint I/O",
    Phase.EVALUATE: "evaluating",
    Phase.COMPILE: "compiling",
}


def doing(phase: Phase) -> str:
    """Return a phase in words that fit behind "is"."""
    return _DOING.get(phase, f"in {phase.name.lower()}")


def collective(at: GroupPosition) -> str:
    """Name the collective of a position."""
    plain = at.op if at.op and at.op != OUTSIDE_PYTHON else "collective"
    return f"{plain} {at.seq} of group {at.name}"


def place(it: RankSnapshot) -> str:
    """Say where a rank stopped, in words."""
    step = "no step yet" if it.step is None else f"step {it.step}"
    inside = [group for group in it.groups if group.inside]
    if inside:
        entered = f", inside {collective(inside[0])}"
    else:
        entered = "" if it.collective_seq is None else f", collective {it.collective_seq}"
    phase = "" if it.phase is Phase.UNKNOWN else f", last seen in {it.phase.name.lower()}"
    return step + entered + phase
