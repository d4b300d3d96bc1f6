"""Arbitrary bytes in the kernel's log."""

import tempfile
import unicodedata
from pathlib import Path

from hypothesis import strategies as st

from scout.clock import Instant, seconds
from sidecar.hardware.kernel_events import KernelFinding
from sidecar.hardware.kernel_judge import KernelJudge
from sidecar.hardware.kernel_line import read_record
from sidecar.hardware.kernel_log import KernelLogWatcher
from sidecar.hardware.xid import read_sxid, read_xid
from tests.fuzz.budget import fuzz

GPUS = {"0000:3b:00": 0, "0000:4b:00": 1}
BODIES = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:4b:00 GPU-I:01 GPU-CI:02): 13, Graphics Exception: ESR 0x405840=0xa",
    "NVRM: Xid (PCI:0000:3b:00): 45, pid='<unknown>', name=<unknown>, Ch 00000010",
    "NVRM: Xid (PCI:0000:3b:00): 45, pid=1, name=a, caused by previous Xid 31",
    "NVRM: Xid (PCI:0000:3b:00): 95, pid=1, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    "NVRM: Xid (PCI:0000:3b:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 03 (0x00000004 0x0 0x0 0x0)",
    "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (Reset)",
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "NVRM: GPU at PCI:0000:3b:00: GPU-12345678-1234-1234-1234-123456789abc",
    "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN",
    "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE",
    "Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB",
    "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",
    "mce: [Hardware Error]: Machine check events logged",
    "EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455: inode #2: comm x: reading directory",
    "INFO: task python:77 blocked for more than 120 seconds.",
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:99]",
)
HEADS = (
    "6,1,1000000,-;", "3,99,1000001,c;", "[   12.345678] ", "<3>", "<6>[12.3] ", "kernel: ",
    "Jan  1 00:00:00 host kernel: ", "2026-01-01T00:00:00+00:00 host kernel: [    1.000000] ", "",
    '{"_TRANSPORT":"kernel","MESSAGE":"',
    "Jan  1 00:00:00 host kernel: message repeated 3 times: [ ",
)  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> str:
    """Return what a log may hold: real words, mangled ones, and noise."""
    body = draw(st.one_of(st.sampled_from(BODIES), st.text(max_size=60)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(body)))
        end = at + draw(st.integers(0, 6))
        body = body[:at] + draw(st.text(max_size=6)) + body[end:]
    return draw(st.sampled_from(HEADS)) + body


def test_any_line_of_a_kernel_log_is_judged_or_passed_over() -> None:
    """One strange line would end the watch over every device of the node."""

    def check(log: list[str]) -> None:
        judge = KernelJudge(GPUS)
        found: list[KernelFinding] = []
        for number, line in enumerate(log):
            found += judge.take(line, Instant(seconds(number)))
            read_xid(line)
            read_sxid(line)
        found += judge.take_log("\n".join(log), Instant(seconds(100)))
        found += judge.tick(Instant(seconds(10_000)))
        for finding in found:
            assert finding.reason
            assert not any(unicodedata.category(char) == "Cc" for char in finding.message)
            assert finding.gpu in (None, 0, 1)

    fuzz(st.lists(lines(), max_size=12), check)


def test_what_a_program_wrote_convicts_nobody_however_it_is_written() -> None:
    """Anybody who may write to the log could take any node out of the job."""

    def check(given: tuple[int, int, str]) -> None:
        facility, level, line = given
        record = f"{facility * 8 + level},1,1000000,-;{line}"
        one = read_record(record)
        judge = KernelJudge(GPUS)
        found = [] if one is None else judge.take_read(one, Instant(0))
        assert not any(finding.convicts or finding.pid for finding in found)

    fuzz(st.tuples(st.integers(1, 23), st.integers(0, 7), lines()), check)


def test_any_bytes_in_a_kernel_log_file_are_read_without_an_error() -> None:
    """A torn write would blind the node, and blindness looks like health."""

    def check(chunks: list[bytes]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kern.log")
            path.touch()
            watcher = KernelLogWatcher(path, GPUS, lambda _found: None)
            watcher._read()
            for chunk in chunks:
                with path.open("ab") as file:
                    file.write(chunk)
                watcher._read()
            watcher._close()
            watcher._thread.shutdown()
            assert watcher.counters.read_errors == 0
            assert watcher.counters.bytes_read == sum(map(len, chunks))

    text = lines().map(lambda line: line.encode(errors="surrogatepass") + b"\n")
    fuzz(st.lists(st.one_of(st.binary(max_size=80), text), max_size=6), check)
