"""The kernel log watcher with real files, and the machine's own log where it may be read."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scout.clock import Instant
from sidecar.events import HardwareFinding, ProcessNote
from sidecar.hardware.kernel_events import KernelKind
from sidecar.hardware.kernel_line import KernelLine, Mark
from sidecar.hardware.kernel_log import KMSG, KernelLogWatcher
from sidecar.hardware.kernel_sources import Cursor, KernelDevice
from sidecar.hardware.nvml import GpuInventory, list_gpus
from sidecar.hardware.readings import Metric, Severity
from sidecar.hardware.sources import KernelLogSource
from sidecar.hardware.xid import XidSeverity, normalise_pci
from sidecar.logs.follow import FollowCounters

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
GPUS = {"00000000:3B:00.0": 0, "0000:86:00": 5}


def xid(code: int, pci: str = "0000:86:00") -> str:
    return f"[ 12.5] NVRM: Xid (PCI:{pci}): {code}, pid=77, name=python, some words\n"


class Kernel:
    """A log file, its watcher and every finding."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: list[HardwareFinding] = []
        self.notes: list[ProcessNote] = []
        self.watcher = KernelLogWatcher(path, GPUS, self.take, poll_s=0.02)

    def take(self, found: HardwareFinding | ProcessNote) -> None:
        if isinstance(found, HardwareFinding):
            self.findings.append(found)
        else:
            self.notes.append(found)

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    async def found(self, count: int = 1) -> list[HardwareFinding]:
        await until(lambda: len(self.findings) >= count)
        return self.findings

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.watcher.run())
        try:
            yield
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def test_a_fatal_xid_convicts_the_gpu_of_that_address(tmp_path):
    """The node would be given the same dead device again."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write("usb 1-1: new device\n" + xid(79) + xid(48, "0000:3B:00"))
            first, second = await kernel.found(2)
        assert (first.gpu, first.reason) == (5, "Xid79")
        assert "GPU 5" in first.message
        assert "fallen off the bus" in first.message
        assert "some words" in first.line
        assert (second.gpu, second.reason) == (0, "Xid48")

    asyncio.run(scenario())


def test_lines_from_before_the_start_convict_nobody(tmp_path):
    """Yesterday's fault, mended since, would take the node out for ever."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write(xid(79) + xid(95)[:30])
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write(xid(95)[30:] + xid(48))
            (finding,) = await kernel.found()
        assert finding.reason == "Xid48"

    asyncio.run(scenario())


def test_one_device_and_code_is_told_once(tmp_path):
    """The driver repeats itself by the hundred; each would be an incident."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write(xid(79) * 100 + xid(79, "0000:3b:00") + xid(48))
            await kernel.found(3)
            await until(lambda: kernel.watcher.counters.xids[XidSeverity.FATAL] == 102)
        assert [(one.gpu, one.reason) for one in kernel.findings] == [
            (5, "Xid79"),
            (0, "Xid79"),
            (5, "Xid48"),
        ]

    asyncio.run(scenario())


def test_a_programs_own_error_and_an_unknown_code_convict_nothing(tmp_path, caplog):
    """A bug in a script would drain node after node."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write(xid(13) + xid(987) + xid(79))
            (finding,) = await kernel.found()
        assert finding.reason == "Xid79"
        assert kernel.watcher.counters.xids[XidSeverity.APP] == 1
        assert kernel.watcher.counters.xids[XidSeverity.WARNING] == 1

    asyncio.run(scenario())
    assert "Xid 987 on GPU 5 (PCI 0000:86:00): not in the catalogue" in caplog.text


def test_an_address_of_no_known_gpu_is_told_as_the_nodes(tmp_path):
    """Dropping it would read as a healthy node; guessing would convict the wrong device."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write(xid(79, "0000:ff:00"))
            (finding,) = await kernel.found()
        assert finding.gpu is None
        assert "not among this node's known ones (PCI 0000:ff:00)" in finding.message

    asyncio.run(scenario())


def test_a_log_that_is_not_there_is_said_once_and_found_later(tmp_path, caplog):
    """A node without its log would pass for one without faults."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        async with kernel.running():
            await until(lambda: "no kernel log" in caplog.text)
            await asyncio.sleep(0.1)
            assert not kernel.watcher.available
            kernel.write(xid(79))
            await kernel.found()
            assert kernel.watcher.available

    asyncio.run(scenario())
    assert caplog.text.count("no kernel log") == 1


def test_a_rotated_log_is_followed(tmp_path):
    """After midnight nothing would be seen."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("old\n")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.path.rename(tmp_path / "kern.log.1")
            kernel.write(xid(79))
            (finding,) = await kernel.found()
            assert "79" in finding.message

    asyncio.run(scenario())


def test_a_killed_process_is_told_with_who_killed_it(tmp_path):
    """The crash would be called a mystery, and the same batch size would be tried again."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write(
                "[1.5] Memory cgroup out of memory: Killed process 63214 (python3) "
                "total-vm:214748364kB, anon-rss:98123456kB\n" + xid(31)
            )
            await until(lambda: len(kernel.notes) >= 2)
        assert kernel.findings == []
        killed, faulted = kernel.notes
        assert (killed.pid, killed.reason) == (63214, "OomKilled")
        assert killed.killer == "the kernel's OOM killer"
        assert "its container" in killed.message
        assert (faulted.pid, faulted.killer) == (77, "")
        assert kernel.watcher.counters.kinds[KernelKind.OOM_KILL] == 1
        assert kernel.watcher.counters.gpu_xids == {(5, 31): 1}
        recent = kernel.watcher.recent(Instant(time.monotonic_ns()))
        assert any("OOM killer" in line for line in recent)

    asyncio.run(scenario())


def test_a_node_whose_disk_turned_read_only_takes_no_more_work(tmp_path):
    """It would confirm checkpoints that it cannot write."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write("kernel: [7.1] EXT4-fs (md0): Remounting filesystem read-only\n")
            (finding,) = await kernel.found()
        assert (finding.gpu, finding.reason) == (None, "FileSystemReadOnly")

    asyncio.run(scenario())


def test_a_journal_written_to_a_file_is_believed_by_transport(tmp_path):
    """Anybody may log under the name of the kernel and take a node out of the job."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "journal.export")
        kernel.write("")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            entry = "__CURSOR=x\n_TRANSPORT={}\nSYSLOG_IDENTIFIER=kernel\nMESSAGE={}\n\n"
            kernel.write(entry.format("syslog", xid(79)[8:].strip()))
            kernel.write(entry.format("kernel", xid(48)[8:].strip()))
            (finding,) = await kernel.found()
        assert finding.reason == "Xid48"

    asyncio.run(scenario())


def test_whoever_asks_first_hears_what_the_log_holds_now(tmp_path):
    """A worker's death would be reported a moment before the reason for it."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        kernel.watcher = KernelLogWatcher(kernel.path, GPUS, kernel.take, poll_s=3600)
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write("Killed process 5 (x) total-vm:1kB\n")
            seen: list[int] = []
            kernel.watcher.after_catching_up(lambda: seen.append(len(kernel.notes)))
            await until(lambda: seen)
        assert seen == [1]

    asyncio.run(scenario())


def test_a_storm_is_read_without_end_and_counted(tmp_path):
    """A reader that cannot keep up would see the fatal line hours later."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write(xid(13) * 20_000 + xid(79))
            (finding,) = await kernel.found()
        assert finding.reason == "Xid79"
        assert kernel.watcher.counters.xids[XidSeverity.APP] == 20_000

    asyncio.run(scenario())


def test_the_hardware_monitor_is_told_every_line_as_counts(tmp_path):
    """The monitor would clear a fault that is still being reported."""

    async def scenario() -> None:
        kernel = Kernel(tmp_path / "kern.log")
        kernel.write("")
        source = KernelLogSource()
        kernel.watcher = KernelLogWatcher(kernel.path, GPUS, kernel.take, 0.02, health=source)
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            kernel.write(xid(95) * 500 + xid(31, "0000:3b:00"))
            kernel.write("[1.0] Aborting journal on device sda.\n")
            await until(lambda: kernel.watcher.counters.kinds[KernelKind.DISK])
            told = source.read()
            kernel.write(xid(95) * 7)
            await until(lambda: kernel.watcher.counters.xids[XidSeverity.FATAL] == 507)
            await kernel.watcher.catch_up()
            told += source.read()
        by_device = {(one.device.index, one.metric, one.claim): 0 for one in told}
        for one in told:
            by_device[one.device.index, one.metric, one.claim] += one.count
        assert by_device == {
            (5, Metric.XID, Severity.FATAL): 507,
            (0, Metric.XID, Severity.WARNING): 1,
            (None, Metric.KERNEL_FAULT, Severity.WARNING): 1,
        }

    asyncio.run(scenario())


@pytest.mark.parametrize("_case", ["C10"])
def test_the_place_in_the_device_is_kept_over_a_restart(tmp_path, _case):
    """An Xid that came while the sidecar was being restarted would never be heard of."""
    counters = FollowCounters()
    cursor = tmp_path / "cursor.json"
    before = KernelDevice(KMSG, counters, cursor)
    assert before._record(f"4,41,7,-;{xid(13)[8:]}")
    before.judged()
    kept = Cursor(cursor).load()
    assert kept == 41
    after = KernelDevice(KMSG, counters, cursor)
    after._after = kept
    assert after._record(f"4,40,6,-;{xid(95)[8:]}") == []  # judged by the one before
    assert after._record(f"4,41,7,-;{xid(13)[8:]}") == []
    (late,) = after._record(f"4,42,8,-;{xid(79)[8:]}")
    assert isinstance(late, KernelLine)
    assert "79" in late.text
    behind = KernelDevice(KMSG, counters, cursor)
    behind._after = kept
    assert behind._record(f"4,99,9,-;{xid(79)[8:]}")[0] is Mark.GAP  # 42 to 98 are lost
    cursor.write_text(json.dumps({"boot": "another", "seq": 41}))
    assert Cursor(cursor).load() is None
    for damaged in ("", "[]", "{", '{"boot": 1}'):
        cursor.write_text(damaged)
        assert Cursor(cursor).load() is None


@pytest.mark.skipif(not os.access(KMSG, os.W_OK), reason="the kernel's log may not be written")
def test_the_kernels_own_log_is_read_record_by_record():
    """Containers often have no log file, only this device."""

    async def scenario() -> None:
        kernel = Kernel(KMSG)
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            KMSG.write_text("outrider kernel log test\n")
            await until(lambda: kernel.watcher.counters.lines >= 1)
            assert kernel.watcher.counters.lines >= 1
            assert kernel.findings == []  # our own line is no fault

    asyncio.run(scenario())


def test_an_inventory_names_its_devices_or_says_why_it_cannot():
    """An empty list without a reason would pass for a node without GPUs, or without faults."""
    inventory = list_gpus()
    assert inventory.gpus or inventory.reason
    for gpu in inventory.gpus:
        assert normalise_pci(gpu.pci) == gpu.pci
    assert list_gpus(timeout_s=0).reason
    assert GpuInventory(reason="no").by_pci() == {}


@pytest.mark.skipif(not os.access(KMSG, os.W_OK), reason="the kernel's log may not be written")
def test_what_a_program_writes_into_the_kernels_device_convicts_nobody(tmp_path):
    """Whoever may write there could take any node out of the job."""

    async def scenario() -> None:
        kernel = Kernel(KMSG)
        async with kernel.running():
            await until(lambda: kernel.watcher.available)
            KMSG.write_text("EXT4-fs (outrider-test): Remounting filesystem read-only\n")
            await until(lambda: kernel.watcher.counters.lines >= 1)
            await kernel.watcher.catch_up()
        assert kernel.findings == []
        assert kernel.watcher.counters.kinds[KernelKind.READ_ONLY] == 0

    asyncio.run(scenario())
