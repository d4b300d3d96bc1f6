"""Faults that no node can report of itself: the coordinator's own findings, as reports."""

from collections.abc import Sequence
from dataclasses import replace

from coordinator.exit_causes import NODE_LEFT
from scout.clock import SECOND
from sidecar.api import FaultKind, FaultReport, RankStatus, Scope

SIDECAR_RESTARTED = "its sidecar was restarted, and its workers ended with it"
STOPPED_BY_OTHERS = "its workers were stopped by somebody else"
LEASE_EXPIRED = "its sidecar has been silent for a whole lease"


def node_lost(node: str, why: str, silent_ns: int) -> FaultReport:
    """A node is gone, with whatever ran on it; it was last there ``silent_ns`` ago."""
    report = _own(FaultKind.NODE_LOST, Scope.NODE, "NodeLost", f"{node} is lost: {why}")
    return replace(report, age_ns=silent_ns)


def node_left(node: str) -> FaultReport:
    """A node's sidecar was told to end, as by a scheduler that wants the node."""
    message = f"{node} leaves: its sidecar was told to end"
    return _own(FaultKind.NODE_LOST, Scope.NODE, NODE_LEFT, message)


def startup_timeout(silent: int, limit_s: float) -> FaultReport:
    """Ranks started and never completed a step."""
    message = f"{silent} ranks made no first step in {limit_s:g} s"
    return _own(FaultKind.STARTUP_TIMEOUT, Scope.JOB, "StartupTimeout", message)


def operator_asked(action: str, text: str) -> FaultReport:
    """A person wants the job stopped, restarted or moved."""
    return _own(FaultKind.OPERATOR, Scope.JOB, action, text)


def told_unhealthy(words: str) -> FaultReport:
    """Somebody outside the job says that the node must not be used."""
    return _own(FaultKind.GPU_FATAL, Scope.NODE, "HealthEvent", words)


def stall(stalled: Sequence[RankStatus]) -> FaultReport:
    """Ranks without progress, and for how long the longest of them."""
    oldest = max(rank.progress_age_ns or 0 for rank in stalled)
    noun = "rank" if len(stalled) == 1 else "ranks"
    message = f"{len(stalled)} {noun} made no progress for {oldest / SECOND:.1f} s"
    report = _own(FaultKind.PROCESS_STALL, Scope.JOB, "ProcessStall", message)
    return replace(report, age_ns=oldest)


def held(ranks: Sequence[RankStatus]) -> FaultReport:
    """Processes that are stopped or asleep in the kernel, for how long the longest is silent."""
    oldest = max(rank.progress_age_ns or 0 for rank in ranks)
    named = ", ".join(str(rank.rank) for rank in ranks[:8])
    message = f"the process of rank {named} stands still for {oldest / SECOND:.1f} s"
    report = _own(FaultKind.PROCESS_STALL, Scope.JOB, "ProcessHeld", message)
    return replace(report, age_ns=oldest)


def _own(kind: FaultKind, scope: Scope, reason: str, message: str) -> FaultReport:
    return FaultReport(fault_id=0, kind=kind, scope=scope, reason=reason, message=message, age_ns=0)
