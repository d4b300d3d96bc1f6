"""Rank assignment over any history of nodes that join, break and come back."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.journal_format import DurableState
from coordinator.memory import Memory
from coordinator.rank_assignment import Assignment, NotPossible, assign

NNODES = 3
NODES = [f"node-{number}" for number in range(6)]


class RankMachine(RuleBasedStateMachine):
    """A job and its fleet; every restart gives the ranks out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(DurableState(job="j"))
        self.alive: set[str] = set()
        self.spares: set[str] = set()
        self.worlds: dict[int, tuple[str, ...]] = {}
        """Topology version -> the world that was given out under it."""

    @rule(node=st.sampled_from(NODES), spare=st.booleans())
    def join(self, node: str, spare: bool) -> None:
        """A node dials in, as a spare or not."""
        self.alive.add(node)
        (self.spares.add if spare else self.spares.discard)(node)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A node breaks."""
        self.alive.remove(data.draw(st.sampled_from(sorted(self.alive))))

    @rule()
    def restart(self) -> None:
        """Give out the ranks."""
        before = self.memory.state.world
        spares = self.alive & self.spares
        given = assign(before, sorted(self.alive - spares), sorted(spares), NNODES)
        if len(self.alive) < NNODES:
            assert isinstance(given, NotPossible)
            return
        assert isinstance(given, Assignment)
        stay = [rank for rank, node in enumerate(before) if node in self.alive]
        assert all(given.world[rank] == before[rank] for rank in stay), "survivors keep their ranks"
        moved = {move.group_rank for move in given.moves}
        assert moved == set(range(len(before))) - set(stay), "and nobody else moves"
        assert set(given.world) <= self.alive
        self.memory.world_given(given.world, given.world, now_ns=1)
        version = self.memory.state.topology_version
        assert self.worlds.setdefault(version, given.world) == given.world, "one world a version"
        assert version == max(self.worlds), "versions only grow"

    @invariant()
    def no_rank_stands_twice_and_none_is_missing(self) -> None:
        """Group ranks are whole: those of a node's workers follow from its own."""
        for world in self.worlds.values():
            assert len(set(world)) == len(world) == NNODES


TestRankMachine = RankMachine.TestCase
