"""What observers tell one another: a rank's snapshot and its place, as plain JSON.

Nothing is pickled, and what does not have the right form is refused.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from scout.report import Place
from scout.snapshot import GroupPosition, Phase, RankSnapshot

WORD_BYTES_MAX: Final = 1 << 20
"""A rank in thirty groups of a thousand members stays below a quarter of this."""

_NUMBERS: Final = {
    field.name
    for field in fields(RankSnapshot)
    if field.name
    not in ("rank", "local_rank", "node", "phase", "process_state", "groups", "seen_age_ns")
}


class BadWordError(ValueError):
    """A message that is none of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One rank's news.  ``count`` grows with every word of the rank."""

    count: int
    seen: RankSnapshot
    place: Place
    port: int = 0
    """Where this rank's observer listens, should the present host of the exchange be lost."""


def to_plain(word: Word) -> dict[str, Any]:
    """Return ``word`` as plain values; group members as one list, which JSON keeps short."""
    return asdict(word)


def from_plain(body: Any) -> Word:
    """Return the word in ``body``.  Raises `BadWordError`."""
    try:
        seen, place = body["seen"], body["place"]
        numbers = {name: _whole(seen[name]) for name in _NUMBERS}
        return Word(
            count=_needed(body["count"]),
            port=_needed(body["port"]),
            place=Place(
                rank=_needed(place["rank"]),
                host=str(place["host"]),
                local_rank=_needed(place["local_rank"]),
                gpu=_whole(place["gpu"]),
            ),
            seen=RankSnapshot(
                **numbers,
                rank=_needed(seen["rank"]),
                local_rank=_needed(seen["local_rank"]),
                node=str(seen["node"]),
                phase=Phase(seen["phase"]),
                process_state=None if seen["process_state"] is None else str(seen["process_state"]),
                groups=tuple(_group(it) for it in seen["groups"]),
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadWordError(f"not a word of an observer: {error}") from error


def _group(body: Mapping[str, Any]) -> GroupPosition:
    return GroupPosition(
        name=str(body["name"]),
        ranks=tuple(_needed(rank) for rank in body["ranks"]),
        seq=_needed(body["seq"]),
        fingerprint=_needed(body["fingerprint"]),
        op=str(body["op"]),
        inside=bool(body["inside"]),
    )


def _whole(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r} is no whole number")


def _needed(value: Any) -> int:
    number = _whole(value)
    if number is None:
        raise ValueError("a number is missing")
    return number
