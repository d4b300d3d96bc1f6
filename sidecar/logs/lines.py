"""Bytes in pieces become whole lines of text, whatever the pieces and whatever the bytes.

Decides where a line ends (a line feed, or a carriage return as progress bars use it) and that half
a line is not one yet.  It knows neither files nor rules.
"""

from typing import Final

PARTIAL_BYTES_MAX: Final = 64 << 10
"""A line longer than this is cut here: a writer without line ends must not fill the memory."""


class LineSplitter:
    """The lines of one stream.  Feed it bytes in order."""

    def __init__(self, partial_bytes_max: int = PARTIAL_BYTES_MAX) -> None:
        self._max = partial_bytes_max
        self._partial = b""
        self.cut = 0
        """Lines that were cut because they were too long."""
        self.undecodable = 0
        """Lines with bytes that are not UTF-8, each replaced by U+FFFD."""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes, without their ends and without empty ones."""
        *whole, self._partial = (self._partial + data).replace(b"\r", b"\n").split(b"\n")
        pieces: list[bytes] = []
        for line in whole:
            pieces.extend(self._pieces(line))
        *full, self._partial = self._pieces(self._partial) or [b""]
        pieces.extend(full)
        return [self._text(piece) for piece in pieces if piece]

    @property
    def partial(self) -> str:
        """What stands after the last line end."""
        return self._partial.decode(errors="replace")

    def reset(self) -> None:
        """Forget the partial line: the stream begins anew."""
        self._partial = b""

    def _pieces(self, line: bytes) -> list[bytes]:
        if len(line) <= self._max:
            return [line]
        self.cut += 1
        return [line[start : start + self._max] for start in range(0, len(line), self._max)]

    def _text(self, line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError:
            self.undecodable += 1
            return line.decode(errors="replace")
