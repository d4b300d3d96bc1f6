"""What is wrong with a value that somebody wrote, said as field, fault and what is accepted.

Turns msgspec's errors into sentences.  It knows the shape of the expected types and no field by
name, so that files, request bodies and messages are all served alike.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

SHOWN_CHARS_MAX: Final = 80
"""Longest value inside a sentence."""
REASON_CHARS_MAX: Final = 300
"""Longest sentence that a type's own check says."""

_AT: Final = re.compile(
    r"^(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`)?$", re.DOTALL
)
_TOKEN: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(.*)`$")
_EXPECTED: Final = re.compile(r"^Expected (?P<wanted>.*?)(?:, got `(?P<found>\w+)`)?$", re.DOTALL)
_OWN: Final = re.compile(
    r"^(?P<field>[a-z][A-Za-z]*(?:\[\d+\](?:\.[A-Za-z]+)?)?): (?P<reason>.*)$", re.DOTALL
)
"""How a type's own check names the field it refuses."""
_KINDS: Final[Mapping[str, str]] = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a mapping",
    "str": "a text",
}


def explained(text: str, data: Any, kind: type[Any]) -> tuple[str, str]:
    """Return (path, reason) of msgspec's sentence ``text`` about ``data`` as a ``kind``.

    ``path`` is as the author wrote it, such as ``replicaSpecs[0].name``, and empty for the whole.
    """
    match = _AT.match(text)
    assert match is not None, "the pattern matches any text"
    what, path = match["what"], match["path"] or ""
    if match["key"]:
        return path.removeprefix("."), "the name of a field must be a text"
    value, expected = _walk(path, data, msgspec.inspect.type_info(kind))
    path = path.removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        name = unknown[1]
        return f"{path}.{_cut(name)}".removeprefix("."), _unknown(name, expected)
    if missing := _MISSING.match(what):
        return f"{path}.{missing[1]}".removeprefix("."), "this field is required"
    if what.startswith("Invalid enum value"):
        return path, _choice(value, expected)
    if what.startswith("Invalid RFC3339"):
        example = "a date and time with its zone, such as 2026-01-31T12:00:00Z"
        return path, f"must be {example}, but is {_shown(value)}"
    if wanted := _EXPECTED.match(what):
        inside = "[...]" in path  # one of a mapping's values, and nothing says which
        seen = _KINDS.get(wanted["found"] or "", "another") if inside else _shown(value)
        return path, f"must be {_kind(wanted['wanted'])}, but is {seen}"
    own = _OWN.match(what)
    if own is None:
        return path, _cut(what, REASON_CHARS_MAX)
    return f"{path}.{own['field']}".removeprefix("."), _cut(own["reason"], REASON_CHARS_MAX)


def _walk(
    path: str, data: Any, kind: msgspec.inspect.Type
) -> tuple[Any, tuple[msgspec.inspect.Type, ...]]:
    """Return the value at ``path`` and the types that may stand there."""
    kinds = _members(kind)
    for name, index in _TOKEN.findall(path):
        if name:
            data = data.get(name) if isinstance(data, Mapping) else None
            fields = [field for item in kinds for field in _fields(item)]
            kinds = tuple(
                member
                for field in fields
                if field.encode_name == name
                for member in _members(field.type)
            )
        else:
            inside = isinstance(data, Sequence) and index.isdigit() and int(index) < len(data)
            data = data[int(index)] if inside else None
            kinds = tuple(member for item in kinds for member in _members(_inner(item)))
    return data, kinds


def _members(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _inner(kind: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """Return the type of what a list or a mapping holds, itself where it holds nothing."""
    if isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        return kind.item_type
    return kind.value_type if isinstance(kind, msgspec.inspect.DictType) else kind


def _fields(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Field, ...]:
    known = (msgspec.inspect.StructType, msgspec.inspect.DataclassType)
    return kind.fields if isinstance(kind, known) else ()


def _unknown(name: str, kinds: tuple[msgspec.inspect.Type, ...]) -> str:
    names = [field.encode_name for kind in kinds for field in _fields(kind)]
    folded = {known.lower().replace("_", ""): known for known in names}
    near = difflib.get_close_matches(name.lower().replace("_", ""), folded, n=1, cutoff=0.75)
    if near:
        return f"this field does not exist; did you mean {folded[near[0]]}?"
    return f"this field does not exist; the fields here are {', '.join(names) or 'none'}"


def _choice(value: Any, kinds: tuple[msgspec.inspect.Type, ...]) -> str:
    allowed = [str(choice) for kind in kinds for choice in _choices(kind)]
    return f"must be one of {', '.join(allowed)}, but is {_shown(value)}"


def _choices(kind: msgspec.inspect.Type) -> tuple[Any, ...]:
    if isinstance(kind, msgspec.inspect.EnumType):
        return tuple(item.value for item in kind.cls)
    return kind.values if isinstance(kind, msgspec.inspect.LiteralType) else ()


def _kind(wanted: str) -> str:
    """Return msgspec's `int | null` and `str` of length >= 1 in words."""
    words = re.sub(
        r"`([^`]*)`",
        lambda match: " or ".join(
            _KINDS.get(part, part) for part in match[1].split(" | ") if part != "null"
        ),
        wanted,
    )
    return _cut(words.replace("matching regex", "that matches"), REASON_CHARS_MAX)


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    kind = "the text " if isinstance(value, str) else ""
    return kind + _cut(repr(value))


def _cut(text: str, chars_max: int = SHOWN_CHARS_MAX) -> str:
    """Return foreign ``text`` printable and not too long to be read."""
    safe = " ".join(text.split())
    safe = safe if safe.isprintable() else ascii(safe)[1:-1]
    return safe if len(safe) <= chars_max else f"{safe[: chars_max - 1]}\u2026"
