"""Which ranks stand at the same place in the code, and which stand apart.

Decides what counts as the same place (every frame of the main thread, by function, file and
line), the order in which groups are worth reading, and how much of a stack is kept.  It refuses
to say who is guilty: the verdict is a reason to look at a group first, never the other way round.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from coordinator.incidents import StackGroup
from coordinator.wording import one_line
from sidecar.rank_evidence import RankEvidence

GROUPS_MAX: Final = 12
"""Groups kept: with more, nobody stands out by where it is."""
FRAMES_MAX: Final = 40
"""Innermost frames kept of a group."""
FRAME_CHARS_MAX: Final = 200


def group_stacks(
    evidence: Mapping[str, RankEvidence], named: Collection[int] = ()
) -> tuple[StackGroup, ...]:
    """Return the ranks of ``evidence`` by where their main threads stood, the odd ones first.

    Groups with a rank of ``named`` (the verdict's) come before others, small before large.  A
    group is odd when a strict majority stands elsewhere together, or when it holds a named rank
    and is not the only one.  Ranks without a stack are in no group.
    """
    places: dict[tuple[str, ...], list[int]] = {}
    for rank, frames in _main_stacks(evidence):
        places.setdefault(frames, []).append(rank)
    total = sum(len(ranks) for ranks in places.values())
    has_majority = any(2 * len(ranks) > total for ranks in places.values())
    suspects = frozenset(named)

    def odd(ranks: list[int]) -> bool:
        if len(places) == 1:
            return False
        minority = has_majority and 2 * len(ranks) < total
        return minority or not suspects.isdisjoint(ranks)

    found = [(frames, sorted(ranks)) for frames, ranks in places.items()]
    found.sort(key=lambda it: (suspects.isdisjoint(it[1]), len(it[1]), it[1]))
    if len(found) > GROUPS_MAX:  # the largest says where everybody should be
        found = [*found[: GROUPS_MAX - 1], found[-1]]
    return tuple(
        StackGroup(ranks=tuple(ranks), frames=_kept(frames), odd=odd(ranks))
        for frames, ranks in found
    )


def _main_stacks(evidence: Mapping[str, RankEvidence]) -> Iterable[tuple[int, tuple[str, ...]]]:
    for rank, seen in evidence.items():
        main = next((it for it in seen.threads if it.main), None)
        if main is not None and main.frames and rank.isdecimal():
            yield int(rank), main.frames


def _kept(frames: tuple[str, ...]) -> tuple[str, ...]:
    shown = tuple(one_line(frame, FRAME_CHARS_MAX) for frame in frames[:FRAMES_MAX])
    more = len(frames) - FRAMES_MAX
    return shown if more <= 0 else (*shown, f"... and {more} outer frames")
