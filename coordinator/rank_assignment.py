"""Which node holds which group rank after a change of the fleet.

Survivors keep their ranks, so that the fewest ranks move and checkpoints shard where they were.
It knows node names only: whether a node is fit is decided before it is named here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from coordinator.incidents import RankMove
from coordinator.topology import NO_TOPOLOGY, OFFENDER_WEIGHT, Topology
from coordinator.wording import natural_key

_NOTHING_KNOWN: Final[Mapping[str, str]] = MappingProxyType({})

_NOTHING_AGAINST: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """``world`` holds the node of each group rank; ``moves`` the ranks that changed hands."""

    world: tuple[str, ...]
    moves: tuple[RankMove, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPossible:
    """There are too few nodes, and how many are missing."""

    reason: str


AssignmentResult: TypeAlias = Assignment | NotPossible


def assign(
    previous: Sequence[str],
    available: Sequence[str],
    spares: Sequence[str],
    nnodes: int,
    *,
    unusable: Mapping[str, str] = _NOTHING_KNOWN,
    penalties: Mapping[str, float] = _NOTHING_AGAINST,
    topology: Topology = NO_TOPOLOGY,
) -> AssignmentResult:
    """Give ``nnodes`` group ranks to nodes.

    ``previous`` is the node of each group rank before, empty at the first start.  ``available``
    and ``spares`` are the nodes that may be used now; a node named in both counts as a spare.
    A spare that already holds a rank is a survivor like any other.  ``unusable`` says why a
    node of ``previous`` is gone; it goes into the reason of the move,
    and its nodes into that of a shortage.  ``penalties`` says how much speaks against a node: of
    those that may fill a gap, the one with the least does.  ``topology`` says which fits where.
    """
    assert nnodes > 0, "a job has at least one node"
    assert len(set(previous)) == len(previous), "no node holds two group ranks"
    usable = set(available) | set(spares)
    if len(usable) < nnodes:
        return NotPossible(reason=_shortage(usable, nnodes, unusable))
    gaps: list[str | None] = [node if node in usable else None for node in previous[:nnodes]]
    gaps += [None] * (nnodes - len(gaps))
    classes = _fillers(previous, available, spares, nnodes)
    reasons: dict[int, str] = {}
    general = sorted(classes, key=_order(None, classes, gaps, topology, penalties))
    for group_rank, holder in enumerate(gaps):
        if holder is not None:
            continue
        if topology.ranks:
            best = min(general, key=_order(group_rank, classes, gaps, topology, penalties))
            reasons[group_rank] = topology.fit(group_rank, best, gaps).why
        else:  # one order for all gaps: a first start has thousands of them
            best = general[0]
        general.remove(best)
        gaps[group_rank] = best
    world = tuple(node for node in gaps if node is not None)
    spare_names = set(spares)
    moves = tuple(
        RankMove(
            group_rank=rank,
            from_node=before,
            to_node=after,
            reason=_why(before, after, spare=after in spare_names, unusable=unusable)
            + (f": {reasons[rank]}" if reasons.get(rank) else ""),
        )
        for rank, (before, after) in enumerate(zip(previous, world, strict=False))
        if before != after
    )
    return Assignment(world=world, moves=moves)


def _order(
    group_rank: int | None,
    classes: Mapping[str, int],
    world: Sequence[str | None],
    topology: Topology,
    penalties: Mapping[str, float],
) -> Callable[[str], tuple[float, int, int, object]]:
    """Return what orders nodes for a gap, or for any gap, the best first.

    What it is near to and what speaks against it decide first, then whether it is warm, of the
    job or a spare, then a spare's priority, then its name.
    """

    def order(node: str) -> tuple[float, int, int, object]:
        cost = 0.0 if group_rank is None else topology.fit(group_rank, node, world).cost
        cost += OFFENDER_WEIGHT * penalties.get(node, 0.0)
        return cost, classes[node], -topology.priority(node), natural_key(node)

    return order


def _fillers(
    previous: Sequence[str], available: Sequence[str], spares: Sequence[str], nnodes: int
) -> dict[str, int]:
    """Return the nodes that may fill gaps, each with its class, the best being 0.

    When the job shrinks, nodes that held a rank beyond the new size come first: they are warm.
    """
    spare_names, holders = set(spares), set(previous)
    usable = set(available) | spare_names
    displaced = {node: index for index, node in enumerate(previous[nnodes:]) if node in usable}
    fresh = dict.fromkeys((set(available) - spare_names) - holders, len(previous))
    idle = dict.fromkeys(spare_names - holders, len(previous) + 1)
    return {**displaced, **fresh, **idle}


def _shortage(usable: set[str], nnodes: int, excluded: Mapping[str, str]) -> str:
    names = ", ".join(sorted(usable, key=natural_key)) or "none"
    missing = nnodes - len(usable)
    verb = "is" if missing == 1 else "are"
    out = ", ".join(sorted(excluded, key=natural_key))
    hint = f"; excluded: {out}, which `outrider include NODE` takes back" if out else ""
    noun = "node" if nnodes == 1 else "nodes"
    return f"the job needs {nnodes} {noun} and {missing} {verb} missing (usable: {names}{hint})"


def _why(before: str, after: str, *, spare: bool, unusable: Mapping[str, str]) -> str:
    gone = unusable.get(before, "it is not available")
    role = "spare" if spare else "node"
    return f"{before} lost its rank ({gone}), {role} {after} takes it"
