"""Xid lines of the NVIDIA driver."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.hardware.xid import (
    CATALOGUE,
    FATAL_CODES,
    XidSeverity,
    meaning_of,
    normalise_pci,
    parse_xid,
)

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."


@pytest.mark.parametrize(
    "before",
    [
        "",
        "[ 6781.548779] ",
        "<3>[ 6781.548779] ",
        "[Fri Aug 30 11:43:09 2024] ",
        "Nov 28 10:00:00 node-7 kernel: ",
        "Nov 28 10:00:00 node-7 kernel: [ 6781.548779] ",
        "2024-11-28T10:00:00.123456+00:00 node-7 kernel: ",
        "kernel: [ 6781.548779] ",
        "3,339,5140900,-;",
    ],
)
def test_an_xid_is_read_whatever_stands_before_it(before):
    """A fatal device would stay in the job because of how its log is kept."""
    event = parse_xid(before + XID)
    assert event is not None
    assert (event.code, event.pci, event.pid, event.process) == (79, "0000:3b:00", 1234, "python")
    assert event.text == "GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("NVRM: Xid (PCI:0000:2b:00): 79, lost", (79, "0000:2b:00", None, None, "lost")),
        (
            "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics",
            (13, "0000:cb:00", None, None, "Graphics"),
        ),
        ("NVRM: Xid (0000:01:00): 3, C 0005", (3, "0000:01:00", None, None, "C 0005")),
        ("NVRM: Xid (PCI:0002:00:01.0): 48, DBE", (48, "0002:00:01", None, None, "DBE")),
        (
            "NVRM: Xid (PCI:0000:61:00 GPU-I:05): 45, pid=7, Ch 8",
            (45, "0000:61:00", 7, None, "Ch 8"),
        ),
        ("NVRM: Xid (PCI:0000:61:00): 45, pid=7", (45, "0000:61:00", 7, None, "")),
        ("NVRM: Xid (PCI:0000:61:00): 999", (999, "0000:61:00", None, None, "")),
    ],
)
def test_every_spelling_of_the_driver_is_read(line, wanted):
    """Each driver version writes it a little differently."""
    event = parse_xid(line)
    assert event is not None
    assert (event.code, event.pci, event.pid, event.process, event.text) == wanted


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: GPU at PCI:0000:2b:00: GPU-0b11d014",
        "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 30",
        f"Nov 28 10:00:00 node-7 outrider[31]: {XID}",
        f"Nov 28 10:00:00 node-7 outrider[31]: Nov 28 10:00:00 node-7 kernel: {XID}",
        f"saw {XID}",
        "NVRM: Xid (PCI:zz): 79, x",
        "NVRM: Xid (PCI:0000:3b:00): many",
    ],
)
def test_a_line_that_is_no_xid_of_the_kernel_is_none(line):
    """A daemon that quotes an Xid in the system log would convict the GPU once more."""
    assert parse_xid(line) is None


@pytest.mark.parametrize(
    "address",
    ["0000:3B:00", "00000000:3B:00.0", "PCI:0000:3b:00.0", "3b:00.0", " 0000:3b:00 ", "3b:0"],
)
def test_one_device_has_one_spelling(address):
    """NVML and the kernel would speak of two devices, and neither would be found."""
    assert normalise_pci(address) == "0000:3b:00"


@pytest.mark.parametrize("address", ["", "3b", "GPU-1", "0000:3b:00.9", "0000:3b:00:00:00"])
def test_what_is_no_address_is_none(address):
    """A made-up address might hit another device."""
    assert normalise_pci(address) is None


def test_a_code_that_is_not_known_is_a_warning_and_says_so():
    """A new driver's note would take a healthy GPU out of the job."""
    meaning = meaning_of(987)
    assert (meaning.severity, meaning.known) == (XidSeverity.WARNING, False)
    assert "not in the catalogue" in meaning.meaning


def test_hardware_is_fatal_and_a_programs_own_error_is_not():
    """A bug in a script would drain node after node; a dead GPU would be given work again."""
    assert {48, 64, 74, 79, 95, 119, 120} <= FATAL_CODES
    for code in (13, 31, 43, 94):
        assert CATALOGUE[code].severity is XidSeverity.APP
    assert CATALOGUE[45].severity is XidSeverity.FOLLOW_UP
    assert CATALOGUE[63].severity is XidSeverity.WARNING


def test_every_entry_says_what_it_is_and_what_to_do():
    """A finding without a way out leaves the person on call where they were."""
    for code, meaning in CATALOGUE.items():
        assert meaning.code == code
        assert meaning.meaning
        assert meaning.action


@given(st.text())
def test_no_line_breaks_the_parser(text):
    """One odd line would end the watch over the hardware."""
    for line in (text, f"NVRM: Xid {text}", f"NVRM: Xid (PCI:{text}): 79, {text}"):
        event = parse_xid(line)
        assert event is None or event.code >= 0
