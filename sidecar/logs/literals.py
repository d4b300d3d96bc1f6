"""What text any match of an expression must contain, so that most lines are never searched.

Decides, from the expression alone, which literals gate it and whether it falls apart into pieces
that each begin with a literal and are joined by ``.*``.  Every answer errs to one side: what is
not understood gives no literal, and the expression is then searched everywhere.  It knows the
RE2 syntax that rules are written in, and no engine.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LITERAL_BYTES_MIN: Final = 3
"""Shorter literals stand in nearly every line."""
LITERAL_BYTES_MAX: Final = 32
"""Longer ones find no less; a bound on the cost of a search in text made to be slow."""
ALTERNATIVES_MAX: Final = 8
"""More literals for one expression cost more than they save."""
DEPTH_MAX: Final = 50
"""Nesting that is followed; what lies deeper gives no literal."""
SEGMENTS_MAX: Final = 8

Literals = tuple[bytes, ...]
"""Alternatives: one of them stands in every match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece that begins with ``literal``; ``groups`` capture groups lie before it."""

    text: str
    literal: bytes
    groups: int
    newest: bool
    """Joined by a greedy ``.*``: of several places, the last one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is known of an expression.  ``segments`` is empty when it does not fall apart."""

    required: tuple[Literals, ...] = ()
    segments: tuple[Segment, ...] = ()
    fold_case: bool = False
    at_start: bool = False
    """It asks where a line begins."""


class _NotUnderstoodError(Exception):
    """Syntax this module does not follow."""


@dataclass(slots=True)
class _Node:
    """One part of a sequence: a literal byte string, a gap (``.*``), or something else."""

    start: int
    end: int
    literal: bytes = b""
    required: tuple[Literals, ...] = ()
    gap: str = ""
    zero: bool = False
    optional: bytes = b""
    groups: int = 0


@dataclass(slots=True)
class _Parser:
    text: str
    position: int = 0
    fold_case: bool = False
    at_start: bool = False
    groups: int = 0
    depth: int = 0

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def take(self, wanted: str) -> bool:
        if self.text.startswith(wanted, self.position):
            self.position += len(wanted)
            return True
        return False

    def branches(self) -> list[list[_Node]]:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise _NotUnderstoodError
        found = [self.sequence()]
        while self.take("|"):
            found.append(self.sequence())
        self.depth -= 1
        return found

    def sequence(self) -> list[_Node]:
        nodes: list[_Node] = []
        while self.peek() not in {"", "|", ")"}:
            nodes.extend(self.quantified())
        return nodes

    def quantified(self) -> list[_Node]:
        start = self.position
        node = self.atom()
        again = _QUANTIFIER.match(self.text, self.position)
        if again is None:
            node.start, node.end = start, self.position
            return [node]
        self.position = again.end()
        node.start, node.end = start, self.position
        mark = again.group(1)
        if node.gap:
            node.gap = again.group(0) if mark == "*" else ""
            return [node]
        if mark in {"+", "*", "?"} or not mark:
            least = 1 if mark == "+" else int(again.group(2) or 0)
        else:
            raise _NotUnderstoodError
        if least == 0:
            whole = node.literal if mark == "?" and again.group(0) == "?" else b""
            return [_Node(start, node.end, optional=whole, groups=node.groups)]
        if node.literal:
            node = _Node(start, node.end, required=((node.literal,),), groups=node.groups)
        return [node]

    def atom(self) -> _Node:
        char = self.text[self.position]
        self.position += 1
        match char:
            case "(":
                return self.group()
            case "[":
                return self.charset()
            case ".":
                return _Node(0, 0, gap="?")
            case "^" | "$":
                self.at_start |= char == "^"
                return _Node(0, 0, zero=True)
            case "\\":
                return self.escape()
            case "*" | "+" | "?":
                raise _NotUnderstoodError
        return self.letter(char)

    def letter(self, char: str) -> _Node:
        if self.fold_case and not char.isascii():
            return _Node(0, 0)
        data = char.encode()
        return _Node(0, 0, literal=data.lower() if self.fold_case else data)

    def escape(self) -> _Node:
        char = self.peek()
        self.position += 1
        if char in {"b", "B"}:
            return _Node(0, 0, zero=True)
        if char in {"A", "z"}:
            self.at_start |= char == "A"
            return _Node(0, 0, zero=True)
        if char and char in "dDsSwWtnrfva":
            return _Node(0, 0)
        if char and char.isascii() and not char.isalnum():
            return self.letter(char)
        raise _NotUnderstoodError

    def charset(self) -> _Node:
        self.take("^")
        self.take("]")
        while (char := self.peek()) != "]":
            if not char or self.text.startswith("[:", self.position):
                raise _NotUnderstoodError
            self.position += 2 if char == "\\" else 1
        self.position += 1
        return _Node(0, 0)

    def group(self) -> _Node:
        captures = 1
        if self.take("?"):
            named = _GROUP_NAME.match(self.text, self.position)
            if named is not None:
                self.position = named.end()
            elif self.take(":"):
                captures = 0
            else:
                raise _NotUnderstoodError
        before = self.groups
        self.groups += captures
        branches = self.branches()
        if not self.take(")"):
            raise _NotUnderstoodError
        inside = self.groups - before
        if len(branches) == 1:
            runs = _required(branches[0])
            nodes = branches[0]
            plain = b"".join(node.literal for node in nodes)
            if not inside and nodes and all(node.literal for node in nodes):
                return _Node(0, 0, literal=plain)
            return _Node(0, 0, required=runs, groups=inside)
        return _Node(0, 0, required=_alternatives(branches), groups=inside)


_QUANTIFIER: Final = re.compile(r"([*+?])\??|\{(\d+)(?:,\d*)?\}\??")
_GROUP_NAME: Final = re.compile(r"P?<\w+>")
_FLAGS: Final = re.compile(r"\(\?([ims]+)\)")


def shape_of(text: str) -> Shape:
    """Return what is known of ``text``, an expression that RE2 has taken."""
    parser = _Parser(text)
    flags = _FLAGS.match(text)
    if flags is not None:
        parser.position = flags.end()
        parser.fold_case = "i" in flags.group(1)
    body = parser.position
    try:
        branches = parser.branches()
    except (_NotUnderstoodError, IndexError):
        branches = []
    if not branches or parser.position != len(text):
        return Shape(at_start="^" in text)  # it may be no more than a set's, like [^x]
    required = _required(branches[0]) if len(branches) == 1 else _alternatives(branches)
    segments: tuple[Segment, ...] = ()
    if len(branches) == 1 and not parser.at_start:
        segments = _segments(text, text[:body], branches[0])
    return Shape(
        required=tuple(sorted(required, key=_worth, reverse=True)),
        segments=segments,
        fold_case=parser.fold_case,
        at_start=parser.at_start,
    )


def _worth(literals: Literals) -> tuple[int, int]:
    return min(len(literal) for literal in literals), -len(literals)


def _required(nodes: Sequence[_Node]) -> tuple[Literals, ...]:
    """Return the literals that every match of a sequence contains."""
    found: list[Literals] = []
    run = b""
    for node in (*nodes, _Node(0, 0)):
        if node.literal:
            run += node.literal
            continue
        if node.zero:
            continue
        if len(run) >= LITERAL_BYTES_MIN:
            found.append((_cut(run),))
        run = b""
        found.extend(
            literals
            for literals in node.required
            if all(len(literal) >= LITERAL_BYTES_MIN for literal in literals)
        )
    return tuple(found)


def _alternatives(branches: Sequence[Sequence[_Node]]) -> tuple[Literals, ...]:
    """Return the literals of which every match contains one, taking one set of each branch."""
    together: list[bytes] = []
    for nodes in branches:
        required = _required(nodes)
        if not required:
            return ()
        best = max(required, key=_worth)
        together.extend(best)
    literals = tuple(dict.fromkeys(together))
    return (literals,) if len(literals) <= ALTERNATIVES_MAX else ()


def _cut(literal: bytes) -> bytes:
    return literal[:LITERAL_BYTES_MAX]


def _segments(text: str, flags: str, nodes: Sequence[_Node]) -> tuple[Segment, ...]:
    """Return the pieces between gaps, or nothing when one of them begins with no literal."""
    pieces: list[tuple[list[_Node], str]] = [([], "")]
    for node in nodes:
        if node.gap and node.gap != "?":
            pieces.append(([], node.gap))
        else:
            pieces[-1][0].append(node)
    if all(node.zero and text[node.start] == "$" for node in pieces[-1][0]) and len(pieces) > 1:
        pieces.pop()  # a gap at the very end always matches, up to the end of the line
    if pieces and not pieces[0][0]:
        pieces.pop(0)
    if not 0 < len(pieces) <= SEGMENTS_MAX or any(not part for part, _ in pieces):
        return ()
    segments: list[Segment] = []
    groups = 0
    for place, (part, gap) in enumerate(pieces):
        segment = _segment(text, flags, part, gap, groups, first=place == 0)
        if segment is None:
            return ()
        segments.append(segment)
        groups += sum(node.groups for node in part)
    return tuple(segments)


def _segment(
    text: str, flags: str, part: list[_Node], gap: str, groups: int, *, first: bool
) -> Segment | None:
    optional = b""
    if first and not gap and part[0].optional:
        optional, part = part[0].optional, part[1:]
    run = b""
    for node in part:
        if node.literal:
            run += node.literal
        elif not (node.zero and not run):
            break
    literal = _cut(run)
    if len(literal) < LITERAL_BYTES_MIN:
        return None
    if optional and (optional + run).find(literal) != len(optional):
        return None  # the optional part could hide an earlier match
    return Segment(
        text=f"{flags}{text[part[0].start : part[-1].end]}",
        literal=literal,
        groups=groups,
        newest=gap == "*",
    )
