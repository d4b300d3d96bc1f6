"""Length-prefixed JSON frames: 4-byte big-endian length, then a UTF-8 JSON object.

One codec serves both ends.  It holds bytes, never a socket.  A frame that cannot be accepted is
reported as a `BadFrame` in its place in the stream and the stream goes on; only a length above
the limit ends it, because the next frame's start can then no longer be trusted.
"""

import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any, Final

FRAME_BYTES_MAX: Final = 1 << 20
"""Largest payload.  The largest honest message is a label set of a few kilobytes."""

_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadFrame:
    """A frame that was read but not accepted.  ``fatal`` means the stream must be closed."""

    reason: str
    fatal: bool = False


class FrameTooLargeError(ValueError):
    """An outgoing message is above `FRAME_BYTES_MAX`."""


def encode(message: dict[str, Any]) -> bytes:
    """Return the frame for ``message``.  Raises `FrameTooLargeError` above the limit.

    A byte of a file's name that is no UTF-8 is a surrogate in Python's text and would make the
    whole message one that no reader accepts: it is sent as a question mark.
    """
    payload = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode(
        errors="replace"
    )
    if len(payload) > FRAME_BYTES_MAX:
        raise FrameTooLargeError(
            f"message of {len(payload)} bytes is above the limit of {FRAME_BYTES_MAX}"
        )
    return _LENGTH.pack(len(payload)) + payload


@dataclass(slots=True)
class Decoder:
    """Cuts a byte stream into JSON objects.  Memory is bounded by one frame plus one read."""

    _buffer: bytearray = field(default_factory=bytearray)
    _closed: bool = False

    def feed(self, data: bytes) -> list[dict[str, Any] | BadFrame]:
        """Return every complete frame in order.  After a fatal one nothing more is decoded."""
        if self._closed:
            return []
        self._buffer += data
        out: list[dict[str, Any] | BadFrame] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                self._closed = True
                self._buffer.clear()
                reason = f"frame of {length} bytes is above the limit of {FRAME_BYTES_MAX}"
                out.append(BadFrame(reason=reason, fatal=True))
                return out
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return out
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            out.append(_decode(payload))
        return out


class _RefusedError(ValueError):
    """JSON that two readers may understand differently, or not at all."""


def _decode(payload: bytes) -> dict[str, Any] | BadFrame:
    if not payload:
        return BadFrame(reason="frame is empty")
    try:
        message = json.loads(
            payload.decode(),
            object_pairs_hook=_object,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except UnicodeDecodeError:
        return BadFrame(reason="frame is not UTF-8")
    except _RefusedError as error:
        return BadFrame(reason=f"frame is not plain JSON: {error}")
    except (ValueError, RecursionError) as error:
        return BadFrame(reason=f"frame is not JSON: {type(error).__name__}")
    if not isinstance(message, dict):
        return BadFrame(reason=f"frame is a JSON {type(message).__name__}, not an object")
    return message


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _RefusedError("a key stands twice in one object")
    return made


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _RefusedError("a number is not finite")
    return value
