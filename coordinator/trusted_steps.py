"""Which checkpoints the ranks' own comparisons speak for, and which a failure therefore excludes.

Follows SCOUT's table of recoveries: after corruption only a step that was found good is loaded, or
where the job began; after a lost or hung rank a verified one too, where there is one.  A job whose
ranks do not compare themselves has no verified steps, and nothing changes for it.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from coordinator.incidents import NodeFault
from coordinator.journal_format import DurableState
from scout.recovery import EmergencyReplay, Failure, RecoveryMode, mode_of
from sidecar.api import CheckpointPointer, FaultKind, StatusReport
from worker_shim.messages import BEGINNING

VERIFIED_KEPT_MAX: Final = 256
"""Verified steps remembered: more than a job keeps checkpoints."""

_FAILURES: Final[Mapping[FaultKind, Failure]] = MappingProxyType(
    {
        FaultKind.SDC: Failure.SDC,
        FaultKind.CRASH: Failure.INACCESSIBLE,
        FaultKind.NODE_LOST: Failure.INACCESSIBLE,
        FaultKind.GPU_FATAL: Failure.INACCESSIBLE,
        FaultKind.PROCESS_STALL: Failure.HANG,
        FaultKind.LOG_HANG: Failure.HANG,
        FaultKind.STARTUP_TIMEOUT: Failure.HANG,
    }
)


def verified_by(report: StatusReport, known: Sequence[int]) -> tuple[int, ...]:
    """Return ``known`` with what a node's ranks found good and without what they found bad."""
    steps = set(known)
    for rank in report.ranks:
        if rank.scout is not None:
            steps |= set(rank.scout.verified)
            steps -= set(rank.scout.rejected)
    return tuple(sorted(steps))[-VERIFIED_KEPT_MAX:]


def not_trusted(
    state: DurableState, faults: Iterable[NodeFault], whole: Sequence[CheckpointPointer]
) -> dict[tuple[str, int], str]:
    """Return which of the ``whole`` checkpoints the faults exclude, and why."""
    kinds = {fault.report.kind for fault in faults}
    if not state.verified_steps and FaultKind.SDC not in kinds:
        return {}
    if FaultKind.OPERATOR in kinds and FaultKind.SDC not in kinds:
        return {}
    corrupt = FaultKind.SDC in kinds
    failures = [Failure.SDC] if corrupt else [_FAILURES.get(it, Failure.UNCERTAIN) for it in kinds]
    for failure in failures:
        mode, why = mode_of(
            failure,
            all_ranks_accessible=failure is not Failure.INACCESSIBLE,
            replay=EmergencyReplay.UNAVAILABLE,
        )
        if mode is RecoveryMode.RECOVERY_VERIFIED:
            trusted = {*state.verified_steps, BEGINNING}
            excluded = {
                (it.prefix, it.step): f"not verified, and {why}"
                for it in whole
                if it.step not in trusted
            }
            left = [it for it in whole if it.step in trusted and it.step != BEGINNING]
            return excluded if corrupt or left else {}
    return {}
