"""The kernel's device when it fails, ends, or does not hold the place that was kept."""

import asyncio
import errno
import json
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.events import HardwareFinding
from sidecar.hardware import kernel_sources
from sidecar.hardware.kernel_line import KernelLine, Mark
from sidecar.hardware.kernel_log import KernelLogWatcher
from sidecar.hardware.kernel_sources import (
    RECORDS_MAX,
    REOPEN_S_MAX,
    REOPEN_S_MIN,
    Cursor,
    KernelDevice,
    open_source,
)
from sidecar.logs.follow import FollowCounters

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
FATAL = "NVRM: Xid (PCI:0000:86:00): 79, pid=77, name=python, GPU has fallen off the bus."


class Ring:
    """A kernel whose log is ours: the system calls that `KernelDevice` makes, and their errors.

    ``say`` writes a record; a number in ``answers`` is the error that a read in its place gets.
    """

    def __init__(self, first: int = 0) -> None:
        self.records: list[tuple[int, str]] = []
        self.first = first
        self.answers: deque[int] = deque()
        self.opened = 0
        self._next = 0

    def say(self, text: str = FATAL) -> None:
        seq = self.first + len(self.records)
        self.records.append((seq, f"4,{seq},{seq + 1},-;{text}\n"))

    def open(self, _path: Path, _flags: int) -> int:
        self.opened += 1
        return 1000

    def lseek(self, _fd: int, _offset: int, whence: int) -> int:
        self._next = len(self.records) if whence == os.SEEK_END else 0
        return 0

    def read(self, _fd: int, _size: int) -> bytes:
        if self.answers and (number := self.answers.popleft()):
            raise OSError(number, os.strerror(number))
        if self._next >= len(self.records):
            raise BlockingIOError
        self._next += 1
        return self.records[self._next - 1][1].encode()

    def close(self, _fd: int) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    made = Ring()
    monkeypatch.setattr(kernel_sources, "os", made)
    return made


def device(cursor: Path | None = None) -> KernelDevice:
    return KernelDevice(Path("/dev/kmsg"), FollowCounters(), cursor)


def seqs(found: list[KernelLine | Mark]) -> list[int | Mark | None]:
    return [one if isinstance(one, Mark) else one.seq for one in found]


def read_until(source: KernelDevice, condition: Callable[[], object]) -> list[KernelLine | Mark]:
    found, deadline = source.read(), time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
        found += source.read()
    return found


def test_c13_records_lost_to_a_full_ring_are_a_gap_and_reading_goes_on(ring):
    """A burst of messages would end the watch over a node's hardware."""
    source = device()
    assert source.read() == []
    ring.say()
    ring.answers.extend([errno.EPIPE])
    assert seqs(source.read()) == [Mark.GAP, 0]
    assert not source.missing
    assert ring.opened == 1


def test_c13_any_other_error_opens_the_device_again_and_loses_nothing(ring):
    """The reader would look alive and report nothing for days."""
    source = device()
    source.read()
    for _ in range(3):
        ring.say()
    ring.answers.extend([0, errno.EPIPE, 0, errno.EINVAL])
    # What came before the error is judged; during the error nothing is called well.
    assert seqs(source.read()) == [0, Mark.GAP, 1]
    assert source.missing
    ring.say()
    found = read_until(source, lambda: not source.missing)
    assert seqs(found) == [2, 3]
    assert ring.opened == 2


def test_c13_a_device_that_stays_broken_is_asked_less_and_less(ring):
    """A sidecar would spend the node's time and fill its log with one error."""
    source = device()
    ring.answers.extend([errno.EINVAL] * 10_000)
    read_until(source, lambda: ring.opened == 3)
    assert source.missing
    assert 4 * REOPEN_S_MIN <= source._reopen_s <= REOPEN_S_MAX
    before = ring.opened
    for _ in range(1000):
        source.read()
    assert ring.opened - before <= 1


def test_c13_a_device_that_only_reports_loss_does_not_keep_the_thread(ring):
    """One read would never return, and neither would those that wait for it."""
    source = device()
    ring.answers.extend([errno.EPIPE] * (RECORDS_MAX + 5))
    assert seqs(source.read()) == [Mark.GAP] * RECORDS_MAX
    assert source.behind
    assert seqs(source.read()) == [Mark.GAP] * 5
    assert not source.behind


def test_c13_what_passed_while_nothing_was_known_is_a_gap(ring):
    """A fault that came during the trouble would read as "none came"."""
    source = device()
    ring.say("before the start")
    source.read()
    ring.answers.append(errno.EIO)
    source.read()
    ring.say()
    assert Mark.GAP in read_until(source, lambda: not source.missing)


def test_c13_a_null_device_in_the_kernels_place_is_no_healthy_log(caplog):
    """Containers often have one there: its reader would be up, and blind."""
    null = Path(os.devnull)
    source = open_source(null, FollowCounters(), None)
    assert isinstance(source, KernelDevice)
    assert source.read() == []
    assert source.missing
    assert "cannot be read, trying on: it ends" in caplog.text

    async def scenario() -> None:
        found: list[HardwareFinding] = []
        watcher = KernelLogWatcher(null, {}, found.append, poll_s=0.01)
        task = asyncio.create_task(watcher.run())
        async with asyncio.timeout(PATIENCE_S):
            while watcher.counters.read_errors < 2:  # noqa: ASYNC110 - the world changes
                await asyncio.sleep(0.01)
        assert not watcher.available  # the exporter's `outrider_kernel_log_available`
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(scenario())


@pytest.mark.parametrize(("kept", "why"), [(3, "overwritten"), (99, "never-written")])
def test_c12_a_place_that_is_gone_means_all_that_is_left_and_a_gap(ring, tmp_path, kept, why):
    """A reader would start from nothing, or wait for its place for ever."""
    cursor = Cursor(tmp_path / "cursor.json")
    cursor.save(kept)
    assert json.loads(cursor.path.read_text())["seq"] == kept, why
    ring.first = 10
    for _ in range(3):
        ring.say()
    source = device(cursor.path)
    assert seqs(source.read()) == [Mark.GAP, 10, 11, 12]
    ring.say()
    assert seqs(source.read()) == [13]
    source.judged()
    assert Cursor(cursor.path).load() == 13


def test_c12_a_place_of_the_last_boot_is_none_and_programs_text_is_not_the_kernels(ring, tmp_path):
    """Yesterday's fault would convict a mended node, and anybody could write one."""
    cursor = tmp_path / "cursor.json"
    cursor.write_text(json.dumps({"boot": "an earlier one", "seq": 1}))
    ring.say()
    source = device(cursor)
    assert source.read() == []
    ring.records.append((1, f"12,1,7,-;{FATAL}\n"))  # facility 1: written by a program
    ring.say()
    assert seqs(source.read()) == [2]
