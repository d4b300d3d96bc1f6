"""What can break, and a seed's choice of what does.

A fault is done to the simulated world only; what the cores make of it is theirs.  Each one says
whom it happened to, so that an incident's culprit can be compared with the truth.
"""

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from scout.clock import Instant
from sidecar.api import ExitCause
from tests.simulation.cluster import SPARES, Cluster
from tests.simulation.node import Node
from tests.simulation.training import Hang


class Trouble(StrEnum):
    """Every kind of fault."""

    WORKER_KILLED = "worker killed"
    WORKER_STOPPED = "worker stopped"
    WORKER_SPINS = "worker spins"
    WORKER_SILENT = "worker silent"
    LOSS_NOT_FINITE = "loss not finite"
    GPU_BROKEN = "gpu broken"
    SPAWN_FAILS = "spawn fails"
    NODE_CRASHES = "node crashes"
    POWER_LOST = "power lost"
    LINK_LOST = "link lost for longer than a lease"
    MACHINE_CUT_OFF = "machine cut off"
    LINK_BREAKS = "link breaks"
    NODE_SLOW = "node slow"
    COORDINATOR_CRASHES = "coordinator crashes"
    PERSON_RESTARTS = "person restarts"


AT_ONCE: Final = 0.4
"""Share of faults that follow the one before within two seconds."""
HARMLESS: Final = frozenset({Trouble.LINK_BREAKS, Trouble.NODE_SLOW, Trouble.COORDINATOR_CRASHES})
"""What must not stop the training."""
OF_A_NODE: Final = frozenset(
    {
        Trouble.GPU_BROKEN,
        Trouble.NODE_CRASHES,
        Trouble.POWER_LOST,
        Trouble.LINK_LOST,
        Trouble.MACHINE_CUT_OFF,
        Trouble.SPAWN_FAILS,
    }
)
"""What is the node's fault, and not that of one rank only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was done.  ``rank`` is None when it is about no single rank."""

    at: Instant
    trouble: Trouble
    node: str
    rank: int | None


def inject(cluster: Cluster, trouble: Trouble, dice: random.Random) -> Injected | None:
    """Break something now; None when there is nothing of its kind to break."""
    holders = [cluster.nodes[name] for name in cluster.coordinator.state.world]
    if trouble is Trouble.COORDINATOR_CRASHES:
        return _crash_coordinator(cluster, dice)
    if trouble is Trouble.PERSON_RESTARTS:
        cluster.coordinator.ask("restart")
        return Injected(at=cluster.world.now, trouble=trouble, node="", rank=None)
    running = [node for node in holders if node.agent is not None and cluster.live(node.name)]
    if not running:
        return None
    node = dice.choice(running)
    rank = _DO[trouble](cluster, node, dice)
    cluster.world.note(f"fault: {trouble} on {node.name}, rank {rank}")
    return Injected(at=cluster.world.now, trouble=trouble, node=node.name, rank=rank)


def heal(cluster: Cluster) -> None:
    """End every fault: from here on nothing breaks."""
    cluster.world.note("healed")
    if cluster.coordinator.core is None:
        cluster.coordinator.boot()
    for node in cluster.nodes.values():
        node.cut_off_until = cluster.world.now
        node.slowness = 1.0
        node.spawn_fails = 0
        _return(node)


def plan(cluster: Cluster, dice: random.Random) -> list[tuple[float, Trouble]]:
    """Draw what breaks when (seconds from the start of the act).

    Some faults follow one another at once, in the middle of the recovery before.
    """
    broken_gpus = 0
    at_s = 0.0
    drawn: list[tuple[float, Trouble]] = []
    for _ in range(dice.randint(4, 9)):
        trouble = dice.choice(list(Trouble))
        broken_gpus += trouble is Trouble.GPU_BROKEN
        if trouble is Trouble.GPU_BROKEN and broken_gpus > SPARES:
            trouble = Trouble.WORKER_KILLED  # the job would rightly end for lack of nodes
        drawn.append((at_s, trouble))
        at_s += dice.uniform(0.0, 2.0) if dice.random() < AT_ONCE else dice.uniform(4.0, 20.0)
    return drawn


# --- one function a fault -------------------------------------------------------------------


def _crash_coordinator(cluster: Cluster, dice: random.Random) -> Injected | None:
    if cluster.coordinator.core is None:
        return None
    cluster.coordinator.crash()

    def back() -> None:
        if cluster.coordinator.core is None:
            cluster.coordinator.boot()

    cluster.world.later(dice.uniform(0.2, 6.0), back)
    trouble = Trouble.COORDINATOR_CRASHES
    return Injected(at=cluster.world.now, trouble=trouble, node="", rank=None)


def _kill(cluster: Cluster, node: Node, dice: random.Random) -> int:
    worker = dice.choice(cluster.live(node.name))
    cluster.training.end(worker, ExitCause(signal=9))
    return worker.rank


def _stop(cluster: Cluster, node: Node, dice: random.Random) -> int:
    worker = dice.choice(cluster.live(node.name))
    cluster.training.hang(worker, Hang.STOPPED)
    return worker.rank


def _spin(cluster: Cluster, node: Node, dice: random.Random) -> int:
    worker = dice.choice(cluster.live(node.name))
    cluster.training.hang(worker, Hang.SPINNING)
    return worker.rank


def _silence(cluster: Cluster, node: Node, dice: random.Random) -> int:
    worker = dice.choice(cluster.live(node.name))
    cluster.training.hang(worker, Hang.SILENT)
    return worker.rank


def _break_loss(cluster: Cluster, node: Node, dice: random.Random) -> int:
    worker = dice.choice(cluster.live(node.name))
    cluster.training.break_loss(worker, at_checkpoint=dice.random() < 0.5)
    return worker.rank


def _break_gpu(cluster: Cluster, node: Node, dice: random.Random) -> int:
    worker = dice.choice(cluster.live(node.name))
    node.gpu_breaks(worker.local_rank)
    if dice.random() < 0.5:
        line = "RuntimeError: CUDA error: unspecified launch failure"
        after_s = dice.uniform(0.0, 0.2)
        cluster.world.later(
            after_s, lambda: cluster.training.end(worker, ExitCause(code=1), (line,))
        )
    return worker.rank


def _fail_spawn(cluster: Cluster, node: Node, _: random.Random) -> None:
    """Let the next start fail, and bring it about by a death elsewhere on the node."""
    node.spawn_fails = 1
    cluster.training.end(cluster.live(node.name)[0], ExitCause(signal=9))


def _crash(cluster: Cluster, node: Node, dice: random.Random) -> None:
    node.crash(silent=False)
    cluster.world.later(dice.uniform(1.0, 20.0), lambda: _return(node))


def _lose_power(cluster: Cluster, node: Node, dice: random.Random) -> None:
    node.crash(silent=True)
    cluster.world.later(dice.uniform(5.0, 40.0), lambda: _return(node))


def _lose_link(cluster: Cluster, node: Node, dice: random.Random) -> None:
    node.cut_off(cluster.settings.lease_s + dice.uniform(9.0, 20.0), quiet=dice.random() < 0.5)


def _cut_off(cluster: Cluster, node: Node, dice: random.Random) -> None:
    """Take the whole network from a machine: its workers live on, and wait for their peers."""
    node.cut_off(cluster.settings.lease_s + dice.uniform(9.0, 20.0), quiet=True)
    for worker in cluster.live(node.name):
        cluster.training.hang(worker, Hang.CUT_OFF)


def _break_link(cluster: Cluster, node: Node, dice: random.Random) -> None:
    node.cut_off(dice.uniform(0.0, 1.0), quiet=False)


def _slow(cluster: Cluster, node: Node, dice: random.Random) -> None:
    node.slowness = dice.uniform(5.0, 30.0)

    def recover() -> None:
        node.slowness = 1.0

    cluster.world.later(dice.uniform(5.0, 30.0), recover)


def _return(node: Node) -> None:
    if node.agent is None and node.exit_status is None:
        node.boot()


_DO: Final = {
    Trouble.WORKER_KILLED: _kill,
    Trouble.WORKER_STOPPED: _stop,
    Trouble.WORKER_SPINS: _spin,
    Trouble.WORKER_SILENT: _silence,
    Trouble.LOSS_NOT_FINITE: _break_loss,
    Trouble.GPU_BROKEN: _break_gpu,
    Trouble.SPAWN_FAILS: _fail_spawn,
    Trouble.NODE_CRASHES: _crash,
    Trouble.POWER_LOST: _lose_power,
    Trouble.LINK_LOST: _lose_link,
    Trouble.MACHINE_CUT_OFF: _cut_off,
    Trouble.LINK_BREAKS: _break_link,
    Trouble.NODE_SLOW: _slow,
}
