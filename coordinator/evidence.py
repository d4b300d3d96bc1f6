"""What an incident keeps of the last look at every rank: little of many, much of few.

Decides which ranks are kept whole, and says what is missing of whom.  An incident is written to
the journal at every change, so what goes in has a limit whatever nodes send.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from coordinator.incidents import Incident
from coordinator.stack_groups import group_stacks
from coordinator.wording import natural_key, one_line, rank_list
from sidecar.api import EvidenceReport
from sidecar.rank_evidence import RankEvidence

WHOLE_RANKS_MAX: Final = 4
"""Ranks whose whole evidence is kept: the culprit, some who stand apart, or one for all."""
MISSING_MAX: Final = 16
"""Different reasons kept; they repeat one another from rank to rank."""


def with_evidence(
    incident: Incident, reports: Mapping[str, EvidenceReport], owing: Collection[str]
) -> Incident:
    """Return ``incident`` with what the nodes saw; ``owing`` are those who did not say in time."""
    seen: dict[str, RankEvidence] = {}
    for node in sorted(reports, key=natural_key):
        seen.update(reports[node].evidence)
    culprit = None if incident.finding is None else incident.finding.culprit
    named = [] if culprit is None or culprit.rank is None else [culprit.rank]
    groups = group_stacks(seen, named)
    apart = [rank for group in groups if group.odd for rank in group.ranks]
    first = [rank for group in groups[:1] for rank in group.ranks[:1]]
    worth = list(dict.fromkeys(str(rank) for rank in (*named, *apart, *first)))
    whole = [rank for rank in worth if rank in seen][:WHOLE_RANKS_MAX]
    return replace(
        incident,
        stack_groups=groups,
        evidence={rank: seen[rank] for rank in whole},
        evidence_missing=_missing(seen, owing),
    )


def _missing(seen: Mapping[str, RankEvidence], owing: Collection[str]) -> tuple[str, ...]:
    by_reason: dict[str, list[int]] = {}
    for rank, evidence in seen.items():
        for reason in evidence.missing:
            if rank.isdecimal():
                by_reason.setdefault(one_line(reason), []).append(int(rank))
    told = [f"{rank_list(ranks)}: {reason}" for reason, ranks in by_reason.items()]
    late = [f"{one_line(node)}: nothing came in time" for node in sorted(owing, key=natural_key)]
    return (*late, *told)[:MISSING_MAX]
