"""What fails again and again, and because of what: checkpoint, data, node or script.

A registry of sightings: which failure (by what stays the same of it) was seen from which
checkpoint, at which position in the data, on which nodes and with which version of the script.
What repeats while one of these changes is not that one's fault:

- twice from one checkpoint: the checkpoint is given up and the job goes back one;
- again at the same place from an older one, always on one node: it is that node;
- on two sets of nodes that share none: it is the script or its data, and the job stops.

A checkpoint that cannot even be loaded is given up at the first sighting, step by step.  It
refuses to know files and nodes beyond their names, and it restarts nothing.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.exit_causes import PREEMPTED
from coordinator.fault_case import last_line
from coordinator.incidents import Incident, NodeFault
from coordinator.wording import one_line
from sidecar.api import CheckpointPointer, FaultKind

SIGHTINGS_KEPT_MAX: Final = 256
"""Sightings remembered of one job: as many as its restarts."""

SIGNATURE_CHARS_MAX: Final = 200

_NO_SUSPECT: Final = frozenset({FaultKind.GPU_FATAL, FaultKind.NODE_LOST, FaultKind.OPERATOR})
"""Faults whose cause is known already: hardware, a node that is gone, a person."""

_FROM_OUTSIDE: Final = re.compile(
    r"SIG(?:HUP|INT|QUIT|KILL|TERM|STOP|TSTP|XCPU) \(signal \d+\)$|the process is stopped"
)
"""What somebody else does to a process says nothing of what it computed.  A signal that is known
to come from the kernel (out of memory) names its sender behind the number, and counts."""

_CHANGING: Final = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?", re.IGNORECASE)
"""Numbers and addresses in a message: the same failure prints others."""

_CANNOT_LOAD: Final = re.compile(
    r"PytorchStreamReader|central directory|invalid magic number|UnpicklingError|Ran out of input"
    r"|pickle data was truncated|invalid load key|SafetensorError|HeaderTooLarge"
    r"|MetadataIncompleteBuffer|CheckpointException|unexpected EOF|not a whole checkpoint"
    r"|CheckpointUnusable|zarr.*(?:missing|corrupt)|checksum mismatch",
    re.IGNORECASE,
)
"""How torch, pickle, safetensors and others say that what they read is torn."""

_COMPLAINS: Final = re.compile(r"error|cannot|corrupt|no such file", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One failure.  ``position`` is the furthest completed step, None before the first one."""

    at_ns: int
    signature: str
    checkpoint: tuple[CheckpointPointer, ...]
    """What the generation that failed was started from."""
    position: int | None
    nodes: tuple[str, ...]
    script: str = ""
    torn: bool = False
    """It failed to load that checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What is to be avoided.  ``reason`` is one clause, empty when nothing repeats."""

    reason: str = ""
    demoted: tuple[CheckpointPointer, ...] = ()
    blamed: tuple[str, ...] = ()
    stop: bool = False


def sighting_of(
    incident: Incident, started_from: Sequence[CheckpointPointer], script: str, at_ns: int
) -> Sighting | None:
    """Return what is to be remembered of ``incident``, or None when its cause is known."""
    finding = incident.finding
    if (
        finding is None
        or finding.outcome == PREEMPTED
        or any(it.report.kind is FaultKind.OPERATOR for it in incident.faults)
    ):
        return None
    culprit = finding.culprit
    if culprit is None:
        first = incident.faults[0] if incident.faults else None
        name = f"{finding.outcome}:{first.report.kind if first else ''}"
        about: list[NodeFault] = [first] if first else []
    elif culprit.kind in _NO_SUSPECT or _FROM_OUTSIDE.search(culprit.reason):
        return None
    else:
        name = f"{culprit.kind}:{culprit.reason}"
        about = [
            it
            for it in incident.faults
            if it.node == culprit.node and it.report.kind is culprit.kind
        ]
    line = last_line(about[0]) if about else ""
    position = _position(incident)
    unread = () if position is not None else _torn_on(incident.faults, started_from)
    torn = bool(unread)
    return Sighting(
        at_ns=at_ns,
        signature="torn" if torn else _CHANGING.sub("#", f"{name}:{line}")[:SIGNATURE_CHARS_MAX],
        checkpoint=tuple(started_from),
        position=position,
        nodes=unread or (() if culprit is None else (culprit.node,)),
        script=script,
        torn=torn,
    )


def judge(history: Sequence[Sighting], new: Sighting, *, older: bool, nodes_at_hand: int) -> Ruling:
    """Say what of ``new`` repeats what was seen before.

    ``older`` says that an older whole checkpoint exists, ``nodes_at_hand`` how many nodes stand
    by: a node is given up only for another one.
    """
    if new.torn and new.checkpoint:
        before = history[-1] if history else None
        alone = len(new.nodes) == 1 and before is not None and before.nodes == new.nodes
        if alone and before is not None and before.torn and nodes_at_hand > 0:
            return Ruling(
                blamed=new.nodes,
                reason=f"two checkpoints in turn could not be loaded on {new.nodes[0]} only: "
                "another node takes its ranks",
            )
        return _give_up(new, "it could not be loaded")
    same = [
        it
        for it in history
        if (it.signature, it.script) == (new.signature, new.script)
        and (it.checkpoint == new.checkpoint or it.position == new.position)
    ]
    if not same:
        return Ruling()
    seen = [*same, new]
    if older and new.checkpoint and all(it.checkpoint == new.checkpoint for it in seen):
        return _give_up(new, f"the same failure came from it {_times(len(seen))}")
    places = {frozenset(it.nodes) for it in seen if it.nodes}
    where = "" if new.position is None else f" at step {new.position}"
    if any(one.isdisjoint(other) for one in places for other in places):
        names = ", ".join(sorted(frozenset().union(*places)))
        return Ruling(
            stop=True,
            reason=f"the same failure{where} on nodes that have nothing in common ({names}): it "
            "is the script or its data, not a node, and starting it again would fail the same way",
        )
    if len(places) == 1 and all(it.nodes for it in seen) and len(next(iter(places))) == 1:
        (node,) = next(iter(places))
        if nodes_at_hand > 0:
            return Ruling(
                blamed=(node,),
                reason=f"the same failure{where} came {_times(len(seen))}, always on {node}: "
                "another node takes its ranks",
            )
    return Ruling()


def _give_up(new: Sighting, why: str) -> Ruling:
    steps = ", ".join(sorted({f"step {pointer.step}" for pointer in new.checkpoint}))
    return Ruling(demoted=new.checkpoint, reason=f"the checkpoint of {steps} is given up: {why}")


def _times(count: int) -> str:
    return {2: "twice", 3: "three times"}.get(count, f"{count} times")


def _position(incident: Incident) -> int | None:
    """Return the furthest completed step: what the pages said when all were looked at."""
    steps = [it.step for it in incident.snapshots if it.step is not None]
    if incident.steps_at_fault is not None:
        steps.append(incident.steps_at_fault)
    return max(steps, default=None)


def _torn_on(
    faults: Iterable[NodeFault], started_from: Sequence[CheckpointPointer]
) -> tuple[str, ...]:
    """Return the nodes of which a rank says that it could not read what it was told to load."""
    named = [path for it in started_from for path in (it.path, *dict(it.others).values()) if path]
    found = []
    for fault in faults if named else ():
        report = fault.report
        if report.kind not in (FaultKind.CRASH, FaultKind.WORKER_REPORTED, FaultKind.LOG_RULE):
            continue
        text = "\n".join([report.reason, report.message, *report.evidence])
        if _CANNOT_LOAD.search(text) or any(_tells_of(path, text) for path in named):
            found.append(fault.node)
    return tuple(sorted(set(found)))


def _tells_of(path: str, text: str) -> bool:
    """Return True when the last lines of a crash at start-up name the checkpoint itself."""
    return path in text and _COMPLAINS.search(text) is not None


def told(ruling: Ruling) -> str:
    """Return the ruling as an addition to a decision's reason."""
    return f"; {one_line(ruling.reason, 600)}" if ruling.reason else ""
