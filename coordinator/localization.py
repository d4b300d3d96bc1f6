"""One round of looking at every rank, between the first sign of a fault and the stop.

Decides when enough was seen to judge, and when enough was kept to stop.  Absence is evidence too:
a node that does not answer before the deadline is judged by its silence.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from coordinator.incidents import Finding, NodeFault
from scout.clock import Duration, Instant, after
from scout.hang import RankSnapshot
from sidecar.api import EvidenceReport, FaultKind, ProgressReport

_SELF_EVIDENT = frozenset({FaultKind.GPU_FATAL, FaultKind.NODE_LOST, FaultKind.OPERATOR})
"""Findings that no later report can overturn."""
_WEAK = frozenset({"low", "none"})
"""Confidences that another look may raise."""
_DEADLY_SIGNALS = frozenset({4, 7, 8, 9, 11})
"""SIGILL, SIGBUS, SIGFPE, SIGKILL and SIGSEGV.  Losing a peer ends nobody this way, while an
abort (SIGABRT) is also how a watchdog ends the peers of the one that broke."""


@dataclass(slots=True, kw_only=True)
class Round:
    """Who was asked, who answered, and until when to wait."""

    id: int
    settle_until: Instant
    spoken_until: Instant
    """When the other ranks have said what they have to say of themselves."""
    deadline: Instant
    evidence_wait: Duration
    asked: set[str] = field(default_factory=set)
    replies: dict[str, ProgressReport] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    """Who answered the present look."""
    is_second_look: bool = False
    is_known: bool = False
    """A look before this round has seen every rank; what is asked for now is evidence."""
    evidence: dict[str, EvidenceReport] = field(default_factory=dict)
    evidence_until: Instant | None = None
    """None until the verdict is there and only evidence is waited for."""

    def begin_with(self, look: "Round") -> None:
        """Begin with what another look has seen."""
        self.replies, self.is_known = dict(look.replies), True

    def take(self, report: ProgressReport | EvidenceReport) -> None:
        """Keep an answer to this round; answers to another are dropped."""
        if report.round_id != self.id:
            return
        if isinstance(report, EvidenceReport):
            self.evidence[report.node] = report
            return
        before = self.replies.get(report.node)
        if before is not None and before.evidence_follows:
            report = replace(report, evidence_follows=True)
        self.replies[report.node] = report
        self.answered.add(report.node)

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
        return now >= self.deadline or all(node in self.answered for node in expected)

    def look_again(self, finding: Finding) -> bool:
        """Return True, once, when everybody is to be looked at a second time.

        The first look may come milliseconds after a crash, when the ranks that would speak
        against the culprit are still on their way to where it crashed.
        """
        if self.is_second_look or finding.confidence not in _WEAK:
            return False
        self.is_second_look, self.is_known = True, False
        self.asked.clear()
        self.answered.clear()
        return True

    def settled(self, finding: Finding, faults: Sequence[NodeFault], now: Instant) -> bool:
        """Return True when further reports would change nothing, or had their time."""
        if now >= self.settle_until:
            return True
        culprit = finding.culprit
        if culprit is None:
            return False
        if culprit.kind is FaultKind.WORKER_REPORTED and finding.confidence not in _WEAK:
            return now >= self.spoken_until  # it says so of itself, and not that a peer was lost
        return culprit.kind in _SELF_EVIDENT or any(
            fault.report.exit is not None
            and fault.report.exit.signal in _DEADLY_SIGNALS
            and fault.report.rank == culprit.rank
            for fault in faults
        )

    def owing(self) -> frozenset[str]:
        """Return the nodes whose evidence was announced, or may still be, and has not come."""
        promised = {node for node, report in self.replies.items() if report.evidence_follows}
        if self.is_known and self.evidence_wait:
            promised |= self.asked - self.answered
        return frozenset(promised - self.evidence.keys())

    def hold_stop(self, connected: Collection[str], now: Instant) -> bool:
        """Return True while the stop may wait for evidence; its budget begins with the first call.

        Only nodes that announced some and can still send it are waited for.
        """
        if self.evidence_until is None:
            self.evidence_until = after(now, self.evidence_wait)
        return now < self.evidence_until and not self.owing().isdisjoint(connected)

    def next_deadline(self, now: Instant) -> Instant:
        """Return when to look again."""
        due = [self.spoken_until, self.settle_until, self.deadline]
        due += [] if self.evidence_until is None else [self.evidence_until]
        return min((it for it in due if it > now), default=max(due))
