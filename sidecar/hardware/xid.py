"""What the NVIDIA driver's Xid lines in a kernel log mean.

Decides which line is an Xid, of which device, and how bad that code is.  The catalogue is data,
after NVIDIA's published one for data centre GPUs.  A code that is not in it is its own answer:
worth a look, never fatal.  It knows neither files nor which GPU has which index.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class XidSeverity(StrEnum):
    """How much an Xid says about the device."""

    FATAL = "fatal"
    """The device cannot be trusted with another worker until somebody acts."""
    APP = "app"
    """The process on it ends; the device itself is well."""
    WARNING = "warning"
    """Work goes on; the device wants attention."""
    INFO = "info"
    """A note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidMeaning:
    """What a code stands for and what to do about it."""

    code: int
    meaning: str
    severity: XidSeverity
    action: str
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """One Xid line.  ``pci`` is spelled by `normalise_pci`, ``text`` by the driver."""

    code: int
    pci: str
    pid: int | None
    process: str | None
    text: str

    @property
    def meaning(self) -> XidMeaning:
        """What the code stands for."""
        return meaning_of(self.code)


_FATAL, _APP, _WARNING, _INFO = XidSeverity
_RESET = "reset the GPU"
_REPLACE = "drain the node and have the GPU examined"
_RESTART = "restart the job"

_CATALOGUE: Final[tuple[tuple[int, str, XidSeverity, str], ...]] = (
    (13, "graphics engine exception", _APP, _RESTART),
    (31, "GPU memory page fault", _APP, _RESTART),
    (32, "invalid or corrupted push buffer stream", _APP, _RESTART),
    (43, "the GPU stopped processing one channel", _APP, _RESTART),
    (45, "preemptive cleanup after an earlier error", _APP, "look for the Xid before it"),
    (46, "the GPU stopped processing", _FATAL, _RESET),
    (48, "double bit ECC error", _FATAL, _RESET),
    (61, "internal micro-controller breakpoint or warning", _WARNING, _RESET),
    (62, "internal micro-controller halt", _FATAL, _RESET),
    (63, "memory row remapping recorded", _WARNING, "reset the GPU when the job is over"),
    (64, "memory row remapping failed", _FATAL, _REPLACE),
    (68, "video processor exception", _APP, _RESTART),
    (69, "graphics engine class error", _APP, _RESTART),
    (74, "NVLink error", _FATAL, _REPLACE),
    (79, "the GPU has fallen off the bus", _FATAL, _REPLACE),
    (92, "high rate of single bit ECC errors", _WARNING, "watch the GPU"),
    (94, "contained memory error", _APP, _RESTART),
    (95, "uncontained memory error", _FATAL, _RESET),
    (109, "context switch timeout", _APP, _RESTART),
    (119, "GSP remote procedure call timeout", _FATAL, _RESET),
    (120, "GSP error", _FATAL, _RESET),
    (121, "corrected chip-to-chip NVLink error", _INFO, "nothing"),
    (137, "NVLink privilege error of one process", _APP, _RESTART),
    (140, "unrecovered ECC error", _FATAL, _RESET),
    (143, "the GPU did not initialise", _FATAL, _RESET),
    (154, "the driver's recovery advice changed", _WARNING, "follow the driver's advice"),
)  # fmt: skip

CATALOGUE: Final[Mapping[int, XidMeaning]] = MappingProxyType(
    {
        code: XidMeaning(code=code, meaning=meaning, severity=severity, action=action)
        for code, meaning, severity, action in _CATALOGUE
    }
)

FATAL_CODES: Final = frozenset(
    code for code, meaning in CATALOGUE.items() if meaning.severity is XidSeverity.FATAL
)


def meaning_of(code: int) -> XidMeaning:
    """Return what ``code`` stands for; a code that is not known is a warning and says so."""
    known = CATALOGUE.get(code)
    if known is not None:
        return known
    return XidMeaning(
        code=code,
        meaning="not in the catalogue",
        severity=XidSeverity.WARNING,
        action="look the code up",
        known=False,
    )


# A line is the kernel's own: alone, after a time in brackets, as a /dev/kmsg record, or after
# what syslog and journald put before "kernel:".  A program that quotes such a line convicts nobody.
_XID: Final = re.compile(
    r"^(?:<\d+>)?(?:\d+,\d+,\d+,[^;]*;)?"
    r"(?:(?:\S*[^\s:] +){0,5}kernel: )?"
    r"(?:\[[^\]]*\] *)*"
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)(?: [^)]*)?\): (?P<code>\d{1,6})\b,? *"
    r"(?:pid=(?P<pid>[^,]*)(?:, *|$))?(?:name=(?P<name>[^,]*)(?:, *|$))?(?P<text>.*)"
)
_PCI: Final = re.compile(
    r"(?:PCI:)?(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})"
    r"(?:\.[0-7])?",
    re.IGNORECASE,
)


def parse_xid(line: str) -> XidEvent | None:
    """Return the Xid in a kernel log line, or None when there is none."""
    if "Xid" not in line:
        return None
    found = _XID.match(line)
    if found is None:
        return None
    pci = normalise_pci(found["pci"])
    if pci is None:
        return None
    pid = (found["pid"] or "").strip("'\"")
    name = (found["name"] or "").strip("'\"")
    return XidEvent(
        code=int(found["code"]),
        pci=pci,
        pid=int(pid) if pid.isascii() and pid.isdigit() else None,
        process=name if name and name != "<unknown>" else None,
        text=found["text"].strip(),
    )


def normalise_pci(address: str) -> str | None:
    """Return ``domain:bus:device`` in lower case, or None when it is no PCI address.

    The driver, NVML and lspci write one address in four ways: with and without domain, with four
    and with eight digits of it, with and without function.  A GPU is one device, so the function
    is left out.
    """
    found = _PCI.fullmatch(address.strip())
    if found is None:
        return None
    domain, bus, device = (int(found[part] or "0", 16) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}"
