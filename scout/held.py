"""A process that is held: stopped by a signal, or asleep in the kernel, while its peers wait.

Such a sign is worth a verdict within seconds, long before anybody's limit is over, where three
things are true at once: it has lasted, somebody waits for that rank, and it is no stop that
somebody meant.  A debugger's stop has a letter of its own and is none, a frozen control group is
told apart by its reader, and a sleep counts only while it is one and the same sleep.

`HeldWatch` turns looks at a process into the time that it has been held; `judge_held` names the
rank.  This module knows letters, counts and instants.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from scout.clock import SECOND, Instant, since
from scout.snapshot import GroupPosition, Phase, RankSnapshot, place
from scout.verdict import Attributed, Basis, Evidence
from scout.wait_for import waits_in

STOPPED: Final = "T"
ASLEEP: Final = "D"

STOPPED_NS_MIN: Final = 2 * SECOND
"""A profiler or a snapshot of a process stops it for a fraction of a second."""
ASLEEP_NS_MIN: Final = 5 * SECOND
"""One uninterrupted sleep in the kernel: a disk that retries takes a second or two."""
WAITED_NS_MIN: Final = SECOND
"""Silence of a peer before it counts as waiting: most steps and all collectives are shorter."""
UNUSUAL: Final = 2
"""Silence beyond so many times the longest one remembered is unusual for a rank."""
SHOWN_MAX: Final = 8
"""Peers that are written down as waiting."""

_MAY_SLEEP: Final = frozenset({Phase.UNKNOWN, Phase.DATA, Phase.CHECKPOINT})
"""Phases in which a file server may take its time: only the rank's limit ends those."""


@dataclass(slots=True)
class HeldWatch:
    """One process.  Show it every look, in order."""

    _what: tuple[str, int] | None = None
    _since: Instant | None = None

    def observe(self, state: str | None, sleeps: int | None, now: Instant) -> int | None:
        """Return for how many nanoseconds the process has been held, None when it is not.

        ``state`` is the letter of ``/proc/<pid>/stat``.  ``sleeps`` counts how often the process
        went to sleep: while the number stands still, it is one sleep.  None is not known, or a
        sleep that somebody ordered, and holds nobody.
        """
        what: tuple[str, int] | None = None
        if state == STOPPED:
            what = (STOPPED, 0)
        elif state == ASLEEP and sleeps is not None:
            what = (ASLEEP, sleeps)
        if self._since is None or what != self._what:
            self._what, self._since = what, now
        return None if what is None else since(self._since, now)


def is_held(it: RankSnapshot) -> bool:
    """Return whether a process has been held for long enough to ask whether somebody waits."""
    if it.held_ns is None or it.held_ns < STOPPED_NS_MIN:
        return False
    if it.process_state == STOPPED:
        return True
    may_sleep = it.phase in _MAY_SLEEP or it.phase_limit_ns is not None
    return it.process_state == ASLEEP and it.held_ns >= ASLEEP_NS_MIN and not may_sleep


def judge_held(ranks: Sequence[RankSnapshot], electorate: Collection[int]) -> Attributed | None:
    """Name the ranks whose processes are held and that others wait for.

    None where there are none, or where half of the job is held: that is somebody's intention, or
    a cause that they share, and has the time of a limit.
    """
    held = [it for it in ranks if it.rank in electorate and is_held(it)]
    waiting = {it.rank: [peer for peer in ranks if _waits_for(peer, it)] for it in held}
    found = [it for it in held if waiting[it.rank]]
    if not found or 2 * len(held) > max(len(set(electorate)), 2):
        return None
    shown = {peer.rank: peer for it in found for peer in waiting[it.rank]}
    evidence = tuple(
        Evidence(surface="process", ranks=(it.rank,), detail=f"{_how(it)}, {place(it)}")
        for it in found
    )
    return Attributed(
        ranks=tuple(sorted(it.rank for it in found)),
        basis=Basis.DIRECT,
        why=f"rank {found[0].rank}: {evidence[0].detail}; rank {min(shown)} waits for it",
        evidence=evidence
        + tuple(
            Evidence(surface="wait", ranks=(rank,), detail=_since(shown[rank]))
            for rank in sorted(shown)[:SHOWN_MAX]
        ),
    )


def _how(it: RankSnapshot) -> str:
    for_s = f"for {(it.held_ns or 0) / SECOND:.1f} s"
    if it.process_state == STOPPED:
        return f"its process has been stopped by a signal {for_s}"
    return f"its process has been in one sleep in the kernel {for_s}"


def _since(peer: RankSnapshot) -> str:
    return f"it has waited for {(peer.progress_age_ns or 0) / SECOND:.1f} s, {place(peer)}"


def _waits_for(peer: RankSnapshot, held: RankSnapshot) -> bool:
    """Return whether a peer has stood still for as long as somebody who waits does.

    It is inside a collective that the held rank has not left behind, or has gone beyond it in a
    group of both, or is silent for longer than it ever was.
    """
    age = peer.progress_age_ns
    if age is None or age < WAITED_NS_MIN or peer.held_ns is not None or peer is held:
        return False
    common = [it for it in waits_in(peer) if held.rank in it.ranks]
    if any(_is_met(it, held) for it in common):
        return True
    longest = peer.usual_silence_ns
    return longest is not None and age > UNUSUAL * longest and bool(common or not peer.groups)


def _is_met(position: GroupPosition, held: RankSnapshot) -> bool:
    theirs = [it for it in held.groups if (it.name, it.ranks) == (position.name, position.ranks)]
    return any(it.seq < position.seq + position.inside for it in theirs)
