"""Finding an expression in blocks of lines, in time that grows with the block and nothing else.

RE2 decides what matches.  Before it, literals that every match contains pick the lines worth
asking about, and an expression that falls apart at its ``.*`` is asked piece by piece, each at the
place where its literal stands: the same answer, for a fraction of the work.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import re2

from sidecar.logs.block import Block
from sidecar.logs.literals import Literals, Segment, shape_of
from sidecar.logs.prefixes import PREFIX_BYTES_MAX, prefix_end

TRIES_MAX: Final = 8
"""Places in a line where a piece is tried before RE2 searches the line as a whole.

It bounds the time for a line that holds a literal thousands of times.
"""

Spans = list[tuple[int, int]]
Hit = tuple[int, Spans]
"""Where a match begins, and the spans of its groups (-1 where one took no part)."""

_ANCHORED: Final = re2._Anchor.ANCHOR_START  # noqa: SLF001 - see `_spans_of`
_ANYWHERE: Final = re2._Anchor.UNANCHORED  # noqa: SLF001


def compile_re2(text: str) -> Any:
    """Compile for searching many lines at once.  Raises `re2.error`."""
    options = re2.Options()
    options.log_errors = False  # it would write to the daemon's standard error
    options.never_nl = True  # \s must not run on into the next line
    # ^ and $ are the ends of a line, also where lines are searched together.
    return re2.compile(f"(?m){text}", options=options)


def _spans_of(compiled: Any) -> Any:
    """Return RE2's own match function: anchor, bytes, start, end -> spans.

    The wrapper's `search` and `match` make an object per match and ask the expression for its
    groups at every span, which costs twice what the match does.
    """
    return compiled._regexp.Match  # noqa: SLF001


# What the next line finds makes joined lines differ from lines alone: ends of the whole text,
# and flags switched off.  It may find too much; such a rule is only searched more slowly.
_NOT_ANYWHERE: Final = re2.compile(r"\\[AzZC]|\(\?[a-zA-Z]*-")


class Pattern:
    """A compiled expression.  It searches bytes, so that a line is encoded once for all rules."""

    __slots__ = ("_find", "_full", "_pieces", "_shape", "anywhere", "compiled", "groups", "text")

    def __init__(self, text: str) -> None:
        """Compile ``text``.  Raises `re2.error` or `UnicodeEncodeError`."""
        self.text = text
        self.compiled = compile_re2(text)
        self.anywhere: bool = _NOT_ANYWHERE.search(text) is None
        """It means the same on many lines joined as on each alone."""
        self.groups: Mapping[str, int] = self.compiled.groupindex
        self._full = _spans_of(self.compiled)
        self._shape = shape_of(text)
        self._pieces = _pieces(self._shape.segments)
        if not self.anywhere or (not self._shape.required and self._shape.at_start):
            self._find = self._in_each_line
        elif self._pieces:
            self._find = self._by_pieces
        elif self._shape.required:
            self._find = self._by_literals
        else:
            self._find = self._everywhere

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"

    @property
    def literals(self) -> tuple[Literals, ...]:
        """What every match contains: one of each set.  Empty when nothing is known."""
        return self._shape.required

    def hits(self, block: Block) -> list[Hit]:
        """Return the first match in each line that has one, in order."""
        if not block.data:
            return []
        if self._shape.fold_case and block.folds_oddly():
            return list(self._in_each_line(block))
        return list(self._find(block))

    def in_line(self, data: bytes, start: int, end: int) -> Hit | None:
        """Return the first match within a line, as if the line began at ``start``."""
        if self.anywhere and not self._shape.at_start:
            spans = self._full(_ANYWHERE, data, start, end)
            return None if spans[0][0] < 0 else (spans[0][0], spans)
        alone = data[start:end]
        spans = self._full(_ANYWHERE, alone, 0, len(alone))
        if spans[0][0] < 0:
            return None
        moved = [(a + start, b + start) if a >= 0 else (a, b) for a, b in spans]
        return moved[0][0], moved

    # --- ways to search -----------------------------------------------------------------------

    def _in_each_line(self, block: Block) -> Iterator[Hit]:
        data, start = block.data, 0
        while start < len(data):
            end = data.find(b"\n", start)
            hit = self.in_line(data, prefix_end(data, start, end), end)
            if hit is not None:
                yield hit
            start = end + 1

    def _everywhere(self, block: Block) -> Iterator[Hit]:
        data, position, size = block.data, 0, len(block.data)
        while position < size:
            spans = self._full(_ANYWHERE, data, position, size)
            place = spans[0][0]
            if place < 0 or place >= size:
                return
            end = data.find(b"\n", place)
            hit = self._behind_prefix(data, (place, spans), end)
            if hit is not None:
                yield hit
            position = end + 1

    def _by_literals(self, block: Block) -> Iterator[Hit]:
        shape, data = self._shape, block.data
        text = block.lower() if shape.fold_case else data
        first, *others = shape.required
        position = 0
        upcoming = [text.find(literal) for literal in first]
        while (place := min((at for at in upcoming if at >= 0), default=-1)) >= 0:
            start = data.rfind(b"\n", position, place) + 1 or position
            end = data.find(b"\n", place)
            if all(_holds(text, literals, start, end) for literals in others):
                hit = self.in_line(data, prefix_end(data, start, end), end)
                if hit is not None:
                    yield hit
            position = end + 1
            upcoming = [
                at if at < 0 or at >= position else text.find(literal, position)
                for at, literal in zip(upcoming, first, strict=True)
            ]

    def _by_pieces(self, block: Block) -> Iterator[Hit]:
        data = block.data
        text = block.lower() if self._shape.fold_case else data
        (literal, match, _, newest), *others = self._pieces
        find, line_end = text.find, data.find
        position = 0
        while (place := find(literal, position)) >= 0:
            end = line_end(b"\n", place)
            position = end + 1
            if newest or others:
                hit = self._joined(data, text, place, end)
            else:
                spans = match(_ANCHORED, data, place, end)
                hit = (place, spans)
                if spans[0][0] < 0:
                    hit = self._further(data, text, place, end)
            if hit is not None and (hit := self._behind_prefix(data, hit, end)) is not None:
                yield hit

    def _further(self, data: bytes, text: bytes, place: int, end: int) -> Hit | None:
        """Try the only piece behind ``place``, where it did not match."""
        literal, match, _, _ = self._pieces[0]
        for _ in range(TRIES_MAX):
            place = text.find(literal, place + 1, end)
            if place < 0:
                return None
            spans = match(_ANCHORED, data, place, end)
            if spans[0][0] >= 0:
                return place, spans
        return self.in_line(data, place + 1, end)

    def _joined(self, data: bytes, text: bytes, place: int, end: int) -> Hit | None:
        """Match piece after piece.  What they cannot decide alone, the whole expression does."""
        start, position = place, place
        together: Spans = []
        for literal, match, _, newest in self._pieces:
            at = text.rfind(literal, position, end) if newest else text.find(literal, position, end)
            if at < 0:
                break
            spans = match(_ANCHORED, data, at, end)
            if spans[0][0] < 0:
                break
            if not together:
                start = at
                together.append((at, end))
            together += spans[1:]
            position = spans[0][1]
        else:
            together[0] = (start, position)
            return start, together
        if any(text.find(literal, place, end) < 0 for literal, *_ in self._pieces):
            return None
        line_start = data.rfind(b"\n", 0, place) + 1
        return self.in_line(data, prefix_end(data, line_start, end), end)

    def _behind_prefix(self, data: bytes, hit: Hit, end: int) -> Hit | None:
        """Return ``hit``, or the first one that does not begin in a launcher's prefix."""
        place = hit[0]
        start = data.rfind(b"\n", max(0, place - PREFIX_BYTES_MAX), place) + 1
        if start == 0 and place > PREFIX_BYTES_MAX:
            return hit
        behind = prefix_end(data, start, end)
        return hit if place >= behind else self.in_line(data, behind, end)


_Piece = tuple[bytes, Any, int, bool]


def _pieces(segments: tuple[Segment, ...]) -> list[_Piece]:
    return [
        (one.literal, _spans_of(compile_re2(one.text)), one.groups, one.newest) for one in segments
    ]


def _holds(text: bytes, literals: Literals, start: int, end: int) -> bool:
    return any(text.find(literal, start, end) >= 0 for literal in literals)
