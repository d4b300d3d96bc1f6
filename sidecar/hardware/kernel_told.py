"""Whether a line is news: what is told, what is only counted.

Decides that a kind and code of a subject is told once, again when it turns out worse or names
another process, and in a storm once a minute with its count.
"""

from dataclasses import dataclass
from typing import Final

from scout.clock import Instant, seconds, since
from sidecar.hardware.catalogue import XidSeverity
from sidecar.hardware.kernel_events import KernelFinding, KernelKind
from sidecar.hardware.kernel_tally import CODES_MAX, PIDS_MAX, Subject, Tally, worst

TOLD_EVERY_S: Final = 60.0
"""Time between two words about the same storm."""
LINE_CHARS_MAX: Final = 1000
TEXT_CHARS_MAX: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """One line's meaning, and the sentence for a person.

    ``standing`` is how bad it leaves its subject, ``convicts`` whether the device gets no more
    work; None means that both follow from ``severity``.
    """

    kind: KernelKind
    severity: XidSeverity
    reason: str
    message: str
    line: str = ""
    text: str = ""
    action: str = ""
    code: int | None = None
    pid: int | None = None
    process: str | None = None
    standing: XidSeverity | None = None
    convicts: bool | None = None


def tell(subject: Subject, say: Say, now: Instant, uuid: str) -> list[KernelFinding]:
    """Count a line about ``subject`` and return what is new about it, at most one finding."""
    standing = say.standing or say.severity
    fatal = say.severity is XidSeverity.FATAL if say.convicts is None else say.convicts
    key = (say.kind, say.code)
    tally = subject.tallies.get(key)
    if tally is None:
        if len(subject.tallies) >= CODES_MAX:
            return []
        tally = Tally(
            kind=say.kind,
            code=say.code,
            severity=standing,
            action=say.action,
            text=say.text[:TEXT_CHARS_MAX],
            first=now,
            last=now,
        )
        subject.tallies[key] = tally
    tally.count += 1
    tally.last = now
    tally.inferred = False
    worse = worst(tally.severity, standing) is not tally.severity
    if worse:
        tally.severity, tally.action = standing, say.action
    fresh_pid = say.pid is not None and say.pid not in tally.pids and len(tally.pids) < PIDS_MAX
    if fresh_pid and say.pid is not None:
        tally.pids.add(say.pid)
    convicts = fatal and not tally.convicted
    due = tally.told_at is None or since(tally.told_at, now) >= seconds(TOLD_EVERY_S)
    if not (convicts or due or worse or fresh_pid):
        return []
    tally.convicted |= convicts
    tally.told_at = now
    times = f" ({tally.count} times so far)" if tally.count > 1 else ""
    return [
        KernelFinding(
            kind=say.kind,
            severity=say.severity,
            subject=subject.name,
            reason=say.reason,
            message=say.message + times,
            line=say.line[:LINE_CHARS_MAX],
            convicts=convicts,
            gpu=subject.gpu,
            pci=subject.pci,
            uuid=uuid,
            code=say.code,
            pid=say.pid,
            process=say.process,
            count=tally.count,
        )
    ]
