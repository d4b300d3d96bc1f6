"""The vocabulary of the kernel's log: what one line says, and what a log adds up to.

A `KernelNote` is one line that is no Xid; a `KernelFinding` is what the judge wants told.  Nothing
here decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from sidecar.hardware.catalogue import XidSeverity


class KernelKind(StrEnum):
    """What a line is about.  A bounded set: it is a metric label."""

    XID = "xid"
    SXID = "sxid"
    GPU_LOST = "gpu_lost"
    GPU_INIT = "gpu_init"
    DRIVER_MISMATCH = "driver_mismatch"
    LINK_DOWN = "link_down"
    LINK_UP = "link_up"
    NIC = "nic"
    PCIE = "pcie"
    MACHINE_CHECK = "machine_check"
    MEMORY_FAILURE = "memory_failure"
    OOM_KILL = "oom_kill"
    READ_ONLY = "read_only"
    DISK = "disk"
    STORAGE_STALL = "storage_stall"
    STORAGE_BACK = "storage_back"
    HUNG_TASK = "hung_task"
    LOCKUP = "lockup"
    RCU_STALL = "rcu_stall"
    KERNEL_BUG = "kernel_bug"
    PROCESS_FAULT = "process_fault"
    """A program's own invalid access; the kernel only reports it."""
    LOG_GAP = "log_gap"


REASONS: Final[Mapping[KernelKind, str]] = {
    KernelKind.GPU_LOST: "Xid79",
    KernelKind.GPU_INIT: "GpuInitFailed",
    KernelKind.DRIVER_MISMATCH: "DriverMismatch",
    KernelKind.LINK_DOWN: "LinkDown",
    KernelKind.LINK_UP: "LinkUp",
    KernelKind.NIC: "NetworkCard",
    KernelKind.PCIE: "PcieError",
    KernelKind.MACHINE_CHECK: "MachineCheck",
    KernelKind.MEMORY_FAILURE: "MemoryFailure",
    KernelKind.OOM_KILL: "OomKilled",
    KernelKind.READ_ONLY: "FileSystemReadOnly",
    KernelKind.DISK: "DiskError",
    KernelKind.STORAGE_STALL: "StorageStall",
    KernelKind.STORAGE_BACK: "StorageBack",
    KernelKind.HUNG_TASK: "HungTask",
    KernelKind.LOCKUP: "Lockup",
    KernelKind.RCU_STALL: "RcuStall",
    KernelKind.KERNEL_BUG: "KernelBug",
    KernelKind.PROCESS_FAULT: "ProcessFault",
    KernelKind.LOG_GAP: "KernelLogGap",
}
"""How a finding's reason is spelled; those of Xids carry their number."""

STALLS: Final = frozenset(
    {KernelKind.STORAGE_STALL, KernelKind.HUNG_TASK, KernelKind.LOCKUP, KernelKind.RCU_STALL}
)
"""What keeps a process from going on without ending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNote:
    """One line that is no Xid.

    ``subject`` is what it is about, under a name of its own (``port mlx5_5:1``, ``fs md0``),
    ``pci`` the device if one is named, ``driver`` whose it is.  ``pid`` is as the kernel counts.
    """

    kind: KernelKind
    severity: XidSeverity
    meaning: str
    subject: str
    text: str
    pci: str | None = None
    driver: str = ""
    pid: int | None = None
    process: str | None = None
    detail: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFinding:
    """What the log says that somebody should hear.

    ``convicts``: the device (``gpu``, or the node where it is None) gets no work until somebody
    acts.  ``pid`` names the process whose end or standstill this explains.  ``count`` is above one
    in the repeated word about a storm.
    """

    kind: KernelKind
    severity: XidSeverity
    subject: str
    reason: str
    message: str
    line: str
    convicts: bool = False
    gpu: int | None = None
    pci: str | None = None
    uuid: str = ""
    code: int | None = None
    pid: int | None = None
    process: str | None = None
    count: int = 1
