"""Comparing what equivalent peers say: who dissents, and whether enough agree to say so.

The electorate is fixed before anybody answers.  Silence is a value of its own: a silent member
stays in the electorate, dissents from every answer, and is named only where a strict majority of
the whole electorate gave one and the same answer.  However many are silent, silence convicts
nobody who spoke.  Two peers can disagree but never convict, and neither can a tie.

This module knows values and members; what the values mean is for its callers.
Source: the SCOUT guide, "Peer Groups and Consensus".
"""

import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Final

from scout.verdict import Agree, Attributed, Basis, Evidence, Inconclusive, Verdict

DETAIL_CHARS_MAX: Final = 120
"""Of a value in the evidence: enough to tell two digests apart, short enough for a table."""


def exact(votes: Mapping[int, Hashable], electorate: Collection[int], surface: str) -> Verdict:
    """Compare answers that must be equal; ``surface`` names what was compared.

    Values are compared with ``==``: hand floating-point numbers in as their bit patterns.  Votes
    of ranks outside the electorate are not counted.
    """
    members = sorted(set(electorate))
    camps = _camps(votes, members)
    silent = tuple(rank for rank in members if rank not in votes)
    evidence = _evidence(votes, camps, silent, surface)
    if not camps:
        return Inconclusive(why=f"nobody answered on {surface}", evidence=evidence)
    largest = camps[0]
    if len(largest) == len(members):
        return Agree(evidence=evidence)
    if 2 * len(largest) > len(members):
        return Attributed(
            ranks=tuple(rank for rank in members if rank not in largest),
            basis=Basis.MAJORITY,
            why=f"{len(largest)} of {len(members)} ranks agree on {surface}, the others do not",
            evidence=evidence,
        )
    return Inconclusive(why=_why_not(camps, silent, members, surface), evidence=evidence)


SIGMA: Final = 4.0
"""Deviations, in standard deviations estimated from the MAD, that are still ordinary."""
MAD_TO_SIGMA: Final = 1.4826
"""Makes the median absolute deviation of normally distributed values their standard deviation."""


def statistical(
    votes: Mapping[int, float],
    electorate: Collection[int],
    surface: str,
    *,
    sigma: float = SIGMA,
    slack: float = 0.0,
) -> Verdict:
    """Compare measurements that should be alike, such as durations, by their median and MAD.

    A value is ordinary within ``max(sigma * 1.4826 * MAD, slack)`` of the median; ``slack`` is in
    the values' unit and keeps values that hardly vary from being told apart.  Whoever is silent
    or not finite is never ordinary.  Ranks are named where the ordinary ones are a strict
    majority of the electorate.  Source: the SCOUT guide, and Leys et al., "Detecting outliers"
    (2013), for MAD.
    """
    members = sorted(set(electorate))
    given = {rank: votes[rank] for rank in members if rank in votes}
    finite = [value for value in given.values() if math.isfinite(value)]
    silent = tuple(rank for rank in members if rank not in given)
    evidence = [
        Evidence(surface=surface, ranks=(rank,), detail=f"{value:g}")
        for rank, value in sorted(given.items())
    ]
    if silent:
        evidence.append(Evidence(surface=surface, ranks=silent, detail="silent"))
    if not finite:
        return Inconclusive(why=f"nobody answered on {surface}", evidence=tuple(evidence))
    middle = statistics.median(finite)
    # The deviation of two values from their median is always the same, and so says nothing.
    usual = len(finite) > 2  # noqa: PLR2004
    spread = statistics.median(abs(value - middle) for value in finite) if usual else 0.0
    bound = max(sigma * MAD_TO_SIGMA * spread, slack)
    ordinary = {rank for rank, value in given.items() if abs(value - middle) <= bound}
    if len(ordinary) == len(members):
        return Agree(evidence=tuple(evidence))
    if len(members) > 2 and 2 * len(ordinary) > len(members):  # noqa: PLR2004 - two cannot convict
        return Attributed(
            ranks=tuple(rank for rank in members if rank not in ordinary),
            basis=Basis.MAJORITY,
            why=f"{len(ordinary)} of {len(members)} ranks are within {bound:g} of the median "
            f"{middle:g} on {surface}, the others are not",
            evidence=tuple(evidence),
        )
    return Inconclusive(
        why=f"no strict majority is ordinary on {surface}: {len(ordinary)} of {len(members)}",
        evidence=tuple(evidence),
    )


def _camps(votes: Mapping[int, Hashable], members: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the members who answered alike, the largest camp first."""
    by_value: dict[Hashable, list[int]] = {}
    for rank in members:
        if rank in votes:
            by_value.setdefault(votes[rank], []).append(rank)
    return sorted((tuple(camp) for camp in by_value.values()), key=lambda camp: (-len(camp), camp))


def _evidence(
    votes: Mapping[int, Hashable],
    camps: Sequence[tuple[int, ...]],
    silent: tuple[int, ...],
    surface: str,
) -> tuple[Evidence, ...]:
    found = [
        Evidence(surface=surface, ranks=camp, detail=str(votes[camp[0]])[:DETAIL_CHARS_MAX])
        for camp in camps
    ]
    if silent:
        found.append(Evidence(surface=surface, ranks=silent, detail="silent"))
    return tuple(found)


def _why_not(
    camps: Sequence[tuple[int, ...]],
    silent: tuple[int, ...],
    members: Sequence[int],
    surface: str,
) -> str:
    needed = len(members) // 2 + 1
    if len(members) == 2:  # noqa: PLR2004 - the smallest group in which one can dissent
        seen = "only one answered" if silent else "they disagree"
        return f"two peers cannot convict each other: {seen} on {surface}"
    tied = [camp for camp in camps if len(camp) == len(camps[0])]
    split = f"{len(tied)} camps of {len(tied[0])}" if len(tied) > 1 else f"at most {len(camps[0])}"
    quiet = f" and {len(silent)} silent" if silent else ""
    return (
        f"no strict majority on {surface}: {split} among {len(members)} ranks{quiet}, "
        f"{needed} would have to agree"
    )
