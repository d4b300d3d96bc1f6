"""Makes a message fit its frame: what is left out first, and what is never left out.

A message above the coordinator's limit would end the connection, and be sent again on the next.
Who the node is, its state, its generations, its ranks and steps always stay; what explains them
goes first, the oldest and longest of it.  Decides nothing about sending.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from sidecar.api import (
    CheckpointConfirmation,
    EvidenceReport,
    Hello,
    ProgressReport,
    StatusReport,
    Upward,
)
from sidecar.codec import MESSAGE_BYTES_MAX, encode
from sidecar.rank_evidence import RankEvidence

M = TypeVar("M", StatusReport, ProgressReport, EvidenceReport)

TEXT_CHARS_KEPT: Final = 200
STEPS_KEPT: Final = 2
"""Newest confirmed steps of each series: the last one, and the one before it to fall back to."""
FAULTS_KEPT: Final = 8
TAIL_LINES_KEPT: Final = 3
GROUPS_KEPT: Final = 1
LEFT_OUT: Final = "left out: the node's report was too large"


@dataclass(frozen=True, slots=True)
class Fitted:
    """The frame's ``data``, and what was ``left_out`` of it for its size, in words."""

    data: bytes
    left_out: tuple[str, ...] = ()


def fitted(message: Upward, bytes_max: int = MESSAGE_BYTES_MAX) -> Fitted | None:
    """Return the message as at most ``bytes_max`` bytes, None where even its core is larger."""
    match message:
        case Hello():
            data = encode(message)
            return Fitted(data) if len(data) <= bytes_max else None
        case StatusReport():
            return _shrunk(message, _STATUS, bytes_max)
        case ProgressReport():
            return _shrunk(message, _PROGRESS, bytes_max)
        case EvidenceReport():
            return _shrunk(message, _EVIDENCE, bytes_max)


def _shrunk(
    message: M, steps: Sequence[tuple[str, Callable[[M], M]]], bytes_max: int
) -> Fitted | None:
    left_out: list[str] = []
    data = encode(message)
    for what, shrink in steps:
        if len(data) <= bytes_max:
            break
        message = shrink(message)
        left_out.append(what)
        data = encode(message)
    return Fitted(data, tuple(left_out)) if len(data) <= bytes_max else None


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_KEPT else f"{text[: TEXT_CHARS_KEPT - 1]}\u2026"


def _without_labels(status: StatusReport) -> StatusReport:
    return replace(status, ranks=tuple(replace(rank, labels={}) for rank in status.ranks))


def _without_evidence(status: StatusReport) -> StatusReport:
    return replace(status, faults=tuple(replace(it, evidence=()) for it in status.faults))


def _short_texts(status: StatusReport) -> StatusReport:
    faults = (replace(it, reason=_cut(it.reason), message=_cut(it.message)) for it in status.faults)
    return replace(
        status, reason=_cut(status.reason), message=_cut(status.message), faults=tuple(faults)
    )


def _newest_steps(status: StatusReport) -> StatusReport:
    newest: dict[tuple[str, str], list[CheckpointConfirmation]] = {}
    for item in sorted(status.checkpoints, key=lambda it: it.step):
        newest.setdefault((item.prefix, item.checkpoint_type), []).append(item)
    kept = tuple(item for items in newest.values() for item in items[-STEPS_KEPT:])
    return replace(status, checkpoints=kept)


def _first_faults(status: StatusReport) -> StatusReport:
    return replace(status, faults=status.faults[:FAULTS_KEPT])


def _short_tails(report: ProgressReport) -> ProgressReport:
    tails = {
        rank: tuple(map(_cut, lines[-TAIL_LINES_KEPT:])) for rank, lines in report.log_tails.items()
    }
    return replace(report, log_tails=tails)


def _few_groups(report: ProgressReport) -> ProgressReport:
    ranks = (replace(rank, groups=rank.groups[:GROUPS_KEPT]) for rank in report.ranks)
    return replace(report, ranks=tuple(ranks))


def _main_threads(report: EvidenceReport) -> EvidenceReport:
    evidence = {
        rank: replace(
            seen,
            threads=seen.threads[:1],
            environment={},
            flight_record=(),
            missing=(*seen.missing, LEFT_OUT),
        )
        for rank, seen in report.evidence.items()
    }
    return replace(report, evidence=evidence)


def _no_looks(report: EvidenceReport) -> EvidenceReport:
    return replace(
        report, evidence={rank: RankEvidence(missing=(LEFT_OUT,)) for rank in report.evidence}
    )


_STATUS: Final = (
    ("ranks' labels", _without_labels),
    ("faults' evidence", _without_evidence),
    ("ends of long texts", _short_texts),
    ("older checkpoints", _newest_steps),
    ("later faults", _first_faults),
)
_PROGRESS: Final = (
    ("older log lines", _short_tails),
    ("positions in lesser groups", _few_groups),
    ("log lines", lambda report: replace(report, log_tails={})),
)
_EVIDENCE: Final = (
    ("all but the main threads", _main_threads),
    ("every look at a rank", _no_looks),
)
