"""Who waits for whom, over all process groups at once.

A rank inside a collective waits for every member that has not entered it.  Followed to its end,
waiting leads to ranks that wait for nobody (roots) or in a circle.  This module finds both; who
of the roots is guilty is for its caller.

The graph of a thousand ranks has millions of edges, so ranks of one group that have the same
count share a node: "whoever is at this count waits for everybody below".
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from scout.page_layout import GROUPS_MAX, PAIRS_MAX
from scout.snapshot import GroupPosition, RankSnapshot

GroupKey: TypeAlias = tuple[str, tuple[int, ...]]
"""A name alone may be used twice, by groups that share no member."""
_SENDS: Final = frozenset({"send", "isend"})
MESSAGES: Final = _SENDS | {"recv", "irecv"}
"""Operations between two ranks: the pair is made with its first message, on each end by itself."""
_Node: TypeAlias = Hashable
"""A rank (int), or a (group, count) that stands for everybody at that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """``waiter`` waits for the ranks that have not entered ``position`` of its group."""

    waiter: int
    position: GroupPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFor:
    """Where waiting leads.

    ``roots`` are waited for and wait for nobody; ``waited_for`` holds, for each rank that others
    wait for at first hand, one such wait, in the smallest group that shows one.  ``cycle`` is a
    circle of ranks from which no root is reached, each waiting for the next, empty when there is
    none.
    """

    roots: tuple[int, ...]
    cycle: tuple[int, ...]
    waiters: frozenset[int]
    waited_for: Mapping[int, Waiting]


def wait_for(ranks: Sequence[RankSnapshot], moving: Collection[int]) -> WaitFor:
    """Build and follow the graph.  Ranks in ``moving`` make progress: they wait for nobody."""
    graph = _Graph()
    groups = _by_group(ranks)
    for key in sorted(groups, key=lambda key: (len(key[1]), key)):
        _add_group(graph, key, groups[key], moving)
    waiters = {node for node in graph.after if isinstance(node, int)}
    reached = {node for node in _reached(graph.after, waiters) if isinstance(node, int)}
    roots = tuple(sorted(reached - waiters))
    lost = sorted(waiters - _leads_to(graph, roots))
    return WaitFor(
        roots=roots,
        cycle=_circle(graph, lost[0]) if lost else (),
        waiters=frozenset(waiters),
        waited_for=graph.first_wait,
    )


def waits_in(it: RankSnapshot) -> tuple[GroupPosition, ...]:
    """Return the positions in which a rank may be waiting.

    A rank that says which collective it is inside waits there and nowhere else; one that does
    not say may wait in any of its groups.  A message that was sent and not yet received is no
    wait of the sender's, unless it says so.
    """
    inside = tuple(group for group in it.groups if group.inside)
    return inside or tuple(group for group in it.groups if group.op not in _SENDS)


@dataclass(slots=True)
class _Graph:
    after: dict[_Node, set[_Node]] = field(default_factory=lambda: defaultdict(set))
    first_wait: dict[int, Waiting] = field(default_factory=dict)


_Member: TypeAlias = tuple[RankSnapshot, GroupPosition]


def _by_group(ranks: Iterable[RankSnapshot]) -> dict[GroupKey, list[_Member]]:
    found: dict[GroupKey, list[_Member]] = defaultdict(list)
    for it in ranks:
        for group in it.groups:
            if it.rank in group.ranks:
                found[group.name, group.ranks].append((it, group))
    by_rank = {it.rank: it for it in ranks}
    for (name, pair), members in found.items():
        if len(members) == 1 and members[0][1].op in MESSAGES:
            other = by_rank.get(pair[0] if pair[1] == members[0][0].rank else pair[1])
            if other is not None and _tells_every_pair(other):
                nothing = GroupPosition(name=name, ranks=pair, seq=0, op="send")
                members.append((other, nothing))
    return found


def _tells_every_pair(it: RankSnapshot) -> bool:
    """Return whether a pair that a rank does not tell of is one that it has no message of yet."""
    pairs = sum(group.op in MESSAGES for group in it.groups)
    return 0 < len(it.groups) < GROUPS_MAX and pairs < PAIRS_MAX


def _add_group(
    graph: _Graph, key: GroupKey, members: Sequence[_Member], moving: Collection[int]
) -> None:
    """Let every waiting member wait for the members whose count is lower."""
    by_count: dict[int, list[_Member]] = defaultdict(list)
    for member in members:
        by_count[member[1].seq].append(member)
    below: int | None = None
    late: list[int] = []
    unexplained: list[int] = []
    for count in sorted(by_count):
        if below is not None:
            graph.after[key, count].update(late)
            graph.after[key, count].add((key, below))
            for it, position in by_count[count]:
                if it.rank not in moving and position in waits_in(it):
                    graph.after[it.rank].add((key, count))
                    wait = Waiting(waiter=it.rank, position=position)
                    graph.first_wait.update(
                        (rank, wait) for rank in unexplained if rank not in graph.first_wait
                    )
                    unexplained.clear()
        below, late = count, [it.rank for it, _ in by_count[count]]
        unexplained += late


def _leads_to(graph: _Graph, roots: Iterable[int]) -> set[_Node]:
    """Return every node from which one of ``roots`` is reached."""
    before: dict[_Node, set[_Node]] = defaultdict(set)
    for node, ends in graph.after.items():
        for end in ends:
            before[end].add(node)
    return _reached(before, roots)


def _reached(edges: Mapping[_Node, set[_Node]], start: Iterable[_Node]) -> set[_Node]:
    """Return ``start`` and everything that ``edges`` lead to from there."""
    found: set[_Node] = set(start)
    front = list(found)
    while front:
        for node in edges.get(front.pop(), set()) - found:
            found.add(node)
            front.append(node)
    return found


def _circle(graph: _Graph, start: int) -> tuple[int, ...]:
    """Follow waiting from ``start``, which reaches no root, until a rank comes again."""
    path: list[int] = []
    at = start
    while at not in path:
        path.append(at)
        at = _next_rank(graph, at)
    circle = path[path.index(at) :]
    turn = circle.index(min(circle))
    return tuple(circle[turn:] + circle[:turn])


def _next_rank(graph: _Graph, rank: int) -> int:
    """Return the lowest rank that ``rank`` waits for."""
    shared = {node: ends for node, ends in graph.after.items() if not isinstance(node, int)}
    ends = _reached(shared, graph.after[rank])
    return min(node for node in ends if isinstance(node, int))
