"""What torch's own comparison of collectives says (``TORCH_DISTRIBUTED_DEBUG=DETAIL``).

Each of its messages tells of two ranks only, and of two nobody can be convicted.  Several of them
are votes: who is in another collective than a strict majority of the electorate is named.
This module knows one text; it reads no log.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from scout.consensus import exact
from scout.verdict import Attributed, Inconclusive, Verdict

_SAYS: Final = re.compile(
    r"Rank (?P<rank>\d+) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<seq>\d+)(?:,\s*)?)?OpType=(?P<op>\w+)(?P<rest>.*?)\)"
    r"(?=,? but |\.?\s*(?:Collectives|$))",
    re.IGNORECASE | re.DOTALL,
)
_SHAPE: Final = re.compile(r"TensorShape=(\[[^\]]*\])")
_TYPE: Final = re.compile(r"TensorDtypes=(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The collective that a rank was in; ``seq`` None where torch did not count."""

    seq: int | None
    op: str
    shape: str = ""
    dtype: str = ""

    def __str__(self) -> str:
        return " ".join(map(str, filter(None, (self.op, self.seq, self.dtype, self.shape))))


def parse(text: str) -> Mapping[int, Running]:
    """Return rank -> collective as a message tells them, empty when it is no such message."""
    found: dict[int, Running] = {}
    for match in _SAYS.finditer(text):
        rest = match["rest"]
        shape, dtype = _SHAPE.search(rest), _TYPE.search(rest)
        found[int(match["rank"])] = Running(
            seq=None if match["seq"] is None else int(match["seq"]),
            op=match["op"].upper(),
            shape=shape[1] if shape else "",
            dtype=dtype[1] if dtype else "",
        )
    return found


def judge_messages(texts: Iterable[str], electorate: Collection[int]) -> Verdict | None:
    """Return whom several messages name; None when there is no such message.

    A rank of which no message tells counts in the electorate and is never named.
    """
    votes = {rank: running for text in texts for rank, running in parse(text).items()}
    if not votes:
        return None
    verdict = exact(votes, electorate, "collective")
    if not isinstance(verdict, Attributed):
        return verdict
    ranks = tuple(rank for rank in verdict.ranks if rank in votes)
    if not ranks:
        return Inconclusive(why="every rank that was told of agrees", evidence=verdict.evidence)
    return Attributed(ranks=ranks, basis=verdict.basis, why=verdict.why, evidence=verdict.evidence)
