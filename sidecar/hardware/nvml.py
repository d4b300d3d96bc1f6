"""Which GPUs this node has, asked of NVIDIA's management library.

Decides nothing, and least of all health: an empty inventory says why it is empty.  The library
may be absent or stuck, so another process asks it, which can be killed; a thread of this one that
hung in the driver could not.
"""

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sidecar.hardware.nvml_crew import OTHERS_FROM
from sidecar.hardware.nvml_process import NvmlProcess
from sidecar.hardware.pci import normalise_pci

ANSWER_MAX_S: Final = 5.0
"""A healthy driver answers in milliseconds; one that is resetting a device may never."""
LIBRARY: Final = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIdentity:
    """One device.  ``pci`` is spelled as `sidecar.hardware.xid.normalise_pci` does."""

    index: int
    uuid: str
    pci: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInventory:
    """The devices that answered.  ``reason`` says what keeps others out; empty when nothing.

    ``present``: the library is on this node, whether it answers or not.
    """

    gpus: tuple[GpuIdentity, ...] = ()
    reason: str = ""
    present: bool = False

    def by_pci(self) -> dict[str, int]:
        """Return PCI address -> index, as `sidecar.hardware.kernel_log` takes it."""
        return {gpu.pci: gpu.index for gpu in self.gpus}


def list_gpus(timeout_s: float = ANSWER_MAX_S) -> GpuInventory:
    """Return this node's GPUs.  Blocks for at most ``timeout_s``; call it in a worker thread."""
    try:
        ctypes.CDLL(LIBRARY)  # asks no driver
    except OSError:
        return GpuInventory(reason=f"{LIBRARY} is not on this node")
    deadline = time.monotonic() + timeout_s
    spoken = threading.Event()
    helper = NvmlProcess({"others": OTHERS_FROM}, lambda _urgent: spoken.set())
    try:
        while True:
            ended = helper.ended
            for message in helper.take():
                if "hello" in message:
                    return _inventory(message["hello"])
                if "failed" in message:
                    reason = f"NVML is not available: {message['failed'][1]}"
                    return GpuInventory(reason=reason, present=True)
            if ended:
                return GpuInventory(reason=f"the NVML helper {helper.exit_text}", present=True)
            if not spoken.wait(max(0.0, deadline - time.monotonic())):
                reason = f"NVML did not answer within {timeout_s:g} s"
                return GpuInventory(reason=reason, present=True)
            spoken.clear()
    finally:
        helper.kill()


def _inventory(devices: Sequence[Mapping[str, Any]]) -> GpuInventory:
    gpus: list[GpuIdentity] = []
    troubles: list[str] = []
    for device in devices:
        index = device["id"] - OTHERS_FROM
        if "error" in device:
            troubles.append(f"GPU {index} does not answer: {device['error'][1]}")
            continue
        pci = normalise_pci(device["pci"])
        if pci is None:
            troubles.append(f"GPU {index} has an address that is none: {device['pci']!r}")
            continue
        gpus.append(GpuIdentity(index=device["index"], uuid=device["uuid"], pci=pci))
    return GpuInventory(gpus=tuple(gpus), reason="; ".join(troubles), present=True)
