"""Bytes in pieces become whole lines of text, whatever the pieces and whatever the bytes.

Decides where a line ends (a line feed, or a carriage return as progress bars use it) and that half
a line is not one yet.  It knows neither files nor rules.
"""

from typing import Final

from sidecar.logs.block import Block, clean_bytes
from sidecar.logs.containers import Unwrapper, may_be_wrapped, unwrapper_for

PARTIAL_BYTES_MAX: Final = 64 << 10
"""A line longer than this is cut here: a writer without line ends must not fill the memory.

Every piece is judged, so that nothing in a long line is missed.
"""
CUT_BACK_BYTES: Final = 256
"""A long line is cut at a blank, if there is one so near: half a number is another number."""
BEFORE_BYTES: Final = 16 << 10
"""What is kept of earlier output, so that a traceback can be shown whole."""
FIRST_LINE_BYTES_MAX: Final = 32 << 10
"""A file whose first line is longer was written by no container runtime."""

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class LineSplitter:
    """The lines of one stream.  Feed it bytes in order."""

    def __init__(self, partial_bytes_max: int = PARTIAL_BYTES_MAX) -> None:
        self._max = partial_bytes_max
        self._partial = b""
        self._begun = False
        self._in_cut_line = False
        self._before = b""
        self._unwrapper: Unwrapper | None = None
        self._raw = b""
        self.cut = 0
        """Lines that were cut because they were too long."""
        self.undecodable = 0
        """Lines with bytes that are not UTF-8, each replaced by U+FFFD."""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes, without their ends and without empty ones."""
        return [line for line in self.feed_block(data).data.decode().split("\n") if line]

    def feed_block(self, data: bytes) -> Block:
        """Return the same as one block."""
        if b"\0" in data:  # what a truncation under a writer leaves is a hole, not a line
            data = data.replace(b"\0", b"")
        data = self._unwrapped(data) if self._unwrapper is not None else data
        if not self._begun:
            data = self._begin(data)
        whole = self._whole_lines(data)
        if not whole:
            return Block(b"")
        text = self._text(clean_bytes(whole))
        before = self._before
        self._before = text[-BEFORE_BYTES:] if len(text) > BEFORE_BYTES else before + text
        self._before = self._before[-BEFORE_BYTES:]
        return Block(text, before=before)

    @property
    def partial(self) -> str:
        """What stands after the last line end."""
        return (self._partial or self._raw).decode(errors="replace")

    def reset(self) -> None:
        """Forget the partial line: the stream begins anew."""
        self._partial = self._before = self._raw = b""
        self._begun = self._in_cut_line = False
        self._unwrapper = None

    def _begin(self, data: bytes) -> bytes:
        """Look at a stream's first line: what it is written in decides how it is read.

        The decision hangs on the bytes alone, never on where a read cut them: a mark before the
        line is put aside first, and a line that is too long for a runtime's is so in any piece.
        """
        data, self._raw = self._raw + data, b""
        text = data.removeprefix(_BYTE_ORDER_MARK)
        end = text.find(b"\n")
        may_be = may_be_wrapped(text) or _BYTE_ORDER_MARK.startswith(data)
        if may_be and end < 0 and len(text) <= FIRST_LINE_BYTES_MAX:
            self._raw = data  # it may be a container runtime's; a rule sees whole lines only
            return b""
        self._begun = True
        if 0 <= end <= FIRST_LINE_BYTES_MAX:
            self._unwrapper = unwrapper_for(text[:end])
        return text if self._unwrapper is None else self._unwrapped(text)

    def _unwrapped(self, data: bytes) -> bytes:
        assert self._unwrapper is not None
        data = self._raw + data
        end = data.rfind(b"\n") + 1
        self._raw = data[end:]
        return self._unwrapper.unwrap(data[:end])

    def _whole_lines(self, data: bytes) -> bytes:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        self._partial = data[end:]
        whole = data[:end]
        if len(self._partial) > self._max or self._has_long_line(whole):
            return self._with_long_lines_cut(whole)
        if end:
            self._in_cut_line = False
        return whole

    def _has_long_line(self, whole: bytes) -> bool:
        position = 0
        while len(whole) - position > self._max:
            position = whole.rfind(b"\n", position, position + self._max + 1) + 1
            if not position:
                return True
        return False

    def _with_long_lines_cut(self, whole: bytes) -> bytes:
        out: list[bytes] = []
        position, size = 0, len(whole)
        while position < size:
            # As many whole lines as fit, so that most of a block is not looked at line by line.
            end = whole.rfind(b"\n", position, position + self._max + 1) + 1
            if end:
                out.append(whole[position:end])
                self._in_cut_line = False
            else:
                end = position + self._count_cut(whole[position : position + self._max])
                out.append(whole[position:end] + b"\n")
            position = end
        while len(self._partial) > self._max:
            end = self._count_cut(self._partial[: self._max])
            out.append(self._partial[:end] + b"\n")
            self._partial = self._partial[end:]
        return b"".join(out)

    def _count_cut(self, piece: bytes) -> int:
        """Count a line that is too long, once, and return where to cut it."""
        self.cut += not self._in_cut_line
        self._in_cut_line = True
        blank = piece.rfind(b" ", max(1, len(piece) - CUT_BACK_BYTES)) + 1
        if blank:
            return blank
        end = len(piece)
        for back in range(1, min(4, end)):  # not inside a character
            byte = piece[end - back]
            if byte < 0x80:  # noqa: PLR2004 - ASCII
                break
            if byte >= 0xC0:  # noqa: PLR2004 - where a character begins
                length = 2 + (byte >= 0xE0) + (byte >= 0xF0)  # noqa: PLR2004
                return end if back >= length else end - back
        return end

    def _text(self, lines: bytes) -> bytes:
        if lines.isascii():
            return lines
        try:
            lines.decode()
        except UnicodeDecodeError:
            return b"\n".join(self._line_text(line) for line in lines.split(b"\n"))
        return lines

    def _line_text(self, line: bytes) -> bytes:
        try:
            line.decode()
        except UnicodeDecodeError:
            self.undecodable += 1
            return line.decode(errors="replace").encode()
        return line
