"""Collectives that should be the same and are not: who is in the minority.

Members of one group that stand at the same count must be in the same operation, with the same
type, shape and root.  This is symmetric evidence: the dissenters are named where a strict
majority of the whole group is in one and the same collective, and nobody is named otherwise.
Members that stand elsewhere, or whose collective is not known, count in the electorate and are
never named here.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from scout.snapshot import GroupPosition, RankSnapshot
from scout.verdict import Attributed, Basis, Evidence, Inconclusive

_Camps: TypeAlias = dict[int, list[tuple[int, GroupPosition]]]
"""Fingerprint -> the ranks that told it, with their positions."""


def desync(blocked: Iterable[RankSnapshot]) -> Attributed | Inconclusive | None:
    """Compare what ``blocked`` ranks are inside of; None when nothing differs."""
    unlike = [camps for camps in _meetings(blocked) if len(camps) > 1]
    if not unlike:
        return None
    minorities = [(camps, minority) for camps in unlike if (minority := _minority(camps))]
    if not minorities:
        return Inconclusive(
            why=f"{_say(unlike[0])}, and no strict majority of the group agrees",
            evidence=tuple(item for camps in unlike for item in _evidence(camps)),
        )
    ranks = tuple(sorted({rank for _, minority in minorities for rank in minority}))
    return Attributed(
        ranks=ranks,
        basis=Basis.MAJORITY,
        why=f"{_say(minorities[0][0])}: the majority of the group is in the first",
        evidence=tuple(item for camps, _ in minorities for item in _evidence(camps)),
    )


def _meetings(blocked: Iterable[RankSnapshot]) -> Sequence[_Camps]:
    """Return, for each group and count, who is in which collective."""
    met: dict[tuple[str, tuple[int, ...], int], _Camps] = defaultdict(lambda: defaultdict(list))
    for it in blocked:
        for group in it.groups:
            if group.fingerprint and it.rank in group.ranks:
                camps = met[group.name, group.ranks, group.seq]
                camps[group.fingerprint].append((it.rank, group))
    return [met[key] for key in sorted(met)]


def _largest_first(camps: _Camps) -> list[list[tuple[int, GroupPosition]]]:
    return sorted(camps.values(), key=lambda camp: (-len(camp), camp[0][0]))


def _minority(camps: _Camps) -> tuple[int, ...]:
    """Return who is not with the strict majority, or nobody when there is none."""
    largest, *others = _largest_first(camps)
    electorate = largest[0][1].ranks
    if 2 * len(largest) <= len(electorate):
        return ()
    return tuple(rank for camp in others for rank, _ in camp)


def _say(camps: _Camps) -> str:
    largest, *others = _largest_first(camps)
    position = largest[0][1]
    first = ", ".join(f"{rank}" for rank, _ in largest[:8])
    second = ", ".join(f"{rank}" for camp in others for rank, _ in camp[:8])
    more = f" and {len(largest) - 8} more" if len(largest) > 8 else ""  # noqa: PLR2004 - as shown
    names = _what(position, others[0][0][1])
    return (
        f"at collective {position.seq} of group {position.name} ranks {first}{more} are in "
        f"{names[0]}, rank {second} in {names[1]}"
    )


def _what(one: GroupPosition, other: GroupPosition) -> tuple[str, str]:
    """Name two collectives so that they can be told apart."""
    if one.op and other.op and one.op != other.op:
        return one.op, other.op
    op = one.op or "a collective"
    return op, f"{other.op or 'one'} of another kind, type or shape"


def _evidence(camps: _Camps) -> list[Evidence]:
    return [
        Evidence(
            surface="collective",
            ranks=tuple(sorted(rank for rank, _ in camp)),
            detail=f"collective {camp[0][1].seq} of group {camp[0][1].name}: "
            f"{camp[0][1].op or 'unnamed'}, fingerprint {camp[0][1].fingerprint:016x}",
        )
        for camp in _largest_first(camps)
    ]
