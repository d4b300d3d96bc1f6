"""What a node shows of itself to its HTTP API and to Prometheus, read off its shells when asked.

It changes nothing and keeps nothing.
"""

import asyncio
import time
from collections.abc import Mapping

from sidecar.agent import AgentCore
from sidecar.api import AgentState, StatusReport
from sidecar.drive import monotonic
from sidecar.hardware.kernel_log import KernelLogCounters
from sidecar.hardware.node_watch import NodeWatch
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.live_numbers import LiveNumbers
from sidecar.metrics import Exposition, NodeCollector, NodeCounters
from sidecar.rank_table import RankTable
from sidecar.startup import agent_version
from sidecar.uplink import Uplink
from sidecar.workers.ipc_server import WorkerServer


class NodeShown:
    """One node.  ``uplink`` and ``driving`` (the task of the core) are there once it runs."""

    def __init__(
        self,
        job: str,
        *,
        core: AgentCore,
        counters: NodeCounters,
        workers: WorkerServer,
        hardware: NodeWatch,
        live: LiveNumbers,
    ) -> None:
        self.counters = counters
        self.uplink: Uplink | None = None
        self.driving: asyncio.Task[None] | None = None
        self._core = core
        self._workers = workers
        self._hardware = hardware
        self.metrics = Exposition(NodeCollector(job, agent_version(), self, live)).text

    def snapshot(self) -> StatusReport:
        """Return the node's state."""
        return self._core.snapshot(monotonic())

    def rank_table(self) -> RankTable:
        """Return which host the node of each group rank has."""
        return self._core.hosts

    def worker_data(self) -> Mapping[str, str]:
        """Return what waiting ranks have to say to an operator, by global rank."""
        return self._core.worker_data()

    def transitions(self) -> Mapping[AgentState, float]:
        """Return when each state was last entered, in seconds since the epoch."""
        now, wall = monotonic(), time.time()
        return {state: wall - (now - at) / 1e9 for state, at in self._core.transitions.items()}

    def is_alive(self) -> bool:
        """Return whether the core is driven."""
        return self.driving is not None and not self.driving.done()

    def ipc_counters(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return messages by type and errors by kind."""
        return self._workers.messages, self._workers.errors

    def kernel_log_counters(self) -> tuple[KernelLogCounters, tuple[int, ...]]:
        """Return what the kernel's log held, and the GPUs that are known."""
        log = self._hardware.kernel_log
        return log.counters, log.gpus

    def kernel_log_available(self) -> bool:
        """Return whether there is a kernel log to read."""
        return self._hardware.kernel_log.available

    def hardware_health(self) -> HealthSnapshot:
        """Return what is known of every device."""
        return self._hardware.health()

    def uplink_connected(self) -> bool:
        """Return whether the coordinator is reached."""
        return self.uplink is not None and self.uplink.connected
