"""The judge of the kernel's log: lines in, findings out, and a sum of everything in between.

Decides what is new, what repeats, what belongs together and what convicts a device.  Each line
counts; a device and code is told once, and a storm at most once a minute with its count.  Memory
is bounded whatever a log holds.  It reads no clock and opens nothing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from scout.clock import Instant, seconds, since
from sidecar.hardware.catalogue import Catalogue, XidSeverity, shipped
from sidecar.hardware.kernel_events import REASONS, KernelFinding, KernelKind, KernelNote
from sidecar.hardware.kernel_line import KernelLine, LineReader, Mark, read_log
from sidecar.hardware.kernel_links import LinkLimits, Links
from sidecar.hardware.kernel_rules import read_note
from sidecar.hardware.kernel_tally import Subject, Subjects
from sidecar.hardware.kernel_told import Say, tell
from sidecar.hardware.kernel_words import (
    learn_uuid,
    lost_address,
    note_words,
    sxid_words,
    xid_words,
)
from sidecar.hardware.pci import normalise_pci
from sidecar.hardware.xid import (
    ADVICE_BINDING,
    LOST_XID,
    RecoveryAdvice,
    SxidEvent,
    XidEvent,
    read_sxid,
    read_xid,
)

UUIDS_MAX: Final = 256
XIDS_COUNTED_MAX: Final = 4096
"""Devices and codes counted apart; far more than a node has, and a bound on a garbled log."""
ADVICE_JOINS_S: Final = 600.0
"""How long before an Xid 154 an error may have come that it speaks about."""
GAP_TOLD_EVERY_S: Final = 60.0

_CONVICTED_DRIVERS: Final = ("nvidia", "mlx5_core", "nvme")
"""Whose fatal PCI Express error takes the node; a bridge only passes one on."""
_TRAINING_DRIVERS: Final = ("mlx5_core", "mlx4_core", "bnxt_en", "irdma", "efa")
"""Network cards that collectives run over; a port for administration may stay down."""
_NEVER: Final = frozenset({KernelKind.PROCESS_FAULT, KernelKind.OOM_KILL})


@dataclass(slots=True, kw_only=True)
class KernelCounters:
    """What was read.  ``xids`` counts by PCI address and code, ``kinds`` every other line."""

    xids: Counter[tuple[str, int]] = field(default_factory=Counter)
    severities: Counter[XidSeverity] = field(default_factory=Counter)
    kinds: Counter[KernelKind] = field(default_factory=Counter)
    gaps: int = 0
    findings: int = 0


class KernelJudge:
    """One node's kernel log.  ``gpus`` maps a PCI address, in any spelling, to an index."""

    def __init__(
        self,
        gpus: Mapping[str, int],
        *,
        catalogue: Catalogue | None = None,
        links: LinkLimits | None = None,
    ) -> None:
        self._gpus = {normalise_pci(pci) or pci.lower(): index for pci, index in gpus.items()}
        self._catalogue = catalogue or shipped()
        self._reader = LineReader()
        self._links = Links(limits=links or LinkLimits())
        self._boot: str | None = None
        self._half_address: str | None = None
        self._gap_told: Instant | None = None
        self.subjects = Subjects()
        self.uuids: dict[str, str] = {}
        self.counters = KernelCounters()
        self.gap_at: Instant | None = None
        """When records were last lost; what was said then is not known."""

    # --- lines in, findings out -------------------------------------------------------------

    def take(self, line: str, now: Instant) -> list[KernelFinding]:
        """Take one line of a log in any format."""
        found = self._reader.feed(line)
        return [] if found is None else self.take_read(found, now)

    def take_log(self, text: str, now: Instant) -> list[KernelFinding]:
        """Take a whole text at once."""
        return [one for found in read_log(text) for one in self.take_read(found, now)]

    def take_read(self, found: KernelLine | Mark, now: Instant) -> list[KernelFinding]:
        """Take what a transport gave."""
        if found is Mark.GAP:
            return self.lost_records(now)
        if found is Mark.BOOT:
            self.new_boot()
            return []
        assert isinstance(found, KernelLine)
        if found.boot is not None:
            if self._boot not in (None, found.boot):
                self.new_boot()
            self._boot = found.boot
        return self._judge(found, now)

    def tick(self, now: Instant) -> list[KernelFinding]:
        """Take the passing of time: links that stay down."""
        told: list[KernelFinding] = []
        for name in self._links.overdue(now):
            subject = self.subjects.get(name) or self.subjects.of(name)
            limit = self._links.limits.down_fatal_s
            say = Say(
                kind=KernelKind.LINK_DOWN,
                severity=XidSeverity.FATAL,
                reason="LinkStaysDown",
                message=f"{name} has been down for more than {limit:g} s",
            )
            told += self._told(subject, say, now)
        return told

    def lost_records(self, now: Instant) -> list[KernelFinding]:
        """Note that the log lost records: the hardware is not known to be well meanwhile."""
        self.counters.gaps += 1
        self.gap_at = now
        if self._gap_told is not None and since(self._gap_told, now) < seconds(GAP_TOLD_EVERY_S):
            return []
        self._gap_told = now
        return [
            KernelFinding(
                kind=KernelKind.LOG_GAP,
                severity=XidSeverity.WARNING,
                subject="kernel log",
                reason=REASONS[KernelKind.LOG_GAP],
                message="the kernel log lost records; what they said is not known",
                line="",
                count=self.counters.gaps,
            )
        ]

    def new_boot(self) -> None:
        """Forget what an earlier boot said: a restart of the machine resets its devices."""
        self.subjects.clear()
        self._links = Links(limits=self._links.limits)
        self._half_address = None

    @property
    def roots(self) -> tuple[str, ...]:
        """GPUs that an NVLink trouble began with; their partners only saw the link fail."""
        return tuple(
            subject.pci
            for subject in self.subjects
            if subject.name.startswith("gpu ")
            and subject.pci is not None
            and subject.severity is XidSeverity.FATAL
        )

    # --- one line ---------------------------------------------------------------------------

    def _judge(self, line: KernelLine, now: Instant) -> list[KernelFinding]:
        text = line.text
        if text.startswith("NVRM: Xid"):
            event = read_xid(text)
            return [] if event is None else self._xid(event, line, now)
        if "SXid" in text:
            switch = read_sxid(text)
            return [] if switch is None else self._sxid(switch, line, now)
        if text.startswith("NVRM: "):
            self._learn(text)
        note = read_note(text)
        return [] if note is None else self._note(note, line, now)

    def _learn(self, text: str) -> None:
        named = learn_uuid(text)
        if named is not None and len(self.uuids) < UUIDS_MAX:
            self.uuids[named[0]] = named[1]
        self._half_address = lost_address(text) or self._half_address

    def _xid(self, event: XidEvent, line: KernelLine, now: Instant) -> list[KernelFinding]:
        severity, action = event.judged(self._catalogue)
        key = event.pci, event.code
        if key in self.counters.xids or len(self.counters.xids) < XIDS_COUNTED_MAX:
            self.counters.xids[key] += 1
        self.counters.severities[severity] += 1
        subject = self._gpu(event.pci)
        told: list[KernelFinding] = []
        if isinstance(event.detail, RecoveryAdvice):
            return self._advised(subject, event, line, now)
        if event.previous is not None:
            told += self._infer(subject, event.previous, event, line, now)
        say = Say(
            kind=KernelKind.XID,
            severity=severity,
            reason=f"Xid{event.code}",
            message=xid_words(event, subject.gpu, self._catalogue, action),
            line=line.raw,
            text=event.text,
            action=action,
            code=event.code,
            pid=event.pid,
            process=event.process,
        )
        return told + self._told(subject, say, now)

    def _infer(
        self, subject: Subject, code: int, event: XidEvent, line: KernelLine, now: Instant
    ) -> list[KernelFinding]:
        """Take an Xid from the one that names it as its cause, if its own line was never seen."""
        if (KernelKind.XID, code) in subject.tallies:
            return []
        meaning = self._catalogue.meaning_of(code)
        cause = XidEvent(code=code, pci=event.pci, pid=None, process=None, text="")
        words = xid_words(cause, subject.gpu, self._catalogue, meaning.action)
        say = Say(
            kind=KernelKind.XID,
            severity=meaning.severity,
            reason=f"Xid{code}",
            message=f"{words}; its own line was not seen, Xid {event.code} names it as the cause",
            line=line.raw,
            action=meaning.action,
            code=code,
            pid=event.pid if meaning.severity is XidSeverity.APP else None,
        )
        told = self._told(subject, say, now)
        tally = subject.tallies.get((KernelKind.XID, code))
        if tally is not None:
            tally.inferred, tally.count = True, 0
        return told

    def _advised(
        self, subject: Subject, event: XidEvent, line: KernelLine, now: Instant
    ) -> list[KernelFinding]:
        """Take the driver's advice: it speaks about an error that came before."""
        advice = event.detail
        assert isinstance(advice, RecoveryAdvice)
        subject.advice = "" if advice.now == 0 else (advice.words or advice.step)
        name = f"GPU {subject.gpu}" if subject.gpu is not None else f"the GPU at PCI {event.pci}"
        cause = _cause(subject, now)
        binding = advice.now in ADVICE_BINDING and cause is not None
        if advice.now == 0:
            self.subjects.recovered(subject)
            words = f"the driver asks for no recovery of {name} any more"
            severity, reason = XidSeverity.INFO, "Recovered"
        else:
            words = f"the driver asks for recovery of {name}: {subject.advice}"
            words += "" if cause is None else f", after Xid {cause}"
            severity = XidSeverity.FATAL if binding else XidSeverity.WARNING
            reason = f"Xid{event.code if cause is None else cause}"
        say = Say(
            kind=KernelKind.XID,
            severity=severity,
            reason=reason,
            message=words,
            line=line.raw,
            text=event.text,
            action=subject.advice,
            code=event.code,
            standing=XidSeverity.INFO,
            convicts=binding and not any(one.convicted for one in subject.tallies.values()),
        )
        return self._told(subject, say, now)

    def _sxid(self, event: SxidEvent, line: KernelLine, now: Instant) -> list[KernelFinding]:
        if event.data:
            return []  # more words about the line before
        self.counters.kinds[KernelKind.SXID] += 1
        subject = self.subjects.of(f"nvswitch {event.switch}", pci=event.pci)
        words, action = sxid_words(event)
        say = Say(
            kind=KernelKind.SXID,
            severity=event.severity,
            reason=f"SXid{event.code}",
            message=words,
            line=line.raw,
            text=event.text,
            action=action,
            code=event.code,
        )
        return self._told(subject, say, now)

    def _note(self, note: KernelNote, line: KernelLine, now: Instant) -> list[KernelFinding]:
        self.counters.kinds[note.kind] += 1
        if note.kind is KernelKind.GPU_LOST:
            return self._lost(note, line, now)
        at = now if line.uptime_us is None else Instant(line.uptime_us * 1000)
        if note.kind is KernelKind.LINK_DOWN:
            self._links.down(note.subject, at, now, trains=note.driver in _TRAINING_DRIVERS)
        elif note.kind is KernelKind.LINK_UP:
            return self._link_up(note, line, at, now)
        known = note.subject if note.pci is None else self._known_gpu(note)
        old = self.subjects.get(known)
        if note.kind is KernelKind.STORAGE_BACK and (old is None or old.cleared):
            return []
        if note.kind is KernelKind.OOM_KILL and old is not None and note.pid is not None:
            old.tallies[KernelKind.OOM_KILL, None].count += 1
            return []  # the other lines about one killed process
        gpu = self._gpus.get(note.pci) if note.pci is not None else None
        subject = self.subjects.of(known, pci=note.pci, gpu=gpu)
        subject.cleared = note.kind is KernelKind.STORAGE_BACK
        if subject.cleared:
            subject.tallies.pop((KernelKind.STORAGE_STALL, None), None)
        say = Say(
            kind=note.kind,
            severity=note.severity,
            reason=REASONS[note.kind],
            message=note_words(note, gpu),
            line=line.raw,
            text=note.text,
            pid=note.pid,
            process=note.process,
            convicts=self._convicts(note, subject),
        )
        return self._told(subject, say, now)

    def _lost(self, note: KernelNote, line: KernelLine, now: Instant) -> list[KernelFinding]:
        """Take the driver's plain words for what it also numbers: one failure, one event."""
        pci = note.pci or self._half_address
        self._half_address = None
        if pci is None:
            return []
        event = XidEvent(code=LOST_XID, pci=pci, pid=None, process=None, text=note.text)
        return self._xid(event, line, now)

    def _link_up(
        self, note: KernelNote, line: KernelLine, at: Instant, now: Instant
    ) -> list[KernelFinding]:
        flap = self._links.up(note.subject, at)
        if flap is None:
            return []
        lasted_s, often = flap
        limits = self._links.limits
        words = f"{note.subject} was down for {lasted_s:.1f} s"
        if often:
            words += f"; {limits.flaps_fatal} times in {limits.window_s:g} s are too many"
        say = Say(
            kind=KernelKind.LINK_UP,
            severity=XidSeverity.FATAL if often else XidSeverity.WARNING,
            reason="LinkFlaps",
            message=words,
            line=line.raw,
            text=note.text,
        )
        return self._told(self.subjects.of(note.subject, pci=note.pci), say, now)

    @property
    def flaps(self) -> Mapping[str, int]:
        """Times that each port went down and came up again."""
        return {name: port.flaps for name, port in self._links.ports.items()}

    def gpu_of(self, pci: str) -> int | None:
        """Return the index of the device at a normalised address, if it is known."""
        return self._gpus.get(pci)

    # --- leaves -----------------------------------------------------------------------------

    def _gpu(self, pci: str) -> Subject:
        return self.subjects.of(f"gpu {pci}", pci=pci, gpu=self._gpus.get(pci))

    def _known_gpu(self, note: KernelNote) -> str:
        """Return the subject's name: a GPU's where the device is known to be one."""
        is_gpu = note.pci in self._gpus or note.pci in self.uuids or note.driver == "nvidia"
        return f"gpu {note.pci}" if is_gpu else note.subject

    def _convicts(self, note: KernelNote, subject: Subject) -> bool:
        if note.severity is not XidSeverity.FATAL or note.kind in _NEVER:
            return False
        if note.kind is not KernelKind.PCIE or subject.name.startswith("gpu "):
            return True
        return note.driver in _CONVICTED_DRIVERS

    def _told(self, subject: Subject, say: Say, now: Instant) -> list[KernelFinding]:
        found = tell(subject, say, now, self.uuids.get(subject.pci or "", ""))
        self.counters.findings += sum(one.convicts for one in found)
        return found


def _cause(subject: Subject, now: Instant) -> int | None:
    """Return the newest Xid but the driver's advice itself that was a fault of some kind."""
    told = [
        tally
        for tally in subject.tallies.values()
        if tally.code is not None
        and tally.severity not in (XidSeverity.INFO, XidSeverity.FOLLOW_UP)
        and since(tally.last, now) <= seconds(ADVICE_JOINS_S)
    ]
    if not told:
        return None
    return max(told, key=lambda tally: (tally.severity is XidSeverity.FATAL, tally.last)).code
