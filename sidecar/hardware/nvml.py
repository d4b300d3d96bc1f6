"""Which GPUs this node has, asked of NVIDIA's management library.

Decides nothing, and least of all health: an empty inventory says why it is empty.  The library
may be absent or stuck, so it is asked in a thread of its own with a time limit.
"""

import queue
import threading
from dataclasses import dataclass
from typing import Any, Final

from sidecar.hardware.xid import normalise_pci

ANSWER_MAX_S: Final = 5.0
"""A healthy driver answers in milliseconds; one that is resetting a device may never."""

_ABSENT: Final = 12
"""NVML's number for "the library is not there"; a driver that is not loaded may yet come."""


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
    answers: queue.SimpleQueue[GpuInventory] = queue.SimpleQueue()
    # A daemon thread: one that never comes back from the driver must not hold up the exit.
    threading.Thread(target=lambda: answers.put(_ask()), name="nvml-list", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return GpuInventory(reason=f"NVML did not answer within {timeout_s:g} s", present=True)


def _ask() -> GpuInventory:
    try:
        import pynvml  # noqa: PLC0415 - absent on nodes that have no use for it
    except ImportError as error:
        return GpuInventory(reason=f"the package nvidia-ml-py is not installed: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        present = error.value != _ABSENT
        return GpuInventory(reason=f"NVML is not available: {error}", present=present)
    try:
        return _list(pynvml)
    except pynvml.NVMLError as error:
        reason = f"NVML does not say how many GPUs there are: {error}"
        return GpuInventory(reason=reason, present=True)
    finally:
        _shut_down(pynvml)


def _list(nvml: Any) -> GpuInventory:
    gpus: list[GpuIdentity] = []
    troubles: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            address = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        except nvml.NVMLError as error:
            troubles.append(f"GPU {index} does not answer: {error}")
            continue
        pci = normalise_pci(address)
        if pci is None:
            troubles.append(f"GPU {index} has an address that is none: {address!r}")
            continue
        gpus.append(GpuIdentity(index=index, uuid=uuid, pci=pci))
    return GpuInventory(gpus=tuple(gpus), reason="; ".join(troubles), present=True)


def _shut_down(nvml: Any) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return  # nothing is held that the next question would need


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
