"""One node's hardware, watched: the kernel's log and NVIDIA's library, put together for the daemon.

Decides which of them exist here, and which local ranks a convicted device belongs to.  How bad
anything is was judged before it comes here.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from scout.clock import Instant
from sidecar.events import HardwareFinding, HardwareRecovered, ProcessNote
from sidecar.hardware.catalogue import Catalogue
from sidecar.hardware.devices import Gpu, rank_devices
from sidecar.hardware.health import HealthCleared, HealthConfig
from sidecar.hardware.kernel_log import KernelLogWatcher
from sidecar.hardware.nvml import GpuInventory
from sidecar.hardware.readings import Device, Metric
from sidecar.hardware.snapshot import HealthSnapshot
from sidecar.hardware.sources import HealthSource, KernelLogSource, NvmlSource
from sidecar.hardware.watch import HardwareWatch, recovery_of

KERNEL: Final = "kernel-log"


class NodeWatch:
    """Finds broken hardware until `run` is cancelled.  ``emit`` is called on the event loop.

    ``gpus`` maps PCI addresses to indices, ``nproc`` is the number of local ranks, ``owner``
    returns the local rank that a process belongs to, ``others`` are sources beside NVML and the
    kernel's log, and ``cursor`` is where the place in that log is kept.
    """

    def __init__(
        self,
        inventory: GpuInventory,
        kernel_log: Path,
        emit: Callable[[HardwareFinding | HardwareRecovered | ProcessNote], None],
        *,
        gpus: Mapping[str, int],
        nproc: int,
        catalogue: Catalogue,
        health: HealthConfig,
        others: Sequence[HealthSource],
        cursor: Path,
        owner: Callable[[int], int | None],
    ) -> None:
        self._emit = emit
        self._nproc = nproc
        self._environment: Mapping[str, str] = os.environ
        self._seen_first = tuple(
            Gpu(device=Device(index=gpu.index, uuid=gpu.uuid, pci=gpu.pci))
            for gpu in sorted(inventory.gpus, key=lambda gpu: gpu.pci)
        )
        self._nvml = NvmlSource() if inventory.present else None
        told = KernelLogSource(name=KERNEL)
        self.kernel_log = KernelLogWatcher(
            kernel_log,
            gpus,
            self._found,
            catalogue=catalogue,
            cursor=cursor,
            owner=owner,
            health=told,
        )
        own: list[HealthSource] = [told] if self._nvml is None else [self._nvml, told]
        # The kernel's log tells of its own faults, sooner and in its own words.
        self._watch = HardwareWatch(
            health, [*own, *others], self._found, cleared=self._cleared, told=frozenset({KERNEL})
        )

    async def run(self) -> None:
        """Watch until cancelled; no helper process is left then."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.kernel_log.run())
            tasks.create_task(self._watch.run())

    def started(self, environment: Mapping[str, str]) -> None:
        """Take what the workers that start now get beyond this process's own environment."""
        self._environment = {**os.environ, **environment}

    @property
    def helpers(self) -> frozenset[int]:
        """Processes of ours that are nobody's orphans."""
        return frozenset() if self._nvml is None else frozenset(self._nvml.helpers)

    def recent(self, now: Instant) -> tuple[str, ...]:
        """Return what the kernel said lately and what is odd about devices, as evidence."""
        return (*self.kernel_log.recent(now), *self._watch.snapshot().remarks)

    def health(self) -> HealthSnapshot:
        """Return the state of every device; answers at once."""
        return self._watch.snapshot()

    def _found(self, event: HardwareFinding | ProcessNote) -> None:
        if isinstance(event, HardwareFinding) and event.gpu is not None:
            event = replace(event, local_ranks=self._ranks_on(event.gpu))
        self._emit(event)

    def _cleared(self, event: HealthCleared) -> None:
        if event.metric is not Metric.KERNEL_FAULT:  # its reasons are the kernel log's own
            self._emit(recovery_of(event))

    def _ranks_on(self, gpu: int) -> tuple[int, ...] | None:
        """Return which local ranks compute on a device, None where only convention says so."""
        gpus = (self._nvml.gpus if self._nvml is not None else ()) or self._seen_first
        device = next((it.device for it in gpus if it.device.index == gpu), None)
        if device is None:
            return None
        environments = dict.fromkeys(range(self._nproc), self._environment)
        return rank_devices(gpus, environments).ranks_on(device)
