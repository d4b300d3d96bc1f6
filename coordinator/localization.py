"""One round of looking at every rank, between the first sign of a fault and the verdict.

Decides when enough was seen to judge.  Absence is evidence too: a node that does not answer
before the deadline is judged by its silence.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from coordinator.incidents import Finding, NodeFault
from scout.clock import Instant
from scout.hang import RankSnapshot
from sidecar.api import FaultKind, ProgressReport

_SELF_EVIDENT = frozenset({FaultKind.GPU_FATAL, FaultKind.NODE_LOST, FaultKind.OPERATOR})
"""Findings that no later report can overturn."""
_DEADLY_SIGNALS = frozenset({4, 7, 8, 9, 11})
"""SIGILL, SIGBUS, SIGFPE, SIGKILL and SIGSEGV.  Losing a peer ends nobody this way, while an
abort (SIGABRT) is also how a watchdog ends the peers of the one that broke."""


@dataclass(slots=True, kw_only=True)
class Round:
    """Who was asked, who answered, and until when to wait."""

    id: int
    settle_until: Instant
    deadline: Instant
    asked: set[str] = field(default_factory=set)
    replies: dict[str, ProgressReport] = field(default_factory=dict)

    def take(self, report: ProgressReport) -> None:
        """Keep an answer to this round; answers to another are dropped."""
        if report.round_id == self.id:
            self.replies[report.node] = report

    def snapshots(self) -> tuple[RankSnapshot, ...]:
        """Return what was seen, by rank."""
        seen = [item for report in self.replies.values() for item in report.ranks]
        return tuple(sorted(seen, key=lambda item: item.rank))

    def log_tails(self) -> dict[str, tuple[str, ...]]:
        """Return the last output lines of each rank, keyed by global rank."""
        return {
            rank: lines
            for report in self.replies.values()
            for rank, lines in report.log_tails.items()
        }

    def collected(self, expected: Collection[str], now: Instant) -> bool:
        """Return True when nobody is left to wait for, or waiting has lasted long enough."""
        return now >= self.deadline or all(node in self.replies for node in expected)

    def settled(self, finding: Finding, faults: Sequence[NodeFault], now: Instant) -> bool:
        """Return True when further reports would change nothing, or had their time."""
        if now >= self.settle_until:
            return True
        culprit = finding.culprit
        if culprit is None:
            return False
        return culprit.kind in _SELF_EVIDENT or any(
            fault.report.exit is not None
            and fault.report.exit.signal in _DEADLY_SIGNALS
            and fault.report.rank == culprit.rank
            for fault in faults
        )

    def next_deadline(self, now: Instant) -> Instant:
        """Return when to look again."""
        return self.settle_until if now < self.settle_until else self.deadline
