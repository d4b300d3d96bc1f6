"""Who broke the job: one judgement over every report and snapshot of an incident.

The rules stand in order of directness: what a machine says of itself comes before what peers say
of one another.  A fault that spreads (a NaN through an all-reduce, a lost connection) convicts
its source only.  Nobody is named when the evidence points at several alike.
It decides nothing about what follows, and it reads no clock.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeAlias

from coordinator.exit_causes import PREEMPTED, ExitPolicy, is_preempted
from coordinator.fault_case import TIE_NS, FaultCase, exit_reason, last_line, say, who
from coordinator.incidents import Culprit, Finding, NodeFault
from coordinator.lost_peer import is_victim, only_waited
from coordinator.wording import natural_key, one_line, rank_list
from scout import hang
from scout.desync import desync
from scout.hang import RankSnapshot
from scout.mismatch import judge_messages
from scout.report import confidence
from scout.verdict import Agree, Attributed, Evidence, Inconclusive
from sidecar.api import FaultKind

_NON_FINITE: Final = re.compile(
    r"(?<![\w.])(?:nan|[+-]?infinity|non[-_ ]?finite)(?!\w)|[=:\s][+-]?inf(?!\w)", re.IGNORECASE
)
_PROCESS_STATES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "T": "the process is stopped",
        "D": "the process is in an uninterruptible wait",
        "Z": "the process is a zombie",
        "X": "the process is gone",
    }
)
_STALLS: Final = frozenset({FaultKind.PROCESS_STALL, FaultKind.LOG_HANG, FaultKind.STARTUP_TIMEOUT})


def judge(
    incident_faults: Sequence[NodeFault],
    snapshots: Sequence[RankSnapshot],
    world: Sequence[str],
    nproc: int,
    stall_ns: int,
    *,
    exits: ExitPolicy | None = None,
) -> Finding:
    """Name the culprit of an incident, or say why nobody is named.

    ``world`` is the node of each group rank when it broke, ``nproc`` the workers of a node.
    ``stall_ns`` is the silence that counts as a stall in `scout.hang.judge`; ``exits`` says how a
    scheduler ends what it takes away.
    """
    inside = [
        fault
        for fault in incident_faults
        if fault.node in world or fault.report.kind is FaultKind.OPERATOR
    ]
    case = FaultCase(
        faults=tuple(sorted(inside or incident_faults, key=lambda fault: fault.at_ns)),
        snapshots=tuple(snapshots),
        world=tuple(world),
        nproc=nproc,
        stall_ns=stall_ns,
        exits=exits or ExitPolicy(),
    )
    if not case.faults:
        return Finding(outcome="agree", basis=None, why="no node reported a fault", culprit=None)
    for rule in _RULES:
        finding = rule(case)
        if finding is not None:
            return finding
    return case.nobody(f"nothing names a culprit: {say(case.faults[0], case)}")


def damaged_at(faults: Iterable[NodeFault]) -> int | None:
    """Return the earliest step at which a value that is not finite was seen, or None.

    This is the ``not_after`` of the checkpoint choice.
    """
    steps = [fault.report.step for fault in faults if _is_non_finite(fault)]
    return min((step for step in steps if step is not None), default=None)


# --- the rules, most direct first -------------------------------------------------------------


def _person(case: FaultCase) -> Finding | None:
    asked = case.of(FaultKind.OPERATOR)
    return case.named(asked[0], say(asked[0], case)) if asked else None


def _preempted(case: FaultCase) -> Finding | None:
    """Blame nobody for what a scheduler did: its signal came before everything else that broke."""
    if case.of(FaultKind.GPU_FATAL):
        return None
    own = [fault for fault in case.of(FaultKind.CRASH, FaultKind.NODE_LOST) if not is_victim(fault)]
    if not own or not is_preempted(own[0], case.exits):
        return None
    taken = [fault for fault in own if is_preempted(fault, case.exits)]
    nodes = ", ".join(sorted({fault.node for fault in taken}, key=natural_key))
    return case.nobody(f"preempted on {nodes}: {say(own[0], case)}; nobody is to blame", PREEMPTED)


def _hardware(case: FaultCase) -> Finding | None:
    for kind in (FaultKind.GPU_FATAL, FaultKind.NODE_LOST):
        found = case.of(kind)
        if found:
            also = sorted({fault.node for fault in found} - {found[0].node})
            more = f"; the same was reported of {', '.join(also)}" if also else ""
            return case.named(found[0], say(found[0], case) + more)
    return None


def _corruption(case: FaultCase) -> Finding | None:
    """Name whom the ranks' own comparison names, if all that name somebody name the same."""
    found = case.of(FaultKind.SDC)
    if not found:
        return None
    named = sorted({it.report.rank for it in found if it.report.rank is not None})
    told = next((it for it in found if it.report.rank is not None), found[0])
    if len(named) != 1 or not 0 <= named[0] < case.world_size:
        return case.nobody(f"values differ between ranks, and nobody is named: {say(told, case)}")
    guilty = replace(told, node=case.world[named[0] // case.nproc])
    return case.named(guilty, say(told, case))


def _non_finite(case: FaultCase) -> Finding | None:
    found = [fault for fault in case.faults if _is_non_finite(fault)]
    if not found:
        return None
    steps = [fault.report.step for fault in found if fault.report.step is not None]
    first_step = min(steps, default=None)
    earliest = [fault for fault in found if fault.report.step == first_step]
    first, ranks = earliest[0], case.ranks(earliest)
    place = "" if first_step is None else f" at step {first_step}"
    line = last_line(first) or one_line(first.report.message)
    shared = len(ranks) > 1 and 2 * len(ranks) >= case.world_size
    if shared or case.tied(first, earliest[1:]):
        return case.nobody(
            f"{rank_list(ranks)} printed a value that is not finite{place} together: it was in "
            f"what they share, so the log alone names nobody: {line}"
        )
    why = f"{who(first, case)} was the first to print a value that is not finite{place}: {line}"
    later = [rank for rank in case.ranks(found) if rank != case.rank(first)]
    if later:
        why += f"; {rank_list(later)} printed one later, as it spreads with the next all-reduce"
    return case.named(first, why)


def _crash(case: FaultCase) -> Finding | None:
    crashes = case.of(FaultKind.CRASH)
    own = [fault for fault in crashes if not is_victim(fault)]
    if not own:
        return None
    # What a scheduler ends after something broke is cleaned up, not guilty.
    own = [fault for fault in own if not is_preempted(fault, case.exits)] or own
    # A death by signal came from outside the script; an exception may be its consequence.
    suspects = [fault for fault in own if _by_signal(fault)] or own
    alike = _alike(case, suspects)
    if alike is not None:
        return alike
    first = _explained(suspects, case)
    why = say(first, case)
    also = [rank for rank in case.ranks(own) if rank != case.rank(first)]
    if also:
        why += f"; {rank_list(also)} failed as well"
    victims = case.ranks(fault for fault in crashes if fault not in own)
    if victims:
        why += f"; {rank_list(victims)} only lost their peer"
    return case.named(first, why, exit_reason(first))


def _spoken(case: FaultCase) -> Finding | None:
    for kind in (FaultKind.LOG_RULE, FaultKind.WORKER_REPORTED):
        own = [fault for fault in case.of(kind) if not is_victim(fault)]
        if own:
            return _alike(case, own) or case.named(own[0], say(own[0], case))
    return None


def _mismatch(case: FaultCase) -> Finding | None:
    """Name who was in another collective by torch's own messages, each of which tells of two."""
    lines = [line for fault in case.of(FaultKind.CRASH) for line in fault.report.evidence]
    verdict = judge_messages(lines, range(case.world_size))
    return _from_verdict(case, verdict, ()) if isinstance(verdict, Attributed) else None


def _desync(case: FaultCase) -> Finding | None:
    """Name who was in another collective when the others crashed in theirs.

    Two buffers that do not fit make a communication library end the healthy side.
    """
    if not case.world or not case.of(FaultKind.CRASH):
        return None
    verdict = desync(case.snapshots)
    if not isinstance(verdict, Attributed) or 2 * len(verdict.ranks) > case.world_size:
        return None
    return _from_verdict(case, verdict, case.of(*_STALLS))


def _stall(case: FaultCase) -> Finding | None:
    stalls = case.of(*_STALLS)
    if not case.world or not (stalls or case.snapshots):
        return None
    crashed = set(case.ranks(case.of(FaultKind.CRASH)))
    verdict = hang.judge(case.snapshots, range(case.world_size), case.stall_ns)
    match verdict:
        case Attributed() if crashed.isdisjoint(verdict.ranks):
            return _from_verdict(case, verdict, stalls)
        case Inconclusive() if stalls:
            found = case.nobody(verdict.why)
            return _with_evidence(found, verdict.evidence)
        case Agree() if stalls and not crashed:
            why = f"{say(stalls[0], case)}, but {verdict.why or 'no rank is behind the others'}"
            return _with_evidence(case.nobody(why, "agree"), verdict.evidence)
    return None


def _lost_peers_only(case: FaultCase) -> Finding | None:
    victims = case.of(FaultKind.CRASH) or case.of(FaultKind.LOG_RULE, FaultKind.WORKER_REPORTED)
    if not victims:
        return None
    first, *rest = victims
    tied = case.tied(first, rest)
    told = f"{rank_list(case.ranks(victims))} only say that a peer was lost"
    if all(only_waited(fault) for fault in victims):
        others = set(range(case.world_size)) - set(case.ranks(victims))
        missing = f"; {rank_list(others)} did not fail" if others else ""
        return case.nobody(
            f"{rank_list(case.ranks(victims))} gave up waiting for a peer{missing}, and nothing "
            "says for whom they waited"
        )
    if tied:
        names = rank_list(case.ranks([first, *tied]))
        return case.nobody(
            f"{told}, and {names} did so within {TIE_NS // 1_000_000} ms: nobody can be named"
        )
    lead = f" by {(rest[0].at_ns - first.at_ns) / 1e6:.0f} ms" if rest else ""
    why = f"{told}; {say(first, case)}, the first{lead}, which is weak evidence"
    return case.named(first, why, exit_reason(first), confidence="low")


_Rule: TypeAlias = Callable[[FaultCase], Finding | None]
_RULES: Final[tuple[_Rule, ...]] = (
    _person,
    _preempted,
    _hardware,
    _corruption,
    _non_finite,
    _mismatch,
    _crash,
    _spoken,
    _desync,
    _stall,
    _lost_peers_only,
)


# --- leaves -----------------------------------------------------------------------------------


def _explained(suspects: Sequence[NodeFault], case: FaultCase) -> NodeFault:
    """Return the first suspect, in the words of a later report that knows who killed it."""
    first = suspects[0]
    rank = case.rank(first)
    known = (one for one in suspects if one.report.exit is not None and one.report.exit.by)
    return next((one for one in known if one.node == first.node and case.rank(one) == rank), first)


def _alike(case: FaultCase, own: Sequence[NodeFault]) -> Finding | None:
    """Return the finding that most ranks failed in one and the same way, or None."""
    first = own[0]
    shape = (exit_reason(first), first.report.reason, last_line(first))
    same = [
        fault
        for fault in own
        if (exit_reason(fault), fault.report.reason, last_line(fault)) == shape
    ]
    ranks = case.ranks(same)
    if len(ranks) < 2 or 2 * len(ranks) <= case.world_size or not last_line(first):  # noqa: PLR2004
        return None
    return case.nobody(
        f"{rank_list(ranks)} failed in the same way, so no rank stands out: {last_line(first)}",
        "agree",
    )


def _from_verdict(case: FaultCase, verdict: Attributed, stalls: Sequence[NodeFault]) -> Finding:
    rank = verdict.ranks[0]
    snapshot = next((item for item in case.snapshots if item.rank == rank), None)
    node = snapshot.node if snapshot is not None else case.world[rank // case.nproc]
    mine = tuple(item for item in verdict.evidence if set(item.ranks) & set(verdict.ranks))
    kind = stalls[0].report.kind if stalls else FaultKind.PROCESS_STALL
    reports = tuple(
        case.evidence(f)
        for f in case.faults
        if f not in stalls and case.rank(f) not in verdict.ranks
    )
    return Finding(
        outcome="attributed",
        basis=verdict.basis,
        why=f"rank {rank} on {node} holds the others up: "
        + one_line(verdict.why.removeprefix(f"rank {rank}: ")),
        culprit=Culprit(
            kind=kind,
            node=node,
            rank=rank,
            local_rank=rank % case.nproc,
            gpu=None,
            reason=_stall_reason(kind, snapshot, mine),
        ),
        evidence=mine,
        dissent=tuple(item for item in verdict.evidence if item not in mine) + reports,
        confidence=confidence(verdict.basis, len(verdict.ranks)),
    )


def _stall_reason(
    kind: FaultKind, snapshot: RankSnapshot | None, evidence: Sequence[Evidence]
) -> str:
    if any(item.surface == "collective" for item in evidence):
        return f"{kind}: it is in another collective than the others"
    state = None if snapshot is None else _PROCESS_STATES.get(snapshot.process_state or "")
    return str(kind) if state is None else f"{kind}: {state}"


def _with_evidence(finding: Finding, more: tuple[Evidence, ...]) -> Finding:
    return Finding(
        outcome=finding.outcome,
        basis=None,
        why=finding.why,
        culprit=None,
        evidence=(*finding.evidence, *more),
    )


def _is_non_finite(fault: NodeFault) -> bool:
    report = fault.report
    if report.kind not in (FaultKind.LOG_RULE, FaultKind.LOG_SLOW):
        return False
    return any(_NON_FINITE.search(text) for text in (report.message, *report.evidence))


def _by_signal(fault: NodeFault) -> bool:
    return fault.report.exit is not None and fault.report.exit.signal is not None
