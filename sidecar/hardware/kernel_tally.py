"""What a kernel log adds up to, device by device: counted, never repeated, and bounded.

Decides what belongs together and what is forgotten when there is too much.  It judges no line.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from scout.clock import Instant
from sidecar.hardware.catalogue import XidSeverity
from sidecar.hardware.kernel_events import KernelKind

SUBJECTS_MAX: Final = 256
"""Devices, ports, file systems and processes remembered; the longest quiet one makes room."""
CODES_MAX: Final = 64
"""Kinds and codes remembered of each; a broken device writes a handful."""
PIDS_MAX: Final = 32
"""Processes remembered of each code."""

_RANK: Final = {
    severity: rank
    for rank, severity in enumerate(
        (
            XidSeverity.INFO,
            XidSeverity.FOLLOW_UP,
            XidSeverity.WARNING,
            XidSeverity.APP,
            XidSeverity.FATAL,
        )
    )
}


def worst(one: XidSeverity, other: XidSeverity) -> XidSeverity:
    """Return the worse of two severities."""
    return max(one, other, key=_RANK.__getitem__)


@dataclass(slots=True, kw_only=True)
class Tally:
    """One kind of line (one code of Xids) about one subject.

    ``inferred``: no line of its own was seen, another one names it as its cause.
    """

    kind: KernelKind
    code: int | None
    severity: XidSeverity
    action: str
    text: str
    first: Instant
    last: Instant
    count: int = 0
    inferred: bool = False
    convicted: bool = False
    told_at: Instant | None = None
    pids: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Subject:
    """One device, port, file system or process, and everything the kernel said of it."""

    name: str
    pci: str | None = None
    gpu: int | None = None
    tallies: dict[tuple[KernelKind, int | None], Tally] = field(default_factory=dict)
    advice: str = ""
    """What the driver wants done with it, in its own words; it outweighs the catalogue's."""
    cleared: bool = False
    """The kernel itself said that it is over."""

    @property
    def severity(self) -> XidSeverity:
        """The worst of it."""
        found = XidSeverity.INFO
        for tally in self.tallies.values():
            found = worst(found, tally.severity)
        return found

    @property
    def last(self) -> Instant:
        """When it was spoken of last."""
        return max((tally.last for tally in self.tallies.values()), default=Instant(0))

    @property
    def codes(self) -> tuple[int, ...]:
        """The Xids in the order in which they came first."""
        return tuple(tally.code for tally in self.tallies.values() if tally.code is not None)

    @property
    def count(self) -> int:
        """Lines about it."""
        return sum(tally.count for tally in self.tallies.values())

    @property
    def action(self) -> str:
        """What to do about it."""
        if self.advice:
            return self.advice
        ordered = sorted(self.tallies.values(), key=lambda tally: -_RANK[tally.severity])
        return ordered[0].action if ordered else ""


@dataclass(slots=True)
class Subjects:
    """A bounded table of subjects.  ``forgotten`` counts those that made room."""

    forgotten: int = 0
    _by_name: dict[str, Subject] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Subject]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Subject | None:
        """Return the subject of that name, if it was spoken of."""
        return self._by_name.get(name)

    def of(self, name: str, *, pci: str | None = None, gpu: int | None = None) -> Subject:
        """Return the subject of that name, a fresh one if need be."""
        known = self._by_name.pop(name, None)
        if known is None:
            if len(self._by_name) >= SUBJECTS_MAX:
                # GPUs stay: a storm about processes must not make a dead device look new.
                gone = next((one for one in self if one.gpu is None), next(iter(self)))
                del self._by_name[gone.name]
                self.forgotten += 1
            known = Subject(name=name, pci=pci, gpu=gpu)
        self._by_name[name] = known  # the one spoken of last stands last
        return known

    def recovered(self, subject: Subject) -> None:
        """Let what comes next about ``subject`` be news again: it was mended."""
        subject.tallies.clear()
        subject.cleared = True

    def clear(self) -> None:
        """Forget everything, as after a restart of the machine."""
        self._by_name.clear()
