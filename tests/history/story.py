"""One hour of a job with everything in it, told by the product's own cores and collectors.

Sixteen nodes with eight GPUs each and a spare live in the simulator's virtual time: the job core
and one agent core a node decide, `JobCollector` and `NodeCollector` are asked every half minute as
Prometheus would ask them, and what they say is written as OpenMetrics.  What breaks, and when, is
scripted; who is blamed for it is not.

minute 24  memory errors on GPU 3 of node-07 are corrected, more and more
minute 27  that GPU falls off the bus; the spare takes the node's ranks
minute 38  rank 92 on node-11 is slow for five minutes
minute 46  rank 20 on node-02 stops and everybody hangs
minute 52  rank 33 on node-04 computes something else than its peers: the comparison names it, the
           step is not trusted
minute 56  rank 70 on node-08 reports that its data loader is broken and asks for a restart of the
           whole job: deeper than the one before
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest.mock import patch

from prometheus_client.metrics_core import Metric as Family

from coordinator.escalation import RestartPolicy
from coordinator.history import History
from coordinator.journal_format import DurableState
from coordinator.ledger import Ledger
from coordinator.meter import Meter
from coordinator.metrics import JobCollector, JobNumbers
from coordinator.phases import JobPhase
from coordinator.settings import JobSettings
from scout.clock import Instant, seconds
from scout.snapshot import RankSnapshot
from sidecar.api import Start, StatusReport
from sidecar.events import WorkerSpoke
from sidecar.hardware.catalogue import XidSeverity
from sidecar.hardware.health import HardwareHealth
from sidecar.hardware.kernel_log import KernelLogCounters
from sidecar.hardware.readings import Device, Known, Metric, Reading
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.logs.numbers import Extracted
from sidecar.loop_lag import LoopLag
from sidecar.metrics import NodeCollector, NodeCounters
from tests.simulation import node as node_module
from tests.simulation import training as training_module
from tests.simulation.coordinator_host import WALL_NS, CoordinatorHost
from tests.simulation.network import Network
from tests.simulation.node import Node
from tests.simulation.training import CHECKPOINT_EVERY, Hang, Training, Worker
from tests.simulation.world import World
from worker_shim.messages import Envelope, JobFault, RankLabels, RestartMode, ScoutStatus

JOB: Final = "llama"
CLUSTER: Final = "sim"
NODES, GPUS = 16, 8
SCRAPE_S: Final = 30
BEGIN_S: Final = WALL_NS // 10**9
HOUR_S: Final = 3600
STEP_S: Final = 6.0
SLOW_START: Final = 150.0
"""How much longer than in the simulator's usual world processes take to start: a minute or so."""

BAD_NODE, BAD_GPU, BAD_RANK = "node-07", 3, 59
SLOW_NODE, SLOW_RANK = "node-11", 92
HUNG_NODE, HUNG_RANK = "node-02", 20
SDC_NODE, SDC_RANK = "node-04", 33
ASKING_NODE, ASKING_RANK = "node-08", 70


class MeteredHost(CoordinatorHost):
    """A coordinator whose time and commands are measured as the daemon does it."""

    def boot(self) -> None:
        super().boot()
        assert self.core is not None
        self.job_core = self.core
        offset_ns = WALL_NS - self._clock_ns
        ledger = Ledger.begin(self.now() + offset_ns)
        self.meter = Meter(self.core, ledger, offset_ns, self.now())
        self.core = self.meter


class StoryNode(Node):
    """A node that counts what it reports, and knows its hardware."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)
        self.counters = NodeCounters()
        self.health = HardwareHealth()
        self.seen: HealthSnapshot | None = None
        self.kernel = KernelLogCounters()
        self.corrected = 0
        self.uncorrected = 0
        self.slow_rank: int | None = None
        self.lag = LoopLag()
        self.lag.observe(0.002)

    def _report(self, message: object) -> None:
        if isinstance(message, StatusReport):
            self.counters.reported(message)
        super()._report(message)

    def _spawn(self, start: Start, keep: frozenset[int]) -> None:
        super()._spawn(start, keep)
        for worker in self.workers:
            place = {"tp": worker.rank % 8, "pp": worker.rank // 64, "dp": worker.rank // 8 % 8}
            labels = {name: str(number) for name, number in place.items()}
            self.says(worker, RankLabels(local_rank=worker.local_rank, labels=labels))
            self.compares(worker)

    def compares(
        self, worker: Worker, slow: tuple[int, ...] = (), corrupt: tuple[int, ...] = ()
    ) -> None:
        """Let a worker tell what its newest comparison with its peers found."""
        step = worker.step or 0
        found = "corrupt" if corrupt else "straggler" if slow else "healthy"
        status = ScoutStatus(
            local_rank=worker.local_rank,
            step=step,
            outcome=found,
            why=f"rank {corrupt[0]} differs from its seven peers" if corrupt else "",
            corrupt_ranks=corrupt,
            straggler_ranks=slow,
            evidence=("replayed output: 1 of 8 digests stands alone",) if corrupt else (),
            verified=() if corrupt or step == 0 else (step - step % CHECKPOINT_EVERY,),
            rejected=(step,) if corrupt else (),
            checks=10,
            check_ms=4.0,
            interval=50,
            worst_case_steps=400,
        )
        self.says(worker, status)

    def says(self, worker: Worker, message: RankLabels | JobFault | ScoutStatus) -> None:
        """Let a worker tell its sidecar something."""
        envelope = Envelope(client_id=str(worker.pid), seq=1, generation=worker.generation)
        self._handle(WorkerSpoke(connection=worker.pid, envelope=envelope, message=message))

    # --- what the collector asks --------------------------------------------------------------

    def snapshot(self) -> StatusReport:
        assert self.agent is not None
        return self.agent.snapshot(self.now())

    def ipc_counters(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {}, {}

    def kernel_log_counters(self) -> tuple[KernelLogCounters, tuple[int, ...]]:
        return self.kernel, tuple(range(GPUS))

    def kernel_log_available(self) -> bool:
        return True

    def uplink_connected(self) -> bool:
        return self._link is not None

    def hardware_health(self) -> HealthSnapshot:
        if self.name != BAD_NODE and self.seen is not None:
            return self.seen  # nothing about it changes
        now = self.now()
        readings = [it for gpu in range(GPUS) for it in self._readings(gpu, now)]
        self.health.evaluate(readings, now)
        self.seen = self.health.snapshot(now)
        return self.seen

    def _readings(self, gpu: int, now: Instant) -> Iterable[Reading]:
        bad = self.name == BAD_NODE and gpu == BAD_GPU
        device = Device(index=gpu, uuid=f"GPU-{self.name}-{gpu}", pci=f"0000:{gpu + 1}0:00")
        for metric, value in (
            (Metric.TEMPERATURE_C, 61 + gpu + (18 if bad and self.corrected else 0)),
            (Metric.TEMPERATURE_MARGIN_C, 31 - gpu - (18 if bad and self.corrected else 0)),
            (Metric.ECC_CORRECTABLE_VOLATILE, self.corrected if bad else 0),
            (Metric.ECC_UNCORRECTABLE_VOLATILE, self.uncorrected if bad else 0),
            (Metric.REMAP_PENDING, 0),
            (Metric.REMAP_FAILURE, 1 if bad and self.uncorrected else 0),
            (Metric.NVLINK_CRC_DATA, 0),
            (Metric.PCIE_REPLAY, 0),
        ):
            yield Reading(source="nvml", device=device, metric=metric, value=Known(value), at=now)

    def log_counters(self) -> tuple[int, Mapping[str, int]]:
        step = max((worker.step or 0 for worker in self.workers), default=0)
        return step * GPUS, {"StepTime": step, "LossIsNaN": 0}

    def log_severities(self) -> Mapping[str, int]:
        return {"StepTime": 2 if self.slow_rank is not None else 1, "LossIsNaN": 1}

    def log_trouble(self) -> tuple[int, int]:
        return 0, 0

    def log_match_ages_s(self) -> Mapping[str, float]:
        return {"StepTime": 1.0}

    def log_series(self) -> Mapping[int, Mapping[str, Extracted]]:
        return {
            worker.rank: {
                "step_time": Extracted(
                    metric="step_time",
                    value=STEP_S * (1.42 if worker.rank == self.slow_rank else 1.0),
                    step=worker.step,
                )
            }
            for worker in self.workers
            if worker.step is not None
        }

    def ranks(self) -> tuple[RankSnapshot, ...]:
        return tuple(worker.snapshot(self._world.now) for worker in self.workers)

    def loop_lag(self) -> tuple[Family, ...]:
        return self.lag.families()


@dataclass
class Record:
    """Every sample of the hour: family -> type, and series -> (time, value) pairs."""

    types: dict[str, str] = field(default_factory=dict)
    series: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)
    samples: int = 0

    def take(self, families: Iterable[Family], target: Mapping[str, str], at_s: int) -> int:
        """Note one scrape; return how many samples it had."""
        tail = ",".join(f'{key}="{value}"' for key, value in target.items())
        count = 0
        for family in families:
            self.types[family.name] = family.type
            rows = self.series.setdefault(family.name, {})
            for sample in family.samples:
                labels = "".join(f'{k}="{escaped(v)}",' for k, v in sample.labels.items())
                key = f"{sample.name}{{{labels}{tail}}}"
                rows.setdefault(key, []).append((at_s, sample.value))
                count += 1
        self.samples += count
        return count

    def plain(self, name: str, target: Mapping[str, str], at_s: int, value: float) -> None:
        """Note one sample that Prometheus makes itself."""
        labels = ",".join(f'{key}="{value}"' for key, value in target.items())
        self.types[name] = "gauge"
        rows = self.series.setdefault(name, {})
        rows.setdefault(f"{name}{{{labels}}}", []).append((at_s, value))

    def write(self, path: Path) -> None:
        """Write it all as OpenMetrics."""
        with path.open("w", encoding="utf-8") as file:
            for name, rows in self.series.items():
                kind = self.types[name]
                file.write(f"# TYPE {name} {'gauge' if kind == 'info' else kind}\n")
                for key, values in rows.items():
                    file.writelines(f"{key} {value} {at_s}\n" for at_s, value in values)
            file.write("# EOF\n")


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Story:
    """The hour, told once: `tell` returns what Prometheus would have heard."""

    def __init__(self) -> None:
        self.world = World(7)
        self.settings = JobSettings(
            job=JOB,
            nnodes=NODES,
            nproc_per_node=GPUS,
            restart=RestartPolicy(retries_max=10),
            stall_timeout_s=60.0,
            heartbeat_s=30.0,
            lease_s=120.0,
            inspect_timeout_s=5.0,
            wait_for_nodes_s=600.0,
            startup_deadline_s=900.0,
        )
        self.training = Training(self.world, self.settings.world_size, 100_000)
        self.host = MeteredHost(self.world, self.settings)
        self.network = Network(self.world, lambda: self.host)
        self.host.network = self.network
        self.nodes = {
            name: StoryNode(self.world, self.network, self.training, job=JOB, name=name, nproc=GPUS)
            for name in (f"node-{place:02d}" for place in range(NODES + 1))
        }
        self.nodes[f"node-{NODES:02d}"].spare = True
        self.host.on_commit.append(self._pace)
        self.history = History()
        self.record = Record()

    def tell(self, until_s: int = HOUR_S) -> Record:
        """Let the hour, or its beginning, pass and return what was heard."""
        with (
            patch.object(training_module, "STEP_S", STEP_S),
            patch.object(node_module, "TICK_S", 15.0),
        ):
            self.world.later(0.1, self.host.boot)
            for node in self.nodes.values():
                self.world.later(0.5, node.boot)
            for minute, happens in self._script():
                self.world.later(minute * 60, happens)
            for at_s in range(SCRAPE_S, until_s + 1, SCRAPE_S):
                self.world.later(at_s, lambda at_s=at_s: self._scrape(at_s))
            self.world.run(Instant(seconds(until_s + 1)))
        return self.record

    def _script(self) -> Iterable[tuple[float, Callable[[], None]]]:
        bad, slow = self.nodes[BAD_NODE], self.nodes[SLOW_NODE]
        for half_minute in range(6):
            yield 24 + half_minute / 2, lambda: self._corrects(bad)
        yield 27, lambda: self._breaks(bad)
        yield 38, lambda: self._slows(slow, SLOW_RANK)
        yield 43, lambda: self._slows(slow, None)
        yield 46, lambda: self.training.hang(self._worker(HUNG_NODE, HUNG_RANK), Hang.STOPPED)
        yield 51, self._compare
        yield 52, lambda: self._compare(SDC_RANK)
        yield 56, lambda: self._asks_for_all(self.nodes[ASKING_NODE])

    def _worker(self, name: str, rank: int) -> Worker:
        return next(it for it in self.nodes[name].workers if it.rank == rank)

    def _corrects(self, node: StoryNode) -> None:
        node.corrected += 9

    def _breaks(self, node: StoryNode) -> None:
        node.uncorrected = 1
        node.kernel.gpu_xids = {(BAD_GPU, 79): 1}
        node.kernel.xids[XidSeverity.FATAL] = 1
        node.gpu_breaks(BAD_GPU)

    def _slows(self, node: StoryNode, rank: int | None) -> None:
        node.slow_rank = rank
        node.slowness = 1.0 if rank is None else 1.42
        for worker in node.workers:
            node.compares(worker, () if rank is None else (rank,))

    def _compare(self, *corrupt: int) -> None:
        """Let every rank of the job tell the same of one comparison."""
        for node in self.nodes.values():
            for worker in list(node.workers):
                node.compares(worker, corrupt=corrupt)

    def _asks_for_all(self, node: StoryNode) -> None:
        worker = self._worker(node.name, ASKING_RANK)
        fault = JobFault(
            local_rank=worker.local_rank,
            reason="LoaderBroken",
            message="the index of the data set cannot be read",
            restart_mode=RestartMode.JOB,
        )
        node.says(worker, fault)

    def _pace(self, state: DurableState) -> None:
        """Let processes take as long to start as a large model's do."""
        starting = state.phase in (JobPhase.WAITING, JobPhase.STARTING)
        for node in self.nodes.values():
            if starting:
                node.slowness = SLOW_START
            elif node.slowness == SLOW_START:
                node.slowness = 1.0

    def _scrape(self, at_s: int) -> None:
        wall_s = BEGIN_S + at_s
        for node in self.nodes.values():
            self._scrape_node(node, wall_s)
        for incident in self.host.closed_incidents():
            self.history.note(incident)
        now = self.host.now()
        numbers = JobNumbers(
            now_s=float(wall_s),
            view=self.host.job_core.view(now),
            history=self.history,
            ledger=self.host.meter.look(now),
            commands=self.host.meter.commands,
            told=self.host.meter.told,
        )
        target = {"job": "outrider-coordinator", "instance": "c:8081", "cluster": CLUSTER}
        count = self.record.take(JobCollector(numbers).collect(), target, wall_s)
        self._as_prometheus(target, wall_s, count)

    def _scrape_node(self, node: StoryNode, wall_s: int) -> None:
        target = {
            "job": "outrider-sidecar",
            "instance": f"{node.name}:8080",
            "node": node.name,
            "cluster": CLUSTER,
        }
        count = self.record.take(NodeCollector(JOB, "0", node, node).collect(), target, wall_s)
        self._as_prometheus(target, wall_s, count)
        self.record.plain("process_resident_memory_bytes", target, wall_s, 64e6)

    def _as_prometheus(self, target: Mapping[str, str], wall_s: int, count: int) -> None:
        self.record.plain("up", target, wall_s, 1)
        self.record.plain("scrape_duration_seconds", target, wall_s, 0.01)
        self.record.plain("scrape_samples_scraped", target, wall_s, count)
