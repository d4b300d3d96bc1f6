"""What this node found wrong: each finding as a fault report, kept until its generation ends.

Decides nothing about what follows from a fault.  Faults of workers belong to a generation and go
with it; faults of hardware stay, because a restart does not mend a device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from scout.clock import SECOND, Duration, Instant, since
from sidecar.api import FaultKind, FaultReport, Scope
from sidecar.events import (
    XID_REASON,
    HardwareFinding,
    HardwareRecovered,
    LogFinding,
    ProcessNote,
    WorkerExited,
)
from worker_shim.messages import JobFault, ScoutStatus

FAULTS_MAX: Final = 64
"""Findings kept of each sort.  The first ones convict; later ones repeat."""
REASON_CHARS_MAX: Final = 256
MESSAGE_CHARS_MAX: Final = 16_384
"""Of a fault that a worker reports itself: a traceback fits, a dump does not."""
EVIDENCE_LINES_MAX: Final = 8
"""Places at which tensors differ that a report of corruption may name."""
NOTES_MAX: Final = 64
"""What the kernel said of this generation's processes; the newest are kept."""
ECHO_MAX: Final = Duration(60 * SECOND)
"""The kernel's log and the driver's library tell of one fault apart by a poll and a stuck query."""

_LOG_REASONS: Final[Mapping[FaultKind, str]] = {
    FaultKind.LOG_RULE: "LogFault",
    FaultKind.LOG_SLOW: "LogSlow",
    FaultKind.LOG_HANG: "LogHang",
}


@dataclass(frozen=True, slots=True)
class _Fault:
    at: Instant
    report: FaultReport
    over: bool = False
    """The device has recovered; kept while the node stands still because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    """What the kernel said of a worker (``own``) or of a process that a worker started."""

    local_rank: int
    own: bool
    note: ProcessNote


@dataclass(slots=True)
class Findings:
    """The node's faults, hardware first, each with the instant it happened."""

    _workers: list[_Fault] = field(default_factory=list)
    _hardware: list[_Fault] = field(default_factory=list)
    _notes: list[_Noted] = field(default_factory=list)
    _ids: int = 0

    def add(self, report: FaultReport, at: Instant) -> bool:
        """Keep ``report`` under a fresh id.  Returns False for an echo or want of room."""
        if report.kind is FaultKind.CRASH and not (report.exit and report.exit.by):
            for noted in self._notes:
                report = explained(report, noted)
        if report.kind is FaultKind.GPU_FATAL and self._is_echo(report, at):
            return False
        kept = self._hardware if report.kind is FaultKind.GPU_FATAL else self._workers
        if len(kept) >= FAULTS_MAX:
            return False
        self._ids += 1
        kept.append(_Fault(at, replace(report, fault_id=self._ids)))
        return True

    def _is_echo(self, report: FaultReport, at: Instant) -> bool:
        """Whether another source told of the same fault of the same device a moment ago."""
        return any(
            (told.report.gpu, told.report.reason) == (report.gpu, report.reason)
            and since(told.at, at) <= ECHO_MAX
            for told in self._hardware
        )

    def note(self, note: ProcessNote, ranks: Mapping[int | None, int]) -> FaultReport | None:
        """Keep what the kernel said of a process; ``ranks`` maps workers' pids to local ranks.

        Returns the report that says so of a crash which was told before, if it says who did it.
        """
        local_rank = ranks.get(note.pid, note.local_rank)
        if local_rank is None:
            return None
        noted = _Noted(local_rank=local_rank, own=note.pid in ranks, note=note)
        self._notes = [*self._notes, noted][-NOTES_MAX:]
        told = [fault.report for fault in self._workers if fault.report.kind is FaultKind.CRASH]
        for report in told:
            if report.exit is not None and report.exit.by and report.local_rank == local_rank:
                return None
        again = (explained(report, noted) for report in told)
        return next((one for one in again if one.exit is not None and one.exit.by), None)

    def recovered(self, event: HardwareRecovered, *, resting: bool) -> bool:
        """Take back the faults of a device that is well again; return whether any is gone now.

        While the node is not ``resting`` they are the reason of a stop, and go with it.
        """
        before = len(self._hardware)
        self._hardware = [
            replace(fault, over=fault.over or _is_of(fault.report, event))
            for fault in self._hardware
        ]
        if resting:
            self._hardware = [fault for fault in self._hardware if not fault.over]
        return len(self._hardware) < before

    def clear(self) -> None:
        """Forget what belonged to the generation that ended, and what is well again."""
        self._workers.clear()
        self._hardware = [fault for fault in self._hardware if not fault.over]
        self._notes.clear()

    def reports(self, now: Instant) -> tuple[FaultReport, ...]:
        """Return every fault with its age at ``now``."""
        return tuple(
            replace(fault.report, age_ns=since(fault.at, now))
            for fault in (*self._hardware, *self._workers)
        )


def _is_of(report: FaultReport, event: HardwareRecovered) -> bool:
    same = report.reason == event.reason
    any_xid = event.reason == XID_REASON and report.reason.startswith(XID_REASON)
    return report.gpu == event.gpu and (same or any_xid)


def crash(event: WorkerExited, rank: int, step: int | None) -> FaultReport:
    """A worker process ended in any way but exit status 0."""
    return FaultReport(
        fault_id=0,
        kind=FaultKind.CRASH,
        scope=Scope.RANK,
        reason="WorkerCrash",
        message=f"rank {rank} (pid {event.pid}) ended with {event.cause}",
        age_ns=0,
        rank=rank,
        local_rank=event.local_rank,
        step=step,
        exit=event.cause,
        evidence=event.last_lines,
    )


def explained(report: FaultReport, noted: _Noted) -> FaultReport:
    """Return a crash with what the kernel said of it, if it is about the same worker."""
    if report.local_rank != noted.local_rank or report.exit is None:
        return report
    # The worker's own last line stays last: it is the one that a sentence quotes.
    report = replace(report, evidence=(f"kernel: {noted.note.message}", *report.evidence))
    if not (noted.own and noted.note.killer and report.exit is not None and report.exit.signal):
        return report
    cause = replace(report.exit, by=noted.note.killer)
    return replace(
        report,
        exit=cause,
        reason=noted.note.reason,
        message=f"{report.message}, sent by {noted.note.killer}",
    )


def spawn_failure(reason: str) -> FaultReport:
    """The node could not start its workers."""
    return FaultReport(
        fault_id=0,
        kind=FaultKind.CRASH,
        scope=Scope.NODE,
        reason="SpawnFailed",
        message=reason,
        age_ns=0,
    )


def log_fault(event: LogFinding, rank: int) -> FaultReport:
    """A log rule turned bad.  Reasons are spelled as the HyperPod agent's."""
    return FaultReport(
        fault_id=0,
        kind=event.kind,
        scope=Scope.RANK,
        reason=f"{_LOG_REASONS[event.kind]}_{event.rule}",
        message=event.message,
        age_ns=0,
        rank=rank,
        local_rank=event.local_rank,
        step=event.step,
        evidence=event.block or ((event.line,) if event.line else ()),
    )


def hardware_fault(event: HardwareFinding, ranks: Mapping[int, int]) -> FaultReport:
    """A health source convicted a device; ``ranks`` maps local ranks to ranks.

    Where nobody knows which ranks used the device, the one of its number did.  Of several, as on a
    device that is cut into parts, the first one is named.
    """
    used = (event.gpu,) if event.local_ranks is None else event.local_ranks
    on_it = [(local, ranks[local]) for local in used if local is not None and local in ranks]
    several = f" (used by ranks {', '.join(str(rank) for _, rank in on_it)})"
    return FaultReport(
        fault_id=0,
        kind=FaultKind.GPU_FATAL,
        scope=Scope.NODE if event.gpu is None else Scope.GPU,
        reason=event.reason,
        message=event.message + (several if len(on_it) > 1 else ""),
        age_ns=0,
        rank=on_it[0][1] if on_it else None,
        local_rank=on_it[0][0] if on_it else None,
        gpu=event.gpu,
        evidence=(event.line,) if event.line else (),
    )


def reported_fault(message: JobFault, rank: int) -> FaultReport:
    """A worker says itself that it failed."""
    return FaultReport(
        fault_id=0,
        kind=FaultKind.WORKER_REPORTED,
        scope=Scope.RANK,
        reason=message.reason[:REASON_CHARS_MAX] or "WorkerReportedFault",
        message=message.message[:MESSAGE_CHARS_MAX] or f"rank {rank} reported a fault",
        age_ns=0,
        rank=rank,
        local_rank=message.local_rank,
        restart_mode=message.restart_mode,
    )


def corruption(message: ScoutStatus, rank: int) -> FaultReport | None:
    """A comparison of peers found values that differ; None for any other outcome.

    Each rank reports it, about whom all of them name: the first one, or nobody.
    """
    if message.outcome not in ("corrupt", "inconclusive"):
        return None
    named = message.corrupt_ranks
    return FaultReport(
        fault_id=0,
        kind=FaultKind.SDC,
        scope=Scope.RANK if named else Scope.JOB,
        reason="SilentDataCorruption",
        message=message.why[:MESSAGE_CHARS_MAX] or f"rank {rank} and its peers disagree",
        age_ns=0,
        rank=named[0] if named else None,
        step=message.step,
        evidence=tuple(it[:MESSAGE_CHARS_MAX] for it in message.evidence[:EVIDENCE_LINES_MAX]),
    )
