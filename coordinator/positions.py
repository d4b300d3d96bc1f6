"""Where every rank stood when the job stopped, with the odd one marked.

Decides only who is marked, and why.  The verdict is `coordinator.culprit`'s; a mark is what a
person's eye would be drawn to in a row of a thousand equal positions.
"""

from collections import Counter
from typing import Final

from coordinator.incidents import Incident
from scout.hang import RankSnapshot

CULPRIT: Final = "culprit"
APART: Final = "apart"
"""A strict majority of the ranks stood together at another position."""


def marks(incident: Incident) -> dict[int, str]:
    """Return rank -> mark, for the ranks that stand out."""
    places = {it.rank: _place(it) for it in incident.snapshots}
    found: dict[int, str] = {}
    counted = Counter(places.values()).most_common(1)
    if counted and 2 * counted[0][1] > len(places):
        found = {rank: APART for rank, place in places.items() if place != counted[0][0]}
    culprit = incident.finding.culprit if incident.finding is not None else None
    if culprit is not None and culprit.rank is not None:
        found[culprit.rank] = CULPRIT
    return found


def _place(it: RankSnapshot) -> tuple[int | None, int | None]:
    return it.step, it.collective_seq
