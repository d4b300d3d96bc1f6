"""The faults of one incident, ordered, and what each says in words.

Vocabulary of `coordinator.culprit`: it maps a report to ranks and to a sentence.  It judges
nobody.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from coordinator.exit_causes import ExitPolicy
from coordinator.incidents import Culprit, Finding, NodeFault
from coordinator.wording import one_line, output_line, rank_list, signal_name
from scout.hang import RankSnapshot
from scout.verdict import Basis, Evidence
from sidecar.api import FaultKind, Scope

TIE_NS: Final = 5_000_000
"""Reports of two nodes closer than this have no order: their age crossed a network each."""

_EXCEPTION: Final = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Interrupt|Exit))\b")
_SURFACES: Final[Mapping[FaultKind, str]] = MappingProxyType(
    {
        FaultKind.CRASH: "exit",
        FaultKind.LOG_RULE: "log",
        FaultKind.LOG_SLOW: "log",
        FaultKind.LOG_HANG: "log",
        FaultKind.PROCESS_STALL: "progress",
        FaultKind.STARTUP_TIMEOUT: "progress",
        FaultKind.GPU_FATAL: "gpu",
        FaultKind.NODE_LOST: "link",
        FaultKind.WORKER_REPORTED: "worker",
        FaultKind.OPERATOR: "operator",
        FaultKind.SDC: "replay",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """One incident's reports and snapshots, and the world they happened in."""

    faults: tuple[NodeFault, ...]
    """Earliest first."""
    snapshots: tuple[RankSnapshot, ...]
    world: tuple[str, ...]
    nproc: int
    stall_ns: int
    exits: ExitPolicy = field(default_factory=ExitPolicy)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.world) * self.nproc

    def of(self, *kinds: FaultKind) -> list[NodeFault]:
        """Return the faults of these kinds, earliest first."""
        return [fault for fault in self.faults if fault.report.kind in kinds]

    def local_rank(self, fault: NodeFault) -> int | None:
        """Return the local rank a report is about; a GPU's is its index, one worker a GPU."""
        report = fault.report
        if report.local_rank is not None:
            return report.local_rank
        if report.rank is not None:
            return report.rank % self.nproc
        if report.gpu is not None and report.gpu < self.nproc:
            return report.gpu
        alone = self.nproc == 1 and fault.node in self.world
        return 0 if alone and report.kind is FaultKind.NODE_LOST else None

    def rank(self, fault: NodeFault) -> int | None:
        """Return the global rank a report is about, or None when it is about no single one."""
        if fault.report.rank is not None:
            return fault.report.rank
        local_rank = self.local_rank(fault)
        if local_rank is None or fault.node not in self.world:
            return None
        return self.world.index(fault.node) * self.nproc + local_rank

    def ranks(self, faults: Iterable[NodeFault]) -> tuple[int, ...]:
        """Return the global ranks that the reports are about, ascending."""
        known = {self.rank(fault) for fault in faults}
        return tuple(sorted(rank for rank in known if rank is not None))

    def evidence(self, fault: NodeFault) -> Evidence:
        """Return a report as evidence."""
        rank = self.rank(fault)
        ranks = () if rank is None else (rank,)
        return Evidence(surface=_SURFACES[fault.report.kind], ranks=ranks, detail=say(fault, self))

    def named(
        self, guilty: NodeFault, why: str, reason: str | None = None, confidence: str = "high"
    ) -> Finding:
        """Return the attribution to the subject of ``guilty``; everybody else is dissent.

        What other nodes say of the same rank speaks for it: in a comparison everybody does.
        """
        rank, node = self.rank(guilty), guilty.node
        mine = [
            fault
            for fault in self.faults
            if (fault.node == node and (rank is None or self.rank(fault) in (None, rank)))
            or (rank is not None and self.rank(fault) == rank)
        ]
        others = [fault for fault in self.faults if fault not in mine]
        culprit = Culprit(
            kind=guilty.report.kind,
            node=node,
            rank=rank,
            local_rank=self.local_rank(guilty),
            gpu=guilty.report.gpu,
            reason=one_line(reason or guilty.report.reason),
        )
        return Finding(
            outcome="attributed",
            basis=Basis.DIRECT,
            why=why,
            culprit=culprit,
            evidence=self._each_once(mine),
            dissent=self._each_once(others),
            confidence=confidence,
        )

    def _each_once(self, faults: Iterable[NodeFault]) -> tuple[Evidence, ...]:
        """Return reports as evidence; a thousand ranks that say the same say it once."""
        return tuple(dict.fromkeys(map(self.evidence, faults)))

    def nobody(self, why: str, outcome: str = "inconclusive") -> Finding:
        """Return the finding that names nobody; every report is evidence."""
        evidence = self._each_once(self.faults)
        return Finding(outcome=outcome, basis=None, why=why, culprit=None, evidence=evidence)

    def tied(self, first: NodeFault, rest: Iterable[NodeFault]) -> list[NodeFault]:
        """Return those of other nodes too close to ``first`` in time to be called later."""
        return [
            fault
            for fault in rest
            if fault.node != first.node and abs(fault.at_ns - first.at_ns) <= TIE_NS
        ]


def last_line(fault: NodeFault) -> str:
    """Return the last line of a worker's output that the report carries, or an empty text."""
    lines = [output_line(line) for line in fault.report.evidence if line.strip()]
    return lines[-1] if lines else ""


def exit_reason(fault: NodeFault) -> str | None:
    """Return what stays the same when the same crash comes again: the exit and the exception."""
    ended = fault.report.exit
    if ended is None:
        return None
    if ended.signal is not None:
        return signal_name(ended.signal) + (f" from {one_line(ended.by)}" if ended.by else "")
    found = _EXCEPTION.match(last_line(fault))
    return f"exit code {ended.code}" + (f", {found.group(1)}" if found else "")


def who(fault: NodeFault, case: FaultCase) -> str:
    """Return ``rank 1 on node-1``, or the node where no single rank is meant."""
    rank = case.rank(fault)
    return fault.node if rank is None else f"rank {rank} on {fault.node}"


def say(fault: NodeFault, case: FaultCase) -> str:
    """Return one clause that says what happened to whom."""
    report, subject = fault.report, who(fault, case)
    message = one_line(report.message) or one_line(report.reason)
    match report.kind:
        case FaultKind.GPU_FATAL:
            rank = case.rank(fault)
            user = "" if rank is None else f" (used by rank {rank})"
            part = "hardware" if report.gpu is None else f"GPU {report.gpu}"
            return f"{part} of {fault.node}{user} reported a fatal fault: {message}"
        case FaultKind.NODE_LOST:
            first = case.world.index(fault.node) * case.nproc if fault.node in case.world else None
            held = "" if first is None else f" ({rank_list(range(first, first + case.nproc))})"
            message = message.removeprefix(f"{fault.node} is lost: ")
            return f"{fault.node}{held} is lost: {message}"
        case FaultKind.CRASH if report.exit is not None:
            line = last_line(fault)
            if report.exit.signal is not None:
                core = " and dumped core" if report.exit.core_dumped else ""
                if report.exit.by:
                    number = signal_name(report.exit.signal)
                    return f"{subject} was killed by {one_line(report.exit.by)} with {number}{core}"
                return f"{subject} was killed by {signal_name(report.exit.signal)}{core}"
            return f"{subject} ended with exit code {report.exit.code}" + (
                f": {line}" if line else ""
            )
        case FaultKind.OPERATOR:
            return message
        case FaultKind.WORKER_REPORTED:
            return f"{subject} reported a fault itself: {message}"
        case FaultKind.LOG_RULE | FaultKind.LOG_SLOW | FaultKind.LOG_HANG:
            return f"{subject} broke the log rule {one_line(report.reason)}: {message}"
        case FaultKind.SDC:
            place = "" if report.step is None else f" at step {report.step}"
            where = f" ({'; '.join(map(one_line, report.evidence[:2]))})" if report.evidence else ""
            whom = "ranks disagree" if report.rank is None else f"rank {report.rank} is corrupt"
            return f"{whom}{place}: {message}{where}"
        case _ if report.scope is Scope.JOB:
            return message
        case _:
            return f"{subject}: {message}"
