"""A whole job in one world: nodes, spares, network, coordinator and the training they run."""

from typing import Final

from coordinator.escalation import RestartPolicy
from coordinator.settings import JobSettings
from scout.clock import Instant, seconds
from tests.simulation.coordinator_host import CoordinatorHost
from tests.simulation.network import Network
from tests.simulation.node import Node
from tests.simulation.training import Training, Worker
from tests.simulation.world import World

JOB: Final = "simulated"
NPROC: Final = 2
SPARES: Final = 3
STALL_S: Final = 5.0
WAIT_FOR_NODES_S: Final = 60.0


class Cluster:
    """Everything of one simulation."""

    def __init__(
        self,
        seed: int,
        nnodes: int,
        *,
        steps: int,
        spares: int = SPARES,
        restartable: bool = False,
    ) -> None:
        self.world = World(seed)
        self.settings = JobSettings(
            job=JOB,
            nnodes=nnodes,
            nproc_per_node=NPROC,
            restart=RestartPolicy(retries_max=10),
            stall_timeout_s=STALL_S,
            wait_for_nodes_s=WAIT_FOR_NODES_S,
            startup_deadline_s=30.0,
        )
        size = self.settings.world_size
        self.training = Training(self.world, size, steps, restartable=restartable)
        self.coordinator = CoordinatorHost(self.world, self.settings)
        self.network = Network(self.world, lambda: self.coordinator)
        self.coordinator.network = self.network
        self.nodes = {
            name: Node(self.world, self.network, self.training, job=JOB, name=name, nproc=NPROC)
            for name in (f"node-{index}" for index in range(nnodes + spares))
        }
        for name in list(self.nodes)[nnodes:]:
            self.nodes[name].spare = True

    def power_on(self) -> None:
        """Start every machine within the first two seconds."""
        dice = self.world.dice("power")
        self.world.later(dice.uniform(0.0, 1.0), self.coordinator.boot)
        for node in self.nodes.values():
            self.world.later(dice.uniform(0.0, 2.0), node.boot)

    @property
    def over(self) -> bool:
        """True once the job ended, one way or the other, and that was made durable."""
        return self.coordinator.finished is not None

    def live(self, name: str) -> list[Worker]:
        """Return the live workers of a node."""
        return [worker for worker in self.nodes[name].workers if worker.alive]

    def run_for(self, span_s: float) -> None:
        """Let time pass."""
        self.world.run(Instant(self.world.now + seconds(span_s)))

    def run_until_over(self, span_s: float) -> bool:
        """Let time pass until the job ended; False when it did not within ``span_s``."""
        return self.world.run(Instant(self.world.now + seconds(span_s)), lambda: self.over)

    def run_until_stepping(self, step: int, span_s: float = 60.0) -> bool:
        """Let time pass until the job completed ``step``."""
        due = Instant(self.world.now + seconds(span_s))
        return self.world.run(due, lambda: self.training.furthest >= step)
