"""Cores with a part broken on purpose: the checkers notice."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator import checkpoint_step, culprit, escalation, memory, passes
from coordinator.escalation import RestartPolicy
from coordinator.events import Effect, Persist
from scout.clock import Instant
from sidecar import agent
from sidecar.api import AgentState, Start, StatusReport
from tests.simulation import cluster, node
from tests.simulation.checkers import NAMES, BrokenInvariantError
from tests.simulation.faults import Trouble
from tests.simulation.run import simulate

NODES = 4
SEEDS = range(1, 13)
"""The first of these that notices is enough."""


def forget_to_wait_for_the_disk(patch: pytest.MonkeyPatch) -> None:
    """Send first and commit later."""
    real = memory.Memory.remembered

    def hasty(self: memory.Memory, effects: Sequence[Effect]) -> Sequence[Effect]:
        return sorted(real(self, effects), key=lambda effect: isinstance(effect, Persist))

    patch.setattr(memory.Memory, "remembered", hasty)


def take_any_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """Call a step whole that one rank confirmed."""
    patch.setattr(checkpoint_step.Step, "refusal", lambda *_: None)


def ignore_the_loss(patch: pytest.MonkeyPatch) -> None:
    """Resume from whatever is newest."""
    patch.setattr(culprit, "damaged_at", lambda _faults: None)


def claim_to_have_stopped(patch: pytest.MonkeyPatch) -> None:
    """Acknowledge a stop when it begins."""
    real = agent.AgentCore.snapshot

    def liar(self: agent.AgentCore, now: Instant) -> StatusReport:
        told = real(self, now)
        early = self.state is AgentState.STOPPING
        return replace(told, stopped_generation=told.generation) if early else told

    patch.setattr(agent.AgentCore, "snapshot", liar)


def restart_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Spend what is not there."""
    patch.setattr(escalation, "_budget_refusal", lambda *_: None)
    patch.setattr(escalation, "_repetition_refusal", lambda *_: None)
    patch.setattr(cluster, "RestartPolicy", lambda **_: RestartPolicy(retries_max=1))


def keep_the_topology_version(patch: pytest.MonkeyPatch) -> None:
    """Move ranks without saying so."""
    real = memory.Memory.world_given

    def silent(
        self: memory.Memory, world: tuple[str, ...], hosts: tuple[str, ...], now_ns: int
    ) -> None:
        real(self, world, hosts, now_ns)
        self.change(replace(self.state, topology_version=1))

    patch.setattr(memory.Memory, "world_given", silent)


def obey_twice(patch: pytest.MonkeyPatch) -> None:
    """Start every worker two times."""
    real = node.Node._spawn

    def twice(self: node.Node, start: Start, keep: frozenset[int]) -> None:
        real(self, start, keep)
        real(self, start, keep)

    patch.setattr(node.Node, "_spawn", twice)


def leave_strays_alone(patch: pytest.MonkeyPatch) -> None:
    """Forget the nodes that hold no rank."""
    patch.setattr(passes, "_tidy", lambda _desk, _now: [])


def go_back_in_numbers(patch: pytest.MonkeyPatch) -> None:
    """Give a generation's number twice."""
    real = memory.Memory.world_given

    def again(
        self: memory.Memory, world: tuple[str, ...], hosts: tuple[str, ...], now_ns: int
    ) -> None:
        real(self, world, hosts, now_ns)
        if self.state.generation == 2:
            self.change(replace(self.state, generation=0))

    patch.setattr(memory.Memory, "world_given", again)


SABOTAGE = {
    "no start before it is durable": forget_to_wait_for_the_disk,
    "the checkpoint is whole": take_any_checkpoint,
    "the checkpoint is sound": ignore_the_loss,
    "no worker outlives a stop that was told": claim_to_have_stopped,
    "restarts stay within the budget": restart_for_ever,
    "one node a rank of a topology": keep_the_topology_version,
    "one worker a rank": obey_twice,
    "no stray is left": leave_strays_alone,
    "numbers never go back": go_back_in_numbers,
}

SCRIPTS = {"the checkpoint is sound": (Trouble.LOSS_NOT_FINITE,)}
"""Where a seed's own choice of faults would take too many seeds."""


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_checker_notices_what_it_is_there_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that cannot fail gives confidence that nobody earned."""
    assert name in NAMES
    SABOTAGE[name](monkeypatch)
    broken: list[str] = []
    for seed in SEEDS:
        try:
            simulate(seed, NODES, SCRIPTS.get(name))
        except BrokenInvariantError as error:
            broken.append(str(error))
            if f": {name}: " in broken[-1]:
                return
    pytest.fail(f"nobody noticed; instead: {broken}")
