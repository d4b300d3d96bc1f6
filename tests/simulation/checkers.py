"""What must hold after every event, whatever broke.  See the README for the list.

Each checker counts how often it really looked at something, so that none passes because nothing
ever came before its eyes.
"""

from collections import Counter, defaultdict
from typing import Final

from coordinator.journal_format import DurableState
from coordinator.restart_depth import is_charged
from sidecar.api import Command, FaultKind, Start, StatusReport, Upward
from tests.simulation.cluster import Cluster
from tests.simulation.training import PREFIX

NAMES: Final = (
    "one worker a rank",
    "one node a rank of a topology",
    "no worker outlives a stop that was told",
    "one generation a node",
    "the checkpoint is whole",
    "the checkpoint is sound",
    "restarts stay within the budget",
    "numbers never go back",
    "no start before it is durable",
    "no stray is left",
    "nothing runs after the end",
)


class BrokenInvariantError(AssertionError):
    """Something happened that must never happen."""


class Checkers:
    """Looks at a cluster after every event, commit and command."""

    def __init__(self, cluster: Cluster) -> None:
        self.looked: Counter[str] = Counter()
        self._cluster = cluster
        self._changes = -1
        self._stops: tuple[int, ...] = ()
        self._holders: dict[tuple[int, int], str] = {}
        self._started: set[int] = set()
        self._known_nan: dict[int, int] = {}
        self._before = cluster.coordinator.state
        cluster.world.watchers.append(self._after_event)
        cluster.coordinator.on_commit.append(self._after_commit)
        cluster.coordinator.on_send.append(self._on_command)
        cluster.coordinator.on_told.append(self._on_told)

    def _check(self, name: str, held: bool, what: str) -> None:
        self.looked[name] += 1
        if not held:
            now = self._cluster.world.now / 1e9
            raise BrokenInvariantError(
                f"seed {self._cluster.world.seed}, second {now:.3f}: {name}: {what}"
            )

    def long_after_healing(self) -> None:
        """Look for workers of generations that are over, on nodes that everybody can reach."""
        newest = self._cluster.coordinator.state.generation
        for node in self._cluster.nodes.values():
            old = [it.generation for it in node.workers if it.alive and it.generation < newest]
            self._check("no stray is left", not old, f"{node.name} runs generations {old}")

    def at_the_end(self) -> None:
        """Look once more when the job is over and every sidecar had time to leave."""
        left = [
            f"{w.host.name} (generation {w.generation})" for w in self._cluster.training.workers
        ]
        self._check("nothing runs after the end", not left, ", ".join(left))

    # --- after every event ------------------------------------------------------------------

    def _after_event(self) -> None:
        stops = tuple(node.told_stopped for node in self._cluster.nodes.values())
        if self._changes == self._cluster.training.changes and stops == self._stops:
            return
        self._changes, self._stops = self._cluster.training.changes, stops
        self._ranks_are_held_once()
        self._stops_are_true()

    def _ranks_are_held_once(self) -> None:
        world = set(self._cluster.coordinator.state.world)
        by_rank = defaultdict(list)
        for worker in self._cluster.training.workers:
            if not worker.parked:
                by_rank[worker.rank].append(worker)
        for rank, workers in by_rank.items():
            # What runs on a node that was given up cannot be stopped: nobody can reach it.
            newest = max(worker.generation for worker in workers)
            counted = [w for w in workers if w.generation == newest or w.host.name in world]
            places = ", ".join(f"{w.host.name} (generation {w.generation})" for w in counted)
            self._check("one worker a rank", len(counted) == 1, f"rank {rank} runs on {places}")

    def _stops_are_true(self) -> None:
        for node in self._cluster.nodes.values():
            live = [worker for worker in node.workers if worker.alive and not worker.parked]
            if not live:
                continue
            generations = {worker.generation for worker in live}
            self._check(
                "no worker outlives a stop that was told",
                min(generations) > node.told_stopped,
                f"{node.name} told {node.told_stopped} and runs {sorted(generations)}",
            )
            self._check(
                "one generation a node",
                len(generations) == 1,
                f"{node.name} runs generations {sorted(generations)}",
            )

    # --- after every commit -----------------------------------------------------------------

    def _after_commit(self, state: DurableState) -> None:
        before, self._before = self._before, state
        self._check(
            "numbers never go back",
            state.generation >= before.generation
            and state.topology_version >= before.topology_version,
            f"{before.generation}/{before.topology_version} became "
            f"{state.generation}/{state.topology_version}",
        )
        charged = sum(is_charged(restart) for restart in state.restarts)
        limit = self._cluster.settings.restart.retries_max
        self._check("restarts stay within the budget", charged <= limit, f"{charged} of {limit}")

    # --- on what goes to and fro ------------------------------------------------------------

    def _on_told(self, message: Upward) -> None:
        if not isinstance(message, StatusReport):
            return
        for fault in message.faults:
            if fault.kind is FaultKind.LOG_RULE and fault.step is not None:
                known = self._known_nan.get(message.generation, fault.step)
                self._known_nan[message.generation] = min(known, fault.step)

    def _on_command(self, node: str, command: Command) -> None:
        if not isinstance(command, Start):
            return
        place = (command.topology_version, command.group_rank)
        holder = self._holders.setdefault(place, node)
        self._check(
            "one node a rank of a topology",
            holder == node,
            f"group rank {command.group_rank} of topology {command.topology_version} "
            f"was given to {holder} and to {node}",
        )
        durable = self._cluster.coordinator.state.generation
        self._check(
            "no start before it is durable",
            command.generation <= durable,
            f"generation {command.generation} was started, the journal knows {durable}",
        )
        if command.generation not in self._started:
            self._started.add(command.generation)
            self._starts_are_within_the_budget()
            self._checkpoint_is_right(command)

    def _starts_are_within_the_budget(self) -> None:
        limit = self._cluster.settings.restart.retries_max
        allowed = 1 + limit + self._cluster.coordinator.asked_by_people
        self._check(
            "restarts stay within the budget",
            len(self._started) <= allowed,
            f"{len(self._started)} generations were started",
        )

    def _checkpoint_is_right(self, start: Start) -> None:
        for chosen in start.checkpoints:
            assert chosen.prefix == PREFIX
            shards = self._cluster.training.disk.get(chosen.step, {})
            writers = {shard.generation for shard in shards.values()}
            self._check(
                "the checkpoint is whole",
                len(shards) == self._cluster.settings.world_size and len(writers) == 1,
                f"step {chosen.step} has {len(shards)} shards of generations {sorted(writers)}",
            )
            for generation in writers:
                known = self._known_nan.get(generation)
                self._check(
                    "the checkpoint is sound",
                    known is None or chosen.step < known,
                    f"step {chosen.step} of generation {generation} was chosen, and its loss was "
                    f"known to be not finite at step {known}",
                )
