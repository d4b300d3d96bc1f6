"""The faults of the demo: how each is injected for real, and whom Outrider must name for it."""

import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.demo.cluster import Cluster, pci_address
from sidecar.api import FaultKind

WORKERS: Final = ("node-0", "node-1", "node-2", "node-3")
SPARES: Final = ("node-4",)

_NAN: Final = struct.pack("<f", float("nan"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The true culprit."""

    kind: FaultKind
    node: str
    rank: int
    gpu: int | None = None
    replaced_by: str | None = None
    gives_up: bool = False
    """The checkpoint that the job goes back to first must be given up for an older one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One fault.  ``inject`` does it and returns a sentence that says what was done."""

    name: str
    summary: str
    expected: Expected
    inject: Callable[[Cluster], str]
    default: bool = True
    compares: bool = False
    """Ranks compare one another, and can be broken from within."""
    in_process: bool = False
    """The script has a restartable block, and whoever did not break keeps his process."""
    ends: bool = False
    """No restart cures it: it runs in a job of its own, which must be given up."""
    stops: bool = True
    """The fault stops the job; one that does not is only reported."""


def _kill(cluster: Cluster) -> str:
    pid = cluster.worker_pid("node-1")
    os.kill(pid, signal.SIGKILL)
    return f"SIGKILL to pid {pid}, rank 1 on node-1"


def _hang(cluster: Cluster) -> str:
    pid = cluster.worker_pid("node-2")
    os.kill(pid, signal.SIGSTOP)
    return f"SIGSTOP to pid {pid}, rank 2 on node-2: the others wait in their all-reduce"


def _nan(cluster: Cluster) -> str:
    weights = cluster.layout.data("node-3") / "weights.f32"
    with weights.open("r+b") as file:
        file.write(_NAN * (weights.stat().st_size // len(_NAN)))
    return f"every loss weight in {weights.name} of node-3 overwritten with NaN bits"


def _xid(cluster: Cluster) -> str:
    line = (
        f"NVRM: Xid (PCI:{pci_address(0)}): 79, pid={cluster.worker_pid('node-0')}, name=python, "
        "GPU has fallen off the bus."
    )
    with cluster.layout.kernel_log("node-0").open("a") as file:
        file.write(f"{time.strftime('%b %d %H:%M:%S')} node-0 kernel: [ 4242.424242] {line}\n")
    return "XID 79 in the kernel log of node-0: its GPU 0 has fallen off the bus"


def _poison(cluster: Cluster) -> str:
    pid = cluster.worker_pid("node-1")
    os.kill(pid, signal.SIGKILL)  # nobody saves any more: a save waits for every rank
    newest = max(cluster.job()["complete_checkpoints"], key=lambda item: int(item["step"]))
    os.truncate(newest["path"], Path(newest["path"]).stat().st_size // 2)
    return (
        f"SIGKILL to pid {pid}, rank 1 on node-1, and the newest whole checkpoint, that of step "
        f"{newest['step']}, cut in half"
    )


def _flip(cluster: Cluster) -> str:
    pid = cluster.worker_pid("node-2")
    os.kill(pid, signal.SIGUSR2)
    return f"an exponent bit flipped in the largest weight of pid {pid}, rank 2 on node-2"


def _throttle(cluster: Cluster) -> str:
    pid = cluster.worker_pid("node-1")
    os.kill(pid, signal.SIGUSR1)
    return f"pid {pid}, rank 1 on node-1, computes more slowly from now on"


SCENARIOS: Final = (
    Scenario(
        name="kill",
        summary="a worker is killed with SIGKILL",
        expected=Expected(kind=FaultKind.CRASH, node="node-1", rank=1),
        inject=_kill,
    ),
    Scenario(
        name="hang",
        summary="a worker is stopped with SIGSTOP, and the others hang in a collective",
        expected=Expected(kind=FaultKind.PROCESS_STALL, node="node-2", rank=2),
        inject=_hang,
    ),
    Scenario(
        name="nan",
        summary="corrupted data on one node makes its worker print `loss nan`",
        expected=Expected(kind=FaultKind.LOG_RULE, node="node-3", rank=3),
        inject=_nan,
    ),
    Scenario(
        name="xid",
        summary="a GPU falls off the bus, and a spare node takes the dead node's ranks",
        expected=Expected(
            kind=FaultKind.GPU_FATAL, node="node-0", rank=0, gpu=0, replaced_by="node-4"
        ),
        inject=_xid,
    ),
    Scenario(
        name="in-process",
        summary="a worker is killed, and the others train on in the processes they have",
        expected=Expected(kind=FaultKind.CRASH, node="node-1", rank=1),
        inject=_kill,
        default=False,
        in_process=True,
    ),
    Scenario(
        name="escalation",
        summary="a worker dies again and again: every level of restart is tried, then the job ends",
        expected=Expected(kind=FaultKind.CRASH, node="node-1", rank=1),
        inject=_kill,
        default=False,
        ends=True,
    ),
    Scenario(
        name="poison",
        summary="the newest checkpoint is torn, and the job goes back to the one before it",
        expected=Expected(kind=FaultKind.CRASH, node="node-1", rank=1, gives_up=True),
        inject=_poison,
        default=False,
    ),
    Scenario(
        name="silent-corruption",
        summary="a bit flips in one rank's weights, and no checkpoint with it in is ever loaded",
        expected=Expected(kind=FaultKind.SDC, node="node-2", rank=2),
        inject=_flip,
        default=False,
        compares=True,
    ),
    Scenario(
        name="straggler",
        summary="one rank computes more slowly than its peers; it is named and nothing is stopped",
        expected=Expected(kind=FaultKind.SDC, node="node-1", rank=1),
        inject=_throttle,
        default=False,
        compares=True,
        stops=False,
    ),
)
