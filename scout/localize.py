"""Which endpoint, host or switch makes communication slow: where independently slow groups meet.

A process group counts only when every member of it reported; it is slow when a strict majority
says so.  Exactly one rank in all slow groups, of at least two different memberships, and in no
healthy group, is the endpoint.  Otherwise the reason why not is the answer.
Source: the SCOUT guide, "Stragglers and Communication Localization".
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

SLOW_GROUPS_MIN: Final = 2
"""One slow group has at least two members, and nothing tells them apart."""
CANDIDATES_SHOWN_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupObservation:
    """One process group: who belongs to it, and whether each reporter found it slow."""

    group: str
    members: tuple[int, ...]
    reports: Mapping[int, bool]

    @property
    def is_complete(self) -> bool:
        """Whether every member reported."""
        return set(self.members) <= set(self.reports)

    @property
    def is_slow(self) -> bool:
        """Whether a strict majority of the members found it slow."""
        return 2 * sum(bool(self.reports.get(rank)) for rank in self.members) > len(self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalizedEndpoint:
    """Rank ``rank`` on ``host`` is what the slow groups have in common: replace that host."""

    rank: int
    host: str
    supporting_groups: tuple[str, ...]
    healthy_groups: tuple[str, ...]
    replacement_scope: str = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalizedSwitch:
    """Every slow group's traffic passes ``switch``, and no healthy group's does."""

    switch: str
    supporting_groups: tuple[str, ...]
    healthy_groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingToLocalize:
    """No answer, and why.  ``candidates`` are the ranks that could not be told apart."""

    why: str
    candidates: tuple[int, ...] = ()


CrossPGResult: TypeAlias = LocalizedEndpoint | LocalizedSwitch | NothingToLocalize


def localize(
    observations: Sequence[GroupObservation],
    hosts: Mapping[int, str],
    *,
    compute_stragglers: Collection[int] = (),
    switches: Mapping[str, tuple[str, ...]] | None = None,
) -> CrossPGResult:
    """Return the endpoint in which the slow groups meet, or the switch, or the reason why none.

    ``hosts`` maps ranks to hosts, ``switches`` hosts to the switches above them, nearest first.
    A group with a known compute straggler in it proves nothing about the network and is left out.
    """
    usable = [
        one
        for one in observations
        if one.is_complete and not set(one.members) & set(compute_stragglers)
    ]
    slow = [one for one in usable if one.is_slow]
    healthy = [one for one in usable if not one.is_slow]
    if not slow:
        return NothingToLocalize(why=_nothing_slow(observations, len(usable)))
    if len({one.members for one in slow}) < SLOW_GROUPS_MIN:
        return NothingToLocalize(
            why=f"only group {slow[0].group} is slow, and nothing tells its members apart",
            candidates=slow[0].members[:CANDIDATES_SHOWN_MAX],
        )
    shared = set.intersection(*(set(one.members) for one in slow))
    cleared = {rank for one in healthy for rank in one.members}
    left = sorted(shared - cleared)
    names = tuple(one.group for one in slow), tuple(one.group for one in healthy)
    if len(left) == 1:
        return LocalizedEndpoint(
            rank=left[0],
            host=hosts.get(left[0], "unknown host"),
            supporting_groups=names[0],
            healthy_groups=names[1],
        )
    if switches and (switch := _switch(slow, healthy, hosts, switches)) is not None:
        return LocalizedSwitch(switch=switch, supporting_groups=names[0], healthy_groups=names[1])
    return NothingToLocalize(why=_why_not(shared, left), candidates=tuple(left))


def _nothing_slow(observations: Sequence[GroupObservation], usable: int) -> str:
    missing = len(observations) - usable
    left_out = f"; {missing} left out as incomplete or with a compute straggler" if missing else ""
    return f"none of {usable} complete process groups is slow{left_out}"


def _why_not(shared: set[int], left: Sequence[int]) -> str:
    if not shared:
        return "the slow groups have no rank in common"
    if not left:
        return f"a healthy group contradicts: rank {min(shared)} is fast in it"
    shown = ", ".join(str(rank) for rank in left[:CANDIDATES_SHOWN_MAX])
    return f"the slow groups have several ranks in common: {shown}"


def _switch(
    slow: Sequence[GroupObservation],
    healthy: Sequence[GroupObservation],
    hosts: Mapping[int, str],
    switches: Mapping[str, tuple[str, ...]],
) -> str | None:
    """Return the one switch under which every slow group crosses and no healthy one does."""
    under_all = set.intersection(*(_crossed(one, hosts, switches) for one in slow))
    cleared = {name for one in healthy for name in _crossed(one, hosts, switches)}
    left = under_all - cleared
    return left.pop() if len(left) == 1 else None


def _crossed(
    one: GroupObservation, hosts: Mapping[int, str], switches: Mapping[str, tuple[str, ...]]
) -> set[str]:
    """Return the switches that traffic of a group passes: those above hosts it leaves."""
    members = {hosts.get(rank, "") for rank in one.members}
    if len(members) < 2:  # noqa: PLR2004 - a group on one host crosses no switch
        return set()
    paths = [switches.get(host, ()) for host in members]
    common = set.intersection(*(set(path) for path in paths)) if paths else set()
    crossed: set[str] = set()
    for path in paths:
        for name in path:
            crossed.add(name)
            if name in common:  # traffic turns round at the first switch above all of them
                break
    return crossed


def read_topology(text: str) -> Mapping[str, tuple[str, ...]]:
    """Return host -> switches from ``{"host": ["leaf", "spine"], ...}``.

    Raises `ValueError` with a sentence that names what is wrong.
    """
    try:
        document: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the topology is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(  # noqa: TRY004 - what a person wrote is wrong, not what a caller did
            "the topology is an object: host -> list of switches, nearest first"
        )
    for host, path in document.items():
        if not isinstance(path, list) or not all(isinstance(name, str) for name in path):
            raise ValueError(f"the switches above host {host!r} are a list of names")
    return {host: tuple(path) for host, path in document.items()}
