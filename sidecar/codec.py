"""Messages of `sidecar.api` to and from JSON bytes.

Decoding is strict about types and silent about unknown fields, so that an older peer understands
a newer one; an unknown type or a wrong field is an `InvalidMessageError` that names the field.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

import msgspec
import orjson

T = TypeVar("T")

MESSAGE_BYTES_MAX: Final = 8 << 20
"""Largest message between sidecar and coordinator: 64 ranks with full log tails stay far below."""
INTEGER_MAX: Final = (1 << 63) - 1
"""Largest number that every JSON library takes for a whole one."""


class InvalidMessageError(ValueError):
    """A message that cannot be accepted; its text names the field and the reason."""


def encode(message: Any) -> bytes:
    """Return the JSON bytes of a vocabulary dataclass, its ``type`` first.

    Text that has no UTF-8 form (a path's undecodable bytes) and numbers beyond 64 bits are sent
    as what comes closest: one odd word must not keep a whole node from being heard.
    """
    body = {item.name: getattr(message, item.name) for item in fields(message)}
    plain = {"type": message.TYPE, **body}
    try:
        return orjson.dumps(plain, default=_plain)
    except orjson.JSONEncodeError:
        return orjson.dumps(_sendable(msgspec.to_builtins(plain)))


def decode(data: bytes | str, table: Mapping[str, type[T]]) -> T:
    """Return the message in ``data``.  Raises `InvalidMessageError`."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidMessageError(f"not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidMessageError("not a JSON object")
    kind = body.pop("type", None)
    cls = table.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise InvalidMessageError(f"unknown message type {kind!r}; known: {', '.join(table)}")
    return from_plain(body, cls)


def from_plain(body: Any, cls: type[T]) -> T:
    """Build ``cls`` from plain JSON values.  Raises `InvalidMessageError`."""
    try:
        return msgspec.convert(body, cls, strict=True)
    except msgspec.ValidationError as error:
        raise InvalidMessageError(f"{cls.__name__}: {error}") from None


def to_plain(value: Any) -> Any:
    """Return ``value`` as plain JSON values."""
    return orjson.loads(orjson.dumps(value, default=_plain))


def _sendable(value: Any) -> Any:
    """Return plain ``value`` with every text and number in a form that JSON here has."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case bool() | None | float():
            return value
        case int():
            return max(-INTEGER_MAX, min(INTEGER_MAX, value))
        case Mapping():
            return {_sendable(str(key)): _sendable(item) for key, item in value.items()}
        case _:
            return [_sendable(item) for item in value]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
