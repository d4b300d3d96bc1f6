"""Finding an expression in blocks of lines, in time that grows with the block and nothing else.

RE2 decides what matches.  Before it, literals that every match contains pick the lines worth
asking about, and an expression that falls apart at its ``.*`` is asked piece by piece, each at the
place where its literal stands: the same answer, for a fraction of the work.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, overload

import re2

from sidecar.logs.block import Block
from sidecar.logs.literals import Literals, Segment, shape_of
from sidecar.logs.plain import plain_pattern
from sidecar.logs.prefixes import NEVER_FIRST, PREFIX_BYTES_MAX, prefix_end

TRIES_MAX: Final = 8
"""Places in a line where a piece is tried before RE2 searches the line as a whole.

It bounds the time for a line that holds a literal thousands of times.
"""

Spans = Sequence[tuple[int, int]]
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


class Hits:
    """The matches in a block, as numbers alone: Python's garbage collector looks at none of them.

    As a sequence it gives `Hit`s.
    """

    __slots__ = ("data", "flat", "width")

    def __init__(self, data: bytes, groups: int, flat: list[int] | None = None) -> None:
        self.data = data
        self.width = 2 * groups
        self.flat: list[int] = [] if flat is None else flat

    def add(self, spans: Spans) -> None:
        """Add a match."""
        for span in spans:
            self.flat += span

    def __len__(self) -> int:
        return len(self.flat) // self.width

    def __iter__(self) -> Iterator[Hit]:
        for index in range(len(self)):
            yield self[index]

    @overload
    def __getitem__(self, index: int) -> Hit: ...

    @overload
    def __getitem__(self, index: slice) -> "Hits": ...

    def __getitem__(self, index: "int | slice") -> "Hit | Hits":
        if isinstance(index, slice):
            kept = Hits(self.data, self.width // 2)
            for one in range(*index.indices(len(self))):
                kept.flat += self.flat[one * self.width : (one + 1) * self.width]
            return kept
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        flat = self.flat[index * self.width : (index + 1) * self.width]
        return flat[0], list(zip(flat[::2], flat[1::2], strict=True))

    def places(self) -> list[int]:
        """Return where each match begins."""
        return self.flat[:: self.width]

    def edges(self, group: int) -> "zip[tuple[int, int]]":
        """Return where ``group`` begins and ends in each match."""
        return zip(
            self.flat[2 * group :: self.width], self.flat[2 * group + 1 :: self.width], strict=True
        )

    def texts(self, group: int) -> list[bytes]:
        """Return what ``group`` holds in each match; nothing where it took no part."""
        data = self.data
        return [data[start:end] for start, end in self.edges(group)]


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
        elif len(self._pieces) == 1 and not self._pieces[0][2]:
            self._find = self._by_one_piece
        elif self._pieces:
            self._find = self._by_pieces
        elif self._shape.required:
            self._find = self._by_literals
        else:
            self._find = self._everywhere

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def literals(self) -> tuple[Literals, ...]:
        """What every match contains: one of each set.  Empty when nothing is known."""
        return self._shape.required

    def hits(self, block: Block) -> Hits:
        """Return the first match in each line that has one, in order."""
        found = Hits(block.data, self.compiled.groups + 1)
        if block.data:
            odd = self._shape.fold_case and block.folds_oddly()
            (self._in_each_line if odd else self._find)(block, found)
        return found

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

    def _in_each_line(self, block: Block, found: Hits) -> None:
        data, start = block.data, 0
        while start < len(data):
            end = data.find(b"\n", start)
            hit = self.in_line(data, prefix_end(data, start, end), end)
            if hit is not None:
                found.add(hit[1])
            start = end + 1

    def _everywhere(self, block: Block, found: Hits) -> None:
        data, position, size = block.data, 0, len(block.data)
        while position < size:
            spans = self._full(_ANYWHERE, data, position, size)
            place = spans[0][0]
            if place < 0 or place >= size:
                return
            end = data.find(b"\n", place)
            start = data.rfind(b"\n", 0, place) + 1
            self._add_behind_prefix(data, start, spans, end, found)
            position = end + 1

    def _by_literals(self, block: Block, found: Hits) -> None:
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
                    found.add(hit[1])
            position = end + 1
            upcoming = [
                at if at < 0 or at >= position else text.find(literal, position)
                for at, literal in zip(upcoming, first, strict=True)
            ]

    def _by_one_piece(self, block: Block, found: Hits) -> None:
        data = block.data
        text = block.lower() if self._shape.fold_case else data
        literal, match, _ = self._pieces[0]
        find, line_end, earlier, flat = text.find, data.find, data.rfind, found.flat
        place = find(literal)
        while place >= 0:
            end = line_end(b"\n", place)
            spans = match(data, place, end) or self._further(data, text, place, end)
            if spans is not None:
                place = spans[0][0]
                start = earlier(b"\n", max(0, place - PREFIX_BYTES_MAX), place) + 1
                # Most lines begin with no prefix, or so far ahead that none reaches here.
                if (start == 0 and place > PREFIX_BYTES_MAX) or data[start] in NEVER_FIRST:
                    for span in spans:
                        flat += span
                else:
                    self._add_behind_prefix(data, start, spans, end, found)
            place = find(literal, end)

    def _by_pieces(self, block: Block, found: Hits) -> None:
        data = block.data
        text = block.lower() if self._shape.fold_case else data
        literal = self._pieces[0][0]
        find, line_end = text.find, data.find
        place = find(literal)
        while place >= 0:
            end = line_end(b"\n", place)
            spans = self._joined(data, text, place, end)
            if spans is not None:
                start = data.rfind(b"\n", 0, spans[0][0]) + 1
                self._add_behind_prefix(data, start, spans, end, found)
            place = find(literal, end)

    def _further(self, data: bytes, text: bytes, place: int, end: int) -> Spans | None:
        """Try the only piece behind ``place``, where it did not match."""
        literal, match, _ = self._pieces[0]
        for _ in range(TRIES_MAX):
            place = text.find(literal, place + 1, end)
            if place < 0:
                return None
            spans = match(data, place, end)
            if spans is not None:
                return spans
        hit = self.in_line(data, place + 1, end)
        return None if hit is None else hit[1]

    def _joined(self, data: bytes, text: bytes, place: int, end: int) -> Spans | None:
        """Match piece after piece.  What they cannot decide alone, the whole expression does."""
        start, position = -1, place
        together: list[tuple[int, int]] = [(place, end)]
        for literal, match, newest in self._pieces:
            at = text.rfind(literal, position, end) if newest else text.find(literal, position, end)
            if at < 0:
                break
            spans = match(data, at, end)
            if spans is None:
                break
            position = spans[0][1]
            if start < 0:
                start = at
            together += spans[1:]
        else:
            together[0] = (start, position)
            return together
        if any(text.find(literal, place, end) < 0 for literal, *_ in self._pieces):
            return None
        line_start = data.rfind(b"\n", 0, place) + 1
        hit = self.in_line(data, prefix_end(data, line_start, end), end)
        return None if hit is None else hit[1]

    def _add_behind_prefix(
        self, data: bytes, start: int, spans: Spans, end: int, found: Hits
    ) -> None:
        """Add a match, or the first one that does not begin in a launcher's prefix."""
        behind = prefix_end(data, start, end)
        if spans[0][0] >= behind:
            flat = found.flat
            for span in spans:
                flat += span
        elif (hit := self.in_line(data, behind, end)) is not None:
            found.add(hit[1])


_Match = Callable[[bytes, int, int], "Spans | None"]
_Piece = tuple[bytes, _Match, bool]


def _pieces(segments: tuple[Segment, ...]) -> list[_Piece]:
    return [(one.literal, _matcher(one.text), one.newest) for one in segments]


def _matcher(text: str) -> _Match:
    """Return what matches a piece at a place: to the spans of its groups, or None."""
    plain = plain_pattern(text)
    if plain is not None:
        match = plain.match

        def at_once(data: bytes, start: int, end: int) -> Spans | None:
            found = match(data, start, end)
            return found and found.regs

        return at_once
    spans_of = _spans_of(compile_re2(text))

    def by_re2(data: bytes, start: int, end: int) -> Spans | None:
        spans: Spans = spans_of(_ANCHORED, data, start, end)
        return None if spans[0][0] < 0 else spans

    return by_re2


def _holds(text: bytes, literals: Literals, start: int, end: int) -> bool:
    return any(text.find(literal, start, end) >= 0 for literal in literals)
