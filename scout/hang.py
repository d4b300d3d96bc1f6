"""Who holds everybody up?  The pure judgement over one snapshot of every rank.

Input is what each node could see of its ranks from outside the training thread; output is a
`Verdict`.  It knows nothing of sockets, restarts or time-outs: whoever calls it has already
decided that progress stopped.
"""

from dataclasses import dataclass
from enum import IntEnum


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
class RankSnapshot:
    """One rank as its node sees it.  None is "not known", never "fine".

    ``step`` counts completed optimizer steps of this process's generation's training run as the
    page reports them; ``collective_seq`` is the default process group's sequence number.
    ``progress_age_ns`` and ``heartbeat_age_ns`` are ages at the moment of the snapshot;
    ``process_state`` is the letter of ``/proc/<pid>/stat`` (``T`` stopped, ``D`` uninterruptible,
    ``Z`` zombie) or ``X`` when the process is gone.
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
