"""How well a node fits a gap: near those its ranks talk to, apart from those who must outlive it.

Rank labels (``tp``, ``pp``, ``dp``, ``cp``, ``ep`` and free ones) say who talks to whom; node
labels (``nvswitch_domain``, ``switch``, ``rack``) say what is near.  Tensor-parallel peers exchange
every layer and weigh most, pipeline neighbours every micro-batch, data-parallel replicas only must
not share what fails together.  What carries no label counts neither for nor against a node.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.wording import rank_list

DOMAIN: Final = "nvswitch_domain"
SWITCH: Final = "switch"
RACK: Final = "rack"
NEARNESS: Final = (DOMAIN, SWITCH, RACK)
"""From the nearest to the farthest; a node apart in all three is as far as can be."""

TENSOR_WEIGHT: Final = 100.0
PIPELINE_WEIGHT: Final = 10.0
REPLICA_WEIGHT: Final = 1.0
OFFENDER_WEIGHT: Final = 20.0
"""A strike weighs as much as two steps of distance to a pipeline neighbour."""

PRIORITY: Final = "priority"
"""Node label: of spares that fit alike, the one with the highest number is taken."""

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """``cost`` is lower for a better fit; ``why`` is one clause, empty where nothing is known."""

    cost: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Labels of ranks and nodes.  ``nproc`` is the number of workers of a node."""

    ranks: Mapping[int, Labels]
    nodes: Mapping[str, Labels]
    nproc: int

    def fit(self, group_rank: int, node: str, world: Sequence[str | None]) -> Fit:
        """Say how ``node`` fits ``group_rank``; ``world`` holds the nodes, None for gaps."""
        if not self.ranks:
            return Fit()
        mine = range(group_rank * self.nproc, (group_rank + 1) * self.nproc)
        others = {
            rank: there
            for group, there in enumerate(world)
            if group != group_rank and there is not None
            for rank in range(group * self.nproc, (group + 1) * self.nproc)
        }
        parts = [
            self._tensor(mine, others, node),
            self._pipeline(mine, others, node),
            self._replicas(mine, others, node),
        ]
        why = "; ".join(part.why for part in parts if part.why)
        return Fit(cost=sum(part.cost for part in parts), why=why)

    def priority(self, node: str) -> int:
        """Return the node's priority among spares."""
        text = self.nodes.get(node, {}).get(PRIORITY, "0")
        return int(text) if text.lstrip("-").isdecimal() and len(text) < 10 else 0  # noqa: PLR2004

    def _tensor(self, mine: Sequence[int], others: Mapping[int, str], node: str) -> Fit:
        peers = self._related(mine, others, "tp", lambda a, b: a != b)
        known = [(rank, self._shares(node, others[rank], DOMAIN)) for rank in peers]
        inside = [rank for rank, same in known if same]
        outside = [rank for rank, same in known if same is False]
        if outside:
            why = f"outside the NVSwitch domain of its tensor-parallel peers ({rank_list(outside)})"
        else:
            why = "in the NVSwitch domain of its tensor-parallel peers" if inside else ""
        return Fit(cost=TENSOR_WEIGHT * len(outside), why=why)

    def _pipeline(self, mine: Sequence[int], others: Mapping[int, str], node: str) -> Fit:
        def adjacent(a: str, b: str) -> bool:
            return a.isdecimal() and b.isdecimal() and abs(int(a) - int(b)) == 1

        beside = self._related(mine, others, "pp", adjacent)
        far = {rank: self._distance(node, others[rank]) for rank in beside}
        known = {rank: steps for rank, steps in far.items() if steps is not None}
        if not known:
            return Fit()
        worst = max(known.values())
        place = ("NVSwitch domain", "switch", "rack")[worst] if worst < len(NEARNESS) else ""
        shared = f"in the {place} of" if place else "in another rack than"
        why = f"{shared} its pipeline neighbours ({rank_list(known)})"
        return Fit(cost=PIPELINE_WEIGHT * sum(known.values()), why=why)

    def _replicas(self, mine: Sequence[int], others: Mapping[int, str], node: str) -> Fit:
        replicas = self._related(mine, others, "dp", lambda a, b: a != b)
        known = [(rank, self._shares(node, others[rank], RACK)) for rank in replicas]
        together = [rank for rank, same in known if same]
        if not any(same is not None for _, same in known):
            return Fit()
        why = (
            f"its rack holds {len(together)} of {len(known)} other data-parallel replicas' ranks"
            if together
            else "in no rack of its data-parallel replicas"
        )
        return Fit(cost=REPLICA_WEIGHT * len(together), why=why)

    def _related(
        self,
        mine: Sequence[int],
        others: Mapping[int, str],
        label: str,
        differs: Callable[[str, str], bool],
    ) -> list[int]:
        """Return the other ranks that are like one of mine but in ``label``."""
        found: set[int] = set()
        for rank, _ in self._labelled(mine, label):
            own = self.ranks[rank]
            rest = {key: value for key, value in own.items() if key != label}
            for other, labels in self._labelled(tuple(others), label):
                like = {key: value for key, value in labels.items() if key != label} == rest
                if like and differs(own[label], labels[label]):
                    found.add(other)
        return sorted(found)

    def _labelled(self, ranks: Sequence[int], label: str) -> Iterator[tuple[int, Labels]]:
        for rank in ranks:
            labels = self.ranks.get(rank, {})
            if label in labels:
                yield rank, labels

    def _shares(self, one: str, other: str, label: str) -> bool | None:
        a = self.nodes.get(one, {}).get(label)
        b = self.nodes.get(other, {}).get(label)
        return None if a is None or b is None else a == b

    def _distance(self, one: str, other: str) -> int | None:
        """Return 0 to 3, or None where the two have no label in common."""
        known = [(step, self._shares(one, other, name)) for step, name in enumerate(NEARNESS)]
        near = next((step for step, same in known if same), None)
        if near is not None:
            return near
        return len(NEARNESS) if any(same is False for _, same in known) else None


NO_TOPOLOGY: Final = Topology(ranks={}, nodes={}, nproc=1)
