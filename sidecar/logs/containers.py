"""Container runtimes' own log files, unwrapped to what the container wrote.

Decides by a file's first line whether a runtime wrote it.  Runtimes cut long lines at 16 KiB, even
inside a character; the pieces are put together as bytes, before anything is decoded.
"""

import re
from collections.abc import Callable
from typing import Final

import orjson

PENDING_BYTES_MAX: Final = 64 << 10
"""A line in pieces is handed on when it has become as long as this."""

_CRI: Final = re.compile(
    rb"\d{4}-\d\d-\d\dT\S+ (stdout|stderr) ([FP])(?::\S*)?(?: (.*))?", re.DOTALL
)
_CRI_START: Final = re.compile(rb"\d{1,4}|\d{4}-[\d-]{0,5}|\d{4}-\d\d-\d\dT")
_DOCKER_START: Final = b'{"log":'


class Unwrapper:
    """One file's lines, in the format that ``read`` takes apart to stream, text and "it ends"."""

    def __init__(self, read: Callable[[bytes], tuple[bytes, bytes, bool] | None]) -> None:
        self._read = read
        self._pending: dict[bytes, bytes] = {}

    def unwrap(self, lines: bytes) -> bytes:
        """Return what whole lines hold; pieces wait for their end."""
        out: list[bytes] = []
        for line in lines.split(b"\n"):
            if not line:
                continue
            found = self._read(line)
            if found is None:
                out.append(line + b"\n")
                continue
            stream, text, ends = found
            text = self._pending.pop(stream, b"") + text
            if ends:
                out.append(text + b"\n")
            elif len(text) > PENDING_BYTES_MAX:
                out.append(text)
            else:
                self._pending[stream] = text
        return b"".join(out)


def unwrapper_for(first_line: bytes) -> Unwrapper | None:
    """Return what takes a file apart that begins so, or None: its lines are what they are."""
    first_line = first_line.removesuffix(b"\r")
    if b"\r" in first_line:
        return None
    if _CRI.fullmatch(first_line):
        return Unwrapper(_cri)
    if first_line.startswith(_DOCKER_START) and _docker(first_line) is not None:
        return Unwrapper(_docker)
    return None


def may_be_wrapped(beginning: bytes) -> bool:
    """Return whether a first line that begins so may be a runtime's; it is not whole yet."""
    if b"\r" in beginning[:-1]:  # a progress bar; it may never end its line
        return False
    return _DOCKER_START.startswith(beginning[: len(_DOCKER_START)]) or bool(
        _CRI_START.fullmatch(beginning[: len(b"2024-01-01T")])
    )


def _cri(line: bytes) -> tuple[bytes, bytes, bool] | None:
    found = _CRI.fullmatch(line)
    return None if found is None else (found[1], found[3] or b"", found[2] == b"F")


def _docker(line: bytes) -> tuple[bytes, bytes, bool] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("log"), str):
        return None
    text = record["log"].encode(errors="replace")
    return str(record.get("stream")).encode(), text.removesuffix(b"\n"), text.endswith(b"\n")
