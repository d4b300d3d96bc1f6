"""A piece of output as rules see it: whole lines of clean text, kept as bytes.

Decides what no rule ever sees: colours, carriage returns, empty lines, bytes that are no text.
Launchers' prefixes stay and are skipped by `sidecar.logs.prefixes`.
"""

import re
from collections.abc import Iterable
from typing import Final

_ESCAPE: Final = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours and cursor movement
    rb"|\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # titles and links
    rb"|[@-Z\\^_])"
)
_FOLDED_ODDLY: Final = (b"\xc5\xbf", b"\xe2\x84\xaa")
"""The long s and the Kelvin sign: the only others that RE2 takes for an ASCII letter."""


class Block:
    """Whole lines, each with its end.  ``data`` is UTF-8.

    ``before`` is the end of what the same stream held earlier, for evidence.
    """

    __slots__ = ("_lower", "before", "data")

    def __init__(self, data: bytes, before: bytes = b"") -> None:
        self.data = data
        self.before = before
        self._lower: bytes | None = None

    @property
    def lines(self) -> int:
        """How many lines it holds."""
        return self.data.count(b"\n")

    def lower(self) -> bytes:
        """Return the text in small letters, byte for byte at the same place."""
        if self._lower is None:
            self._lower = self.data.lower()
        return self._lower

    def folds_oddly(self) -> bool:
        """Return whether letters outside ASCII stand here that match ASCII ones."""
        return not self.data.isascii() and any(odd in self.data for odd in _FOLDED_ODDLY)

    def line(self, start: int) -> bytes:
        """Return the line that begins at ``start``, without its end."""
        return self.data[start : self.data.find(b"\n", start)]

    def text(self, start: int) -> str:
        """Return the line that begins at ``start``."""
        return self.line(start).decode()


def block_of(texts: Iterable[str]) -> Block:
    """Return lines as one block.  A line feed inside one is a blank, so lines stay lines."""
    cleaned = [text.replace("\n", " ") for text in texts]
    if not cleaned:
        return Block(b"")
    return Block(without_escapes(("\n".join(cleaned) + "\n").encode(errors="replace")))


def clean_bytes(data: bytes) -> bytes:
    """Return whole lines without colours, carriage returns and NUL bytes."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\0" in data:
        data = data.replace(b"\0", b"")
    return without_escapes(data)


def without_escapes(data: bytes) -> bytes:
    """Return ``data`` without terminal control sequences."""
    return _ESCAPE.sub(b"", data) if b"\x1b" in data else data
