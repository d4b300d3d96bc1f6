"""Pieces of an expression so plain that there is only one way to match them.

Decides whether at every point the next byte alone says how to go on.  Such a piece is written anew
for Python's `re`, with quantifiers that never give back: it cannot backtrack, whoever wrote it,
and starts faster than RE2 does.  What is not understood, or could go two ways, is left to RE2.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_BYTES: Final = frozenset(range(256))
_DIGITS: Final = frozenset(b"0123456789")
_WORD: Final = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz")
_SPACE: Final = frozenset(b"\t\n\f\r ")
_LINE_END: Final = frozenset(b"\n")
_CLASSES: Final = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_ESCAPED: Final = {"t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_NOT_ASCII: Final = frozenset(range(0x80, 0x100))
_GROUP: Final = re.compile(r"\(\?P?<\w+>|\(\?:|\((?!\?)")

Bytes = frozenset[int]


class _NotPlainError(Exception):
    """There is more than one way, or syntax that is not followed here."""


@dataclass(slots=True)
class _Item:
    """One byte of ``members``, a literal, or a group; ``source`` is it for `re`."""

    source: bytes
    first: Bytes
    nullable: bool = False
    quantifier: str = ""
    branches: "tuple[tuple[_Item, ...], ...]" = ()
    opens: bytes = b""


def plain_pattern(text: str) -> re.Pattern[bytes] | None:
    """Return ``text`` as an expression that never backtracks, or None if it is not plain."""
    try:
        items, end = _sequence(text, 0)
        if end != len(text):
            return None
        return re.compile(_written(items, None), re.DOTALL)
    except (_NotPlainError, IndexError):
        return None


# --- reading ----------------------------------------------------------------------------------


def _sequence(text: str, position: int) -> tuple[tuple[_Item, ...], int]:
    items: list[_Item] = []
    while position < len(text) and text[position] not in "|)":
        item, position = _item(text, position)
        mark = text[position : position + 1]
        if mark and mark in "*+?":
            is_byte = len(item.source) == 1 or item.source.startswith((b"[", b"\\"))
            if item.branches or not is_byte:
                raise _NotPlainError
            item.quantifier, item.nullable = mark, mark != "+"
            position += 1
            if text[position : position + 1] in {"?", "+", "*"}:
                raise _NotPlainError
        elif item.first & _NOT_ASCII and item.source.startswith(b"["):
            raise _NotPlainError  # one character, but not one byte
        if mark == "{" and re.match(r"\{\d+(?:,\d*)?\}", text[position:]):
            raise _NotPlainError
        items.append(item)
    return tuple(items), position


def _item(text: str, position: int) -> tuple[_Item, int]:
    char = text[position]
    if char == "(":
        return _group(text, position)
    if char == "[":
        members, position = _charset(text, position + 1)
        return _class(members), position
    if char in ".^$*+?":
        raise _NotPlainError
    if char == "\\":
        return _escape(text, position + 1)
    return _literal(char), position + 1


def _group(text: str, position: int) -> tuple[_Item, int]:
    opening = _GROUP.match(text, position)
    if opening is None:
        raise _NotPlainError
    branches = []
    position = opening.end()
    while True:
        items, position = _sequence(text, position)
        branches.append(items)
        position += 1
        if text[position - 1] == ")":
            break
    first = frozenset[int]().union(*(_first(items, frozenset()) for items in branches))
    opens = b"(?:" if opening.group() == "(?:" else b"("
    return _Item(b"", first, branches=tuple(branches), opens=opens), position


def _escape(text: str, position: int) -> tuple[_Item, int]:
    char = text[position]
    if char.lower() in _CLASSES:
        return _class(_shorthand(char)), position + 1
    if char in _ESCAPED:
        return _literal(_ESCAPED[char]), position + 1
    if not char.isascii() or char.isalnum():
        raise _NotPlainError
    return _literal(char), position + 1


def _charset(text: str, position: int) -> tuple[Bytes, int]:
    negated = text[position] == "^"
    position += negated
    members: set[int] = set()
    begin = position
    while text[position] != "]" or position == begin:
        if text.startswith("[:", position):
            raise _NotPlainError
        low, position = _member(text, position)
        if text[position] == "-" and text[position + 1] != "]":
            high, position = _member(text, position + 1)
            if len(low) != 1 or len(high) != 1:
                raise _NotPlainError
            members.update(range(min(low), max(high) + 1))
        else:
            members |= low
    found = frozenset(members)
    return (_BYTES - found if negated else found) - _LINE_END, position + 1


def _member(text: str, position: int) -> tuple[Bytes, int]:
    char = text[position]
    if char == "\\":
        position += 1
        char = text[position]
        if char.lower() in _CLASSES:
            return _shorthand(char), position + 1
        char = _ESCAPED.get(char, char)
        if char.isalnum():
            raise _NotPlainError
    if not char.isascii():
        raise _NotPlainError
    return frozenset(char.encode()), position + 1


def _shorthand(char: str) -> Bytes:
    members = _CLASSES[char.lower()]
    return (members if char.islower() else _BYTES - members) - _LINE_END


def _class(members: Bytes) -> _Item:
    if not members:
        raise _NotPlainError
    return _Item(b"[%s]" % b"".join(b"\\x%02x" % one for one in sorted(members)), members)


def _literal(char: str) -> _Item:
    data = char.encode()
    return _Item(re.escape(data), frozenset(data[:1]))


# --- judging and writing ----------------------------------------------------------------------


def _first(items: Sequence[_Item], follow: Bytes | None) -> Bytes:
    """Return the bytes that ``items`` may begin with, and ``follow`` if they may be nothing."""
    found: Bytes = frozenset()
    for item in items:
        found |= item.first
        if not item.nullable:
            return found
    return found if follow is None else found | follow


def _written(items: Sequence[_Item], follow: Bytes | None) -> bytes:
    """Return ``items`` for `re`; ``follow`` must come behind, or, when None, the piece ends."""
    out: list[bytes] = []
    for index, item in enumerate(items):
        behind = _first(items[index + 1 :], follow)
        if item.branches:
            last = index + 1 == len(items) and follow is None
            out.append(_written_group(item, None if last else behind))
            continue
        out.append(item.source)
        if item.quantifier:
            # What comes behind must not begin as this goes on; at the end nothing comes.
            if item.first & behind:
                raise _NotPlainError
            out.append(item.quantifier.encode() + b"+")
    return b"".join(out)


def _written_group(group: _Item, behind: Bytes | None) -> bytes:
    taken: set[int] = set()
    written = []
    for items in group.branches:
        alone = len(group.branches) == 1
        if not alone and (not items or all(item.nullable for item in items)):
            raise _NotPlainError
        first = _first(items, frozenset())
        if taken & first:
            raise _NotPlainError
        taken |= first
        written.append(_written(items, behind))
    if len(group.branches) == 1 and all(item.nullable for item in group.branches[0]):
        raise _NotPlainError
    return group.opens + b"|".join(written) + b")"
