"""What a kernel log adds up to over time: storms, links, gaps, and what is forgotten."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout.clock import Instant, seconds
from sidecar.hardware.catalogue import XidOverride, XidSeverity, shipped
from sidecar.hardware.kernel_events import KernelFinding, KernelKind
from sidecar.hardware.kernel_judge import KernelJudge
from sidecar.hardware.kernel_line import KernelLine, LineReader, Mark, read_line, read_log
from sidecar.hardware.kernel_links import LinkLimits
from sidecar.hardware.kernel_tally import CODES_MAX, SUBJECTS_MAX
from sidecar.hardware.xid import parse_sxid, parse_xid

GPUS = {"0000:3b:00": 0, "0000:dc:00": 1, "0000:ed:00": 2, "0000:ba:00": 3, "0000:97:00": 4}


def at(second: float) -> Instant:
    return Instant(seconds(second))


def xid(code: int, pci: str = "0000:3b:00", text: str = "words", pid: object = 77) -> str:
    return f"NVRM: Xid (PCI:{pci}): {code}, pid={pid}, name=python3, {text}"


def convicted(found: list[KernelFinding]) -> list[tuple[str, int | None]]:
    return [(one.reason, one.gpu) for one in found if one.convicts]


@pytest.mark.parametrize("lines", [60_000], ids=["C49"])
def test_a_storm_is_one_incident_with_a_count_told_once_a_minute(lines):
    """One broken GPU would fill the store, the network and the log of everybody else."""
    judge = KernelJudge(GPUS)
    told = []
    for number in range(lines):  # ten minutes of it
        told += judge.take(xid(95, pid=number % 1000), at(number / 100))
    assert convicted(told) == [("Xid95", 0)]
    by_minute = [one for one in told if one.pid is None or one.count > 32]
    assert len(by_minute) <= 11
    assert len(told) <= 11 + 32  # the first processes are each named once
    subject = judge.subjects.get("gpu 0000:3b:00")
    assert subject is not None
    assert subject.count == lines
    assert judge.counters.xids == {("0000:3b:00", 95): lines}
    assert len(judge.subjects.__iter__().__next__().tallies) == 1


@pytest.mark.parametrize("_case", ["C44"])
def test_a_lost_gpu_is_told_by_its_address_and_the_uuid_that_was_learned(_case):
    """The driver cannot name a device that is gone: the worst fault would be the one not told."""
    judge = KernelJudge({})
    judge.take("NVRM: GPU at PCI:0000:3b:00: GPU-6d2f0c1e-0000-4000-8000-0123456789ab", at(0))
    known, unknown = judge.take(xid(79), at(1)), judge.take(xid(79, "0000:99:00"), at(1))
    assert [(one.pci, one.uuid) for one in (*known, *unknown)] == [
        ("0000:3b:00", "GPU-6d2f0c1e-0000-4000-8000-0123456789ab"),
        ("0000:99:00", ""),
    ]
    assert convicted([*known, *unknown]) == [("Xid79", None), ("Xid79", None)]


@pytest.mark.parametrize("code", [79, 119, 120], ids=["C46-79", "C46-119", "C46-120"])
def test_the_kernel_log_convicts_without_any_other_source(code):
    """The driver's own event interface is silent exactly when its firmware is stuck."""
    assert convicted(KernelJudge(GPUS).take(xid(code), at(0))) == [(f"Xid{code}", 0)]


@pytest.mark.parametrize("_case", ["C47"])
def test_what_an_earlier_boot_said_raises_nothing_now(_case):
    """A row that the reset has replaced would be alarmed about for ever."""
    judge = KernelJudge(GPUS)
    judge.take_log(f"{xid(63)}\n-- Boot {'ab' * 16} --\n", at(0))
    assert list(judge.subjects) == []
    entry = "_TRANSPORT=kernel\n_BOOT_ID={}\nMESSAGE={}\n\n"
    judge.take_log(entry.format("a" * 32, xid(64)) + entry.format("b" * 32, xid(31)), at(1))
    (subject,) = judge.subjects
    assert subject.codes == (31,)


@pytest.mark.parametrize("_case", ["C106"])
def test_a_known_code_convicts_and_an_unknown_one_warns(_case):
    """A list ages; what it does not know must neither convict nor be lost."""
    judge = KernelJudge(GPUS)
    assert convicted(judge.take(xid(79), at(0))) == [("Xid79", 0)]
    (found,) = judge.take(xid(174, "0000:dc:00"), at(1))
    assert (found.severity, found.convicts) == (XidSeverity.WARNING, False)
    assert "not in the catalogue" in found.message


@pytest.mark.parametrize("_case", ["C110"])
def test_the_root_of_an_nvlink_trouble_is_told_from_its_partners(_case):
    """Five healthy GPUs would be replaced and the broken one kept."""
    judge = KernelJudge(GPUS)
    told = judge.take(xid(45, "0000:dc:00", "Ch 1 caused by previous Xid 149"), at(0))
    for pci in ("0000:ed:00", "0000:ba:00", "0000:97:00"):
        told += judge.take(xid(45, pci, "Ch 2 caused by previous Xid 145"), at(0))
    assert convicted(told) == [("Xid149", 1)]
    assert judge.roots == ("0000:dc:00",)
    assert "its own line was not seen" in told[0].message


@pytest.mark.parametrize(
    ("code", "severity"),
    [(63, "warning"), (94, "app"), (154, "info"), (13, "app"), (31, "app")],
    ids=["C102-63", "C102-94", "C102-154", "C102-13", "C102-31"],
)
def test_one_table_says_how_bad_a_disputed_code_is_and_a_site_may_differ(code, severity):
    """Public lists disagree; a site that cannot say otherwise patches the code."""
    meaning = shipped().meaning_of(code)
    assert meaning.severity == severity
    assert meaning.source
    own = shipped().with_overrides(
        {code: XidOverride(severity=XidSeverity.FATAL, action="call us")}
    )
    found = KernelJudge(GPUS, catalogue=own).take(xid(code), at(0))
    assert convicted(found) == [(f"Xid{code}", 0)]
    assert "call us" in found[0].message


def test_a_site_may_also_say_that_a_code_takes_nothing():
    """A code known to be noise on a site's boards would drain it node by node."""
    own = shipped().with_overrides({149: XidOverride(severity=XidSeverity.WARNING)})
    line = xid(149, text="NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)")
    assert convicted(KernelJudge(GPUS, catalogue=own).take(line, at(0))) == []
    assert convicted(KernelJudge(GPUS).take(line, at(0))) == [("Xid149", 0)]


def test_a_mended_gpu_is_news_again():
    """Its second failure would be taken for the echo of its first."""
    judge = KernelJudge(GPUS)
    none = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    assert convicted(judge.take(xid(95), at(0)))
    assert not convicted(judge.take(xid(95), at(1)))
    assert not convicted(judge.take(xid(154, text=none), at(2)))
    assert convicted(judge.take(xid(95), at(3)))


def test_a_code_that_turns_out_worse_is_told_at_once():
    """A link that first only stuttered would be taken for well after it had died."""
    judge = KernelJudge(GPUS)
    form = "RLW_SRC_TRACK {} XC0 i0 Link 00 (0x00000007 0x{} 0x00000000)"
    assert not convicted(judge.take(xid(145, text=form.format("Nonfatal", "00000002")), at(0)))
    assert convicted(judge.take(xid(145, text=form.format("Fatal", "00000001")), at(1)))


def test_a_program_error_names_every_new_process():
    """The crash of a restarted worker would stand without its cause."""
    judge = KernelJudge(GPUS)
    told = [
        one.pid for second in range(3) for one in judge.take(xid(31, pid=second + 7), at(second))
    ]
    assert told == [7, 8, 9]


def test_a_link_that_stays_down_takes_its_node_and_is_told_once():
    """Every collective through it waits until its time-out."""
    judge = KernelJudge(GPUS, links=LinkLimits(down_fatal_s=60))
    judge.take("mlx5_core 0000:ab:00.0 mlx5_0: Port: 1 Link DOWN", at(0))
    assert judge.tick(at(59)) == []
    (found,) = judge.tick(at(60))
    assert (found.reason, found.convicts) == ("LinkStaysDown", True)
    assert judge.tick(at(200)) == []
    judge.take("mlx5_core 0000:ab:00.0 mlx5_0: Port: 1 Link ACTIVE", at(201))
    judge.take("mlx5_core 0000:ab:00.0 mlx5_0: Port: 1 Link DOWN", at(300))
    assert judge.tick(at(320)) == []
    assert judge.flaps == {"port mlx5_0:1": 1}


def test_a_port_for_administration_may_stay_down():
    """A cable that nobody needs would drain a healthy node."""
    judge = KernelJudge(GPUS)
    told = []
    for number in range(20):
        told += judge.take("igb 0000:01:00.0 eno1: NIC Link is Down", at(number))
        told += judge.take("igb 0000:01:00.0 eno1: NIC Link is Up 1000 Mbps", at(number + 0.5))
    judge.take("igb 0000:01:00.0 eno1: NIC Link is Down", at(30))
    assert convicted([*told, *judge.tick(at(3000))]) == []
    assert judge.flaps == {"port eno1": 20}


def test_lost_records_are_counted_and_told_once_a_minute():
    """What is not known would be read as well."""
    judge = KernelJudge(GPUS)
    told = [judge.take_read(Mark.GAP, at(second)) for second in (0, 1, 59, 60)]
    assert [len(found) for found in told] == [1, 0, 0, 1]
    assert judge.counters.gaps == 4
    assert judge.gap_at == at(60)
    assert told[0][0].kind is KernelKind.LOG_GAP


def test_memory_is_bounded_and_a_dead_gpu_is_not_forgotten():
    """A log full of names would push out the one that matters, or the whole sidecar."""
    judge = KernelJudge(GPUS)
    judge.take(xid(79), at(0))
    for number in range(3 * SUBJECTS_MAX):
        judge.take(f"Killed process {number} (x) total-vm:1kB", at(1))
        judge.take(f"mlx5_core 0000:ab:00.0 p{number}: Link down", at(1))
        judge.take(f"NVRM: Xid (PCI:0000:{number % 256:02x}:{number % 32:02x}): 13, x", at(1))
        judge.take(xid(number + 200, "0000:dc:00"), at(1))
    assert len(list(judge.subjects)) <= SUBJECTS_MAX
    assert len(judge.flaps) <= SUBJECTS_MAX
    assert len(judge.counters.xids) <= 4096
    assert judge.subjects.forgotten > 0
    noisy = judge.subjects.get("gpu 0000:dc:00")
    assert noisy is not None
    assert len(noisy.tallies) == CODES_MAX
    assert not convicted(judge.take(xid(79), at(2)))


PREFIXES = st.sampled_from(
    [
        "",
        "4,1,2,-;",
        "<4>[1.5] ",
        "Feb 23 16:24:18 node kernel: ",
        "_TRANSPORT=kernel\n_BOOT_ID=1\nMESSAGE=",
        '{"_TRANSPORT":"kernel","MESSAGE":"',
        "NVRM: Xid (PCI:",
        "NVRM: Xid (PCI:0000:3b:00): 145, ",
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x",
        "nvidia-nvswitch1: SXid (PCI:0000:05:00.0): ",
        "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ",
        "Memory cgroup out of memory: Killed process ",
        "pcieport 0000:37:01.0: AER: Uncorrected (",
        "EXT4-fs (md0): ",
        "INFO: task ",
    ]
)
TEXT = st.one_of(
    st.text(max_size=300),
    st.binary(max_size=300).map(lambda data: data.decode("utf-8", "replace")),
    st.text(alphabet="0123456789:.,()x[]- \n", max_size=300),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(PREFIXES, TEXT), max_size=20))
def test_no_text_breaks_the_judge(pieces):
    """One odd line would end the watch over the hardware."""
    judge = KernelJudge(GPUS)
    text = "\n".join(prefix + words for prefix, words in pieces)
    for found in judge.take_log(text, at(0)):
        assert found.message
    for second, line in enumerate(text.split("\n")):
        judge.take(line, at(second))
        parse_xid(line)
        parse_sxid(line)
        assert read_line(line) is None or isinstance(read_line(line), KernelLine | Mark)
    judge.tick(at(10_000))
    assert len(list(judge.subjects)) <= SUBJECTS_MAX


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_no_bytes_break_the_reader(data):
    """A torn log would be a dead watch."""
    text = data.decode("utf-8", "replace")
    reader = LineReader()
    for line in text.split("\n"):
        reader.feed(line)
    assert all(isinstance(found, KernelLine | Mark) for found in read_log(text))


def test_a_journal_entry_is_told_before_its_end_is_seen():
    """The last entry of a quiet journal would be heard of with the next one, hours later."""
    reader = LineReader()
    lines = ["__CURSOR=a", "_TRANSPORT=kernel", f"MESSAGE={xid(79)}", "_BOOT_ID=x", "__CURSOR=b"]
    told = [reader.feed(line) for line in [*lines, "_TRANSPORT=syslog", f"MESSAGE={xid(79)}"]]
    assert [isinstance(one, KernelLine) for one in told] == [False, False, True] + [False] * 4


@pytest.mark.parametrize("dropped", [False, True])
def test_a_journals_binary_form_is_read(dropped):
    """A message with one odd character would be no message."""
    length = len(xid(13)).to_bytes(8, "little").decode("latin-1")
    length = length.replace("\0", "") if dropped else length
    reader = LineReader()
    lines = ["__CURSOR=a", "_TRANSPORT=kernel", "MESSAGE", f"{length}{xid(13)}"]
    (told,) = [one for line in lines if (one := reader.feed(line)) is not None]
    assert isinstance(told, KernelLine)
    assert told.text == xid(13)


def test_an_endless_line_is_looked_at_only_so_far():
    """One line of a megabyte would stop everything else."""
    long = xid(13, text="x" * 2_000_000)
    (found,) = KernelJudge(GPUS).take(long, at(0))
    assert len(found.line) <= 1000
    for hostile in (":" * 100_000, "a " * 100_000 + "kernel: ", "INFO: task " + ":1" * 50_000):
        assert KernelJudge(GPUS).take(hostile, at(0)) == []


@pytest.mark.parametrize("before", ["6,1,1000000,-;", "[    1.000000] ", "3,1,1,-;\\x1b[2J"])
def test_a_process_name_in_a_kernel_line_moves_no_cursor(before):
    """Anybody may name a process; a log that is shown would clear the reader's screen."""
    line = before + "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=\x1b[2J\x07py, fell off the bus"
    judge = KernelJudge(GPUS)
    for finding in judge.take(line.replace("\\x1b[2J", ""), at(0)):
        assert finding.message.isprintable()
        assert finding.line.isprintable()
    assert judge.counters.xids
    assert all(one.message.isprintable() for one in KernelJudge(GPUS).take(line, at(0)))
