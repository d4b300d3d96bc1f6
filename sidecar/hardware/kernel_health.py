"""The kernel log as a source of the hardware monitor: every line counted, as readings.

Decides which device a subject is and what is told of it; how bad it is for how long is for
`sidecar.hardware.health`.
"""

from dataclasses import dataclass, field
from typing import Final, Protocol

from scout.clock import Instant
from sidecar.hardware.catalogue import Catalogue
from sidecar.hardware.kernel_events import KernelKind
from sidecar.hardware.kernel_judge import KernelJudge
from sidecar.hardware.kernel_tally import Subject, Tally
from sidecar.hardware.readings import NODE, Device, Metric, Severity

CODES: Final = {kind: number for number, kind in enumerate(KernelKind)}
"""Kinds as the numbers of events; only their being different matters."""
CLAIMS: Final = {
    "fatal": Severity.FATAL,
    "app": Severity.WARNING,
    "warning": Severity.WARNING,
    "follow_up": Severity.HEALTHY,
    "info": Severity.HEALTHY,
}


class Listener(Protocol):
    """What takes the readings: `sidecar.hardware.sources.KernelLogSource`."""

    def tell(
        self,
        metric: Metric,
        device: Device,
        *,
        at: Instant,
        value: float = 1,
        claim: Severity | None = None,
        detail: str = "",
        count: int = 1,
    ) -> None:
        """Take one finding."""


@dataclass(slots=True)
class HealthFeed:
    """Tells ``listener`` what has come since the last time."""

    listener: Listener
    catalogue: Catalogue
    _told: dict[tuple[str, KernelKind, int | None], int] = field(default_factory=dict)

    def go_on(self, judge: KernelJudge, now: Instant) -> None:
        """Tell of every kind and code that was counted up."""
        told: dict[tuple[str, KernelKind, int | None], int] = {}
        for subject in judge.subjects:
            for tally in subject.tallies.values():
                key = subject.name, tally.kind, tally.code
                before = self._told.get(key)
                told[key] = tally.count
                grown = tally.count - (before or 0)
                # A smaller count is a fresh one: the subject was forgotten or mended meanwhile.
                count = tally.count if grown < 0 else grown
                if count or before is None:
                    self._tell(subject, tally, max(1, count), judge, now)
        self._told = told

    def _tell(
        self, subject: Subject, tally: Tally, count: int, judge: KernelJudge, now: Instant
    ) -> None:
        device = NODE
        if subject.name.startswith("gpu ") and subject.pci is not None:
            uuid = judge.uuids.get(subject.pci)
            device = Device(index=subject.gpu, uuid=uuid, pci=subject.pci)
        xid = tally.kind is KernelKind.XID and tally.code is not None
        words = tally.text
        if xid and tally.code is not None:
            words = self.catalogue.meaning_of(tally.code).meaning
        self.listener.tell(
            Metric.XID if xid else Metric.KERNEL_FAULT,
            device,
            at=now,
            value=CODES[tally.kind] if not xid or tally.code is None else tally.code,
            claim=CLAIMS[tally.severity],
            detail=words,
            count=count,
        )
