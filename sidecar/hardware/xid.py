"""What the NVIDIA driver's Xid and SXid lines in a kernel log mean.

Decides which line is one, of which device, and how bad it is: by the code, and by what the line
says beyond it.  Whether the kernel wrote a line at all is decided by `sidecar.hardware.kernel_line`
and what the codes stand for by `sidecar.hardware.catalogue`.  It knows neither files nor which
GPU has which index.
"""

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from sidecar.hardware.catalogue import (
    CODE_MAX,
    Catalogue,
    XidAction,
    XidMeaning,
    XidScope,
    XidSeverity,
    action_words,
    shipped,
)
from sidecar.hardware.kernel_line import kernel_text
from sidecar.hardware.pci import normalise_pci
from sidecar.whole_numbers import whole_number

__all__ = [
    "CATALOGUE",
    "FATAL_CODES",
    "Cleanup",
    "Containment",
    "LinkError",
    "NvlinkReport",
    "RecoveryAdvice",
    "SxidEvent",
    "XidAction",
    "XidDetail",
    "XidEvent",
    "XidMeaning",
    "XidScope",
    "XidSeverity",
    "meaning_of",
    "normalise_pci",
    "parse_sxid",
    "parse_xid",
    "read_sxid",
    "read_xid",
]

CATALOGUE: Final = shipped().codes
FATAL_CODES: Final = shipped().fatal_codes()

FOLLOW_UP_XID: Final = 45
CONTAINED_XIDS: Final = (94, 95)
NVLINK_XID: Final = 74
NVLINK5_XIDS: Final = range(144, 151)
ADVICE_XID: Final = 154
LOST_XID: Final = 79
"""The code of a GPU that fell off the bus, also where the driver says so without a code."""

ADVICE_STEPS: Final = {
    0: XidAction.NONE,
    1: XidAction.RESET_GPU,
    2: XidAction.REBOOT_NODE,
    3: XidAction.CHECK_NVLINK,
    4: XidAction.RESET_GPU_LATER,
}
"""Xid 154 names what the driver wants done by these numbers."""
ADVICE_BINDING: Final = frozenset({1, 2, 3})
"""Until it is done the GPU takes no new work; the others can wait for the end of the job."""


def meaning_of(code: int) -> XidMeaning:
    """Return what ``code`` stands for; a code that is not known is a warning and says so."""
    return shipped().meaning_of(code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleanup:
    """Xid 45: a channel was cleaned up, because of the Xid ``previous`` if that is known."""

    previous: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """Xid 94 and 95: whether a reset is needed now (``reset``) or after the work (``drain``)."""

    reset: bool
    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkError:
    """Xid 74: the link that reported."""

    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkReport:
    """Xid 144 to 150.  ``link`` -1 is the driver's word for no particular one.

    ``fatal`` None: the line says neither.  ``subcode`` is why a link went down (six bits of the
    first word), ``status`` the second word.  ``injected``: somebody made this error on purpose.
    """

    unit: str
    fatal: bool | None
    cross_contained: bool
    injected: bool
    link: int
    intr_info: int
    status: int | None

    @property
    def subcode(self) -> int:
        """Why a link went down."""
        return self.intr_info >> 20 & 0x3F

    @property
    def promoted(self) -> bool:
        """Whether the unit's own fatal bit is set; its place moved with the driver's branch R575.

        The older layout has the source (never zero there, below 8) in the lowest five bits and
        the unit above; the newer one has the unit alone.
        """
        older = self.intr_info & 0x1F == _OLD_SOURCE.get(self.unit, -1)
        return bool(self.intr_info & (1 << 10 if older else 1 << 7))


_OLD_SOURCE: Final = {"RLW_RXPIPE": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAdvice:
    """Xid 154: what the driver wants done, before and now, by number and in its own words."""

    before: int
    now: int
    words: str

    @property
    def step(self) -> XidAction:
        """What to do."""
        return ADVICE_STEPS.get(self.now, XidAction.FOLLOW_DRIVER)


XidDetail: TypeAlias = Cleanup | Containment | LinkError | NvlinkReport | RecoveryAdvice


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """One Xid line.  ``pci`` is spelled by `normalise_pci`, ``text`` by the driver.

    ``gpu_instance`` and ``compute_instance`` name the MIG device, if the driver does.
    """

    code: int
    pci: str
    pid: int | None
    process: str | None
    text: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    detail: XidDetail | None = None

    @property
    def meaning(self) -> XidMeaning:
        """What the code stands for."""
        return meaning_of(self.code)

    @property
    def previous(self) -> int | None:
        """The Xid that this one follows from, as the driver says."""
        return self.detail.previous if isinstance(self.detail, Cleanup) else None

    @property
    def link(self) -> int | None:
        """The NVLink that is meant."""
        return self.detail.link if isinstance(self.detail, LinkError | NvlinkReport) else None

    @property
    def injected(self) -> bool:
        """Whether somebody made this error on purpose."""
        return isinstance(self.detail, NvlinkReport) and self.detail.injected

    @property
    def severity(self) -> XidSeverity:
        """How bad it is, by the shipped catalogue."""
        return self.judged(shipped())[0]

    def judged(self, catalogue: Catalogue) -> tuple[XidSeverity, str]:
        """Return how bad it is and what to do, by code and by what the line adds to it."""
        meaning = catalogue.meaning_of(self.code)
        if meaning.overridden:
            return meaning.severity, meaning.action
        match self.detail:
            case Cleanup(previous=previous) if previous is not None:
                cause = catalogue.meaning_of(previous)
                if cause.severity is XidSeverity.APP:
                    return XidSeverity.APP, cause.action
            case Containment(reset=True) if meaning.severity is XidSeverity.APP:
                return XidSeverity.FATAL, action_words(XidAction.RESET_GPU)
            case NvlinkReport() as report:
                return _judged(report, meaning, catalogue)
            case RecoveryAdvice() as advice:
                return meaning.severity, action_words(advice.step)
        return meaning.severity, meaning.action


def _judged(
    report: NvlinkReport, meaning: XidMeaning, catalogue: Catalogue
) -> tuple[XidSeverity, str]:
    row = catalogue.nvlink(meaning.code, report.unit, report.status, report.subcode)
    if row is not None and row.promoted is not None and report.promoted:
        return row.promoted, action_words(XidAction.RESET_GPU)
    action = meaning.action if row is None else action_words(row.action)
    if report.fatal:
        soft = row is None or row.severity is not XidSeverity.FATAL
        return XidSeverity.FATAL, action_words(XidAction.RESET_GPU) if soft else action
    if report.fatal is None:
        return (meaning.severity if row is None else row.severity), action
    if row is not None and row.severity is XidSeverity.APP:
        return XidSeverity.APP, action
    return XidSeverity.WARNING, action if row is not None else action_words(XidAction.WATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class SxidEvent:
    """One line of an NVSwitch.  ``data`` marks a line that only adds words to the one before."""

    code: int
    switch: int
    pci: str
    fatal: bool
    link: int | None
    text: str
    data: bool = False

    @property
    def severity(self) -> XidSeverity:
        """The driver says itself how bad it is."""
        return XidSeverity.FATAL if self.fatal else XidSeverity.WARNING


_PCI: Final = r"(?:PCI:)?(?P<pci>[0-9a-fA-F:.]{4,20})"
_XID: Final = re.compile(
    rf"NVRM: Xid \({_PCI}(?: GPU-I:(?P<gi>\d{{1,4}}))?(?: GPU-CI:(?P<ci>\d{{1,4}}))?"
    r"[^)]{0,64}\): "
    r"(?P<code>\d{1,6})\b,? *(?P<rest>.*)",
    re.DOTALL,
)
_PID: Final = re.compile(r"pid=(?P<pid>[^,]{0,64})(?:, *|$)")
_NAME: Final = re.compile(r"name=(?P<name>.{0,64}?)(?:, +|,?$)")
_PREVIOUS: Final = re.compile(r"caused by previous Xid (\d{1,6})\b")
_RESET: Final = re.compile(r"(?P<drain>D-)?RST: *(?P<yes>Yes|No)\b", re.IGNORECASE)
_YES: Final = ("Yes", "YES", "yes")
_LINK: Final = re.compile(r"\blink (-?\d{1,4})\b", re.IGNORECASE)
_NVLINK5: Final = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_]{1,40})(?: +(?P<word>Non-?fatal|Fatal|Link Fatal))?"
    r"(?: +XC ?(?P<xc>\d))?(?: +i ?(?P<inj>\d))?(?: +Link (?P<link>-?\d{1,4}))?"
    r"(?: *[(\[](?P<words>[0-9a-fA-Fx ]{1,200})[)\]])?",
    re.IGNORECASE,
)
_ADVICE: Final = re.compile(
    r"GPU recovery action changed from 0x(?P<old>[0-9a-f]{1,8})(?: \([^)]{0,64}\))? "
    r"to 0x(?P<new>[0-9a-f]{1,8})(?: \((?P<words>[^)]{0,64})\))?",
    re.IGNORECASE,
)
_SXID: Final = re.compile(
    rf"nvidia-nvswitch(?P<switch>\d{{1,4}}): SXid \({_PCI}\): (?P<code>\d{{1,6}})\b,? *"
    r"(?P<text>.*)",
    re.DOTALL,
)
_SXID_WORD: Final = re.compile(r"(?:Always )?(?P<word>Fatal|Non-?fatal|Corrected)\b", re.IGNORECASE)


def parse_xid(line: str) -> XidEvent | None:
    """Return the Xid in a kernel log's line, or None when there is none."""
    if "Xid" not in line:
        return None
    text = kernel_text(line)
    return None if text is None else read_xid(text)


def parse_sxid(line: str) -> SxidEvent | None:
    """Return the SXid in a kernel log's line, or None when there is none."""
    if "SXid" not in line:
        return None
    text = kernel_text(line)
    return None if text is None else read_sxid(text)


def read_xid(text: str) -> XidEvent | None:
    """Return the Xid in what the kernel said, without whatever a log puts before it."""
    found = _XID.match(text)
    pci = normalise_pci(found["pci"]) if found else None
    if found is None or pci is None:
        return None
    rest = found["rest"]
    pid, rest = _take(_PID, "pid", rest)
    name, rest = _take(_NAME, "name", rest)
    code, rest = int(found["code"]), rest.strip()
    return XidEvent(
        code=code,
        pci=pci,
        pid=whole_number(pid),
        process=name if name and name != "<unknown>" else None,
        text=rest,
        gpu_instance=_number(found["gi"]),
        compute_instance=_number(found["ci"]),
        detail=_detail(code, rest),
    )


def read_sxid(text: str) -> SxidEvent | None:
    """Return the SXid in what the kernel said."""
    found = _SXID.match(text)
    pci = normalise_pci(found["pci"]) if found else None
    if found is None or pci is None:
        return None
    words = found["text"].strip()
    word = _SXID_WORD.match(words)
    link = _LINK.search(words)
    return SxidEvent(
        code=int(found["code"]),
        switch=int(found["switch"]),
        pci=pci,
        fatal=word is not None and word["word"].lower() == "fatal",
        link=int(link[1]) if link else None,
        text=words,
        data=word is None,
    )


def _take(pattern: re.Pattern[str], name: str, text: str) -> tuple[str, str]:
    """Return a leading ``name=value`` without its quotes, and what follows."""
    found = pattern.match(text)
    if found is None:
        return "", text
    return found[name].strip("'\" "), text[found.end() :]


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _detail(code: int, text: str) -> XidDetail | None:
    if code == FOLLOW_UP_XID:
        found = _PREVIOUS.search(text)
        return Cleanup(previous=int(found[1]) if found else None)
    if code in CONTAINED_XIDS:
        marks = {
            bool(mark["drain"]): mark["yes"].lower() == "yes" for mark in _RESET.finditer(text)
        }
        return Containment(reset=marks.get(False, False), drain=marks.get(True, False))
    if code == NVLINK_XID:
        link = _LINK.search(text)
        return LinkError(link=int(link[1])) if link else None
    if code in NVLINK5_XIDS:
        return _nvlink5(text)
    if code == ADVICE_XID:
        advice = _ADVICE.search(text)
        if advice is None:
            return None
        old, new = int(advice["old"], 16), int(advice["new"], 16)
        return RecoveryAdvice(before=old, now=new, words=advice["words"] or "")
    return None


def _nvlink5(text: str) -> NvlinkReport | None:
    found = _NVLINK5.match(text)
    if found is None:
        return None
    words = [word for word in (found["words"] or "").split() if _HEX.fullmatch(word)]
    word = (found["word"] or "").lower()
    return NvlinkReport(
        unit=found["unit"].upper(),
        fatal=None if not word else not word.startswith("non"),
        cross_contained=(found["xc"] or "0") != "0",
        injected=(found["inj"] or "0") != "0",
        link=int(found["link"]) if found["link"] else -1,
        intr_info=int(words[0], 16) if words else 0,
        status=int(words[1], 16) if len(words) > 1 else None,
    )


_HEX: Final = re.compile(r"(?:0x)?[0-9a-fA-F]{1,16}")

assert all(code <= CODE_MAX for code in CATALOGUE), "a code that no line can carry"
