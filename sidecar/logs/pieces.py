"""A finished log as blocks of lines, with the number each line has in the file.

Decides where a piece ends: behind a line's end, or in the midst of a line that is too long.
It reads from any binary stream, so that a log may come through a pipe.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

from sidecar.logs.block import Block, clean_bytes

PIECE_BYTES: Final = 256 << 10
"""Larger pieces gain nothing, smaller ones cost calls."""
LINE_BYTES_MAX: Final = 64 << 10
"""A longer line is cut here, as it is while a job runs."""
BEFORE_BYTES: Final = 16 << 10
"""What is kept of the piece before, for tracebacks."""


class Piece:
    """Some lines.  ``raw`` is what stands in the file, ``first_line`` counts from 1."""

    __slots__ = ("_numbers", "block", "first_line", "raw")

    def __init__(self, raw: bytes, block: Block, first_line: int) -> None:
        self.raw, self.block, self.first_line = raw, block, first_line
        self._numbers: list[int] | None = None

    def number_of(self, position: int) -> int:
        """Return the number in the file of the line at ``position`` of the block.

        A line that was rewritten after a carriage return is one in the file and several here.
        """
        index = self.block.data.count(b"\n", 0, position)
        if b"\r" not in self.raw:
            return self.first_line + index
        if self._numbers is None:
            ends = _LINE_END.finditer(self.raw)
            self._numbers = [self.first_line]
            for end in ends:
                self._numbers.append(self._numbers[-1] + (end.group() != b"\r"))
        return self._numbers[min(index, len(self._numbers) - 1)]


_LINE_END: Final = re.compile(rb"\r\n|\r|\n")


def pieces(stream: BinaryIO) -> Iterator[Piece]:
    """Yield a log's pieces in order.  What stands behind the last line's end is a line too."""
    number, rest, before = 1, b"", b""
    while True:
        data = stream.read(PIECE_BYTES)
        whole, rest = _cut(rest + data) if data else (rest, b"")
        if whole:
            ended = whole if whole.endswith(b"\n") else whole + b"\n"
            block = Block(clean_bytes(_utf8(ended)), before)
            before = block.data[-BEFORE_BYTES:]
            yield Piece(raw=whole, block=block, first_line=number)
            number += whole.count(b"\n")
        if not data:
            return


def _cut(data: bytes) -> tuple[bytes, bytes]:
    """Return whole lines, and the part of a line that may go on."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    if len(data) - end > LINE_BYTES_MAX:
        return data, b""
    return data[:end], data[end:]


def _utf8(data: bytes) -> bytes:
    return data if data.isascii() else data.decode(errors="replace").encode()
