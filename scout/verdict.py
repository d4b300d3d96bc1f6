"""What a comparison of peers may conclude, and the evidence that travels with it.

Three outcomes and no fourth: the peers agree, the evidence names ranks, or it names nobody and
says why.  A check that could not run is a different thing altogether and is never expressed as
one of these.  Source: the SCOUT guide, "Peer Groups and Consensus".
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Basis(StrEnum):
    """Why an attribution may be believed."""

    MAJORITY = "majority"
    """Values that should be equal differ, and a strict majority of the electorate agrees."""
    CAUSAL = "causal"
    """The ranks wait for one another, and the named rank waits for nobody."""
    DIRECT = "direct"
    """The machine itself says so: an exit, a stopped process, a hardware report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One observation on one surface (``exit``, ``log``, ``heartbeat``, ``position`` ...)."""

    surface: str
    ranks: tuple[int, ...]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Agree:
    """Every member of the electorate answered, and all answers satisfy the comparison rule.

    ``why`` says so where more is to be said, such as what the others rightly wait for.
    """

    why: str = ""
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributed:
    """The evidence names ``ranks`` (global ranks, ascending, never empty)."""

    ranks: tuple[int, ...]
    basis: Basis
    why: str
    evidence: tuple[Evidence, ...]

    def __post_init__(self) -> None:
        assert self.ranks, "an attribution names at least one rank"
        assert tuple(sorted(set(self.ranks))) == self.ranks, "ranks are ascending and distinct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inconclusive:
    """The evidence disagrees, or is missing, without enough support to name anyone."""

    why: str
    evidence: tuple[Evidence, ...] = ()


Verdict: TypeAlias = Agree | Attributed | Inconclusive
