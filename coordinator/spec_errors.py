"""What is wrong with a file that a person wrote, said in one sentence: file, field and reason.

It knows YAML's and msgspec's errors and the shape of the expected types.  It knows no field by
name, so that every spec type is served alike.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import yaml

from coordinator.wording import one_line

_AT: Final = re.compile(
    r"^(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`)?$", re.DOTALL
)
_TOKEN: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(.*)`$")
_EXPECTED: Final = re.compile(r"^Expected (?P<wanted>.*?)(?:, got `(?P<found>\w+)`)?$", re.DOTALL)
_OWN: Final = re.compile(
    r"^(?P<field>[a-z][A-Za-z]*(?:\[\d+\]\.[A-Za-z]+)?): (?P<reason>.*)$", re.DOTALL
)
"""How a type's own check names the field it refuses; see `refusal`."""
_KINDS: Final[Mapping[str, str]] = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a mapping",
    "str": "a text",
}


VALUES_MAX: Final = 100_000
"""Values of one file once its aliases are written out; a few short lines can ask for billions."""


class SpecError(Exception):
    """A file cannot be used: ``file``, ``path`` of the field (may be empty) and ``reason``."""

    def __init__(self, file: str, path: str, reason: str) -> None:
        self.file, self.path, self.reason = file, path, reason
        super().__init__(f"{file}: {path}: {reason}" if path else f"{file}: {reason}")


def refusal(field: str, reason: str) -> ValueError:
    """Return what a type's own check raises about ``field``."""
    return ValueError(f"{field}: {reason}")


class StrictLoader(yaml.SafeLoader):
    """YAML's plain types only; a key given twice is an error, not a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping.  Raises a marked error for the second of two equal keys."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the field {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        built: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return built

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Build a text.  Raises a marked error for one that no file could hold."""
        value: Any = super().construct_scalar(node)
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise yaml.constructor.ConstructorError(
                None, None, "an escape here is half of a character", node.start_mark
            )
        return value


def parse_yaml(text: str, file: str) -> dict[str, Any]:
    """Return the mapping in ``text``.  Raises `SpecError` with line and column."""
    data = parse_yaml_value(text, file)
    if not isinstance(data, dict):
        raise SpecError(file, "", "the file must hold fields with values, like `name: my-job`")
    return data


def parse_yaml_value(text: str, file: str) -> Any:
    """Return the value in ``text``.  Raises `SpecError` with line and column."""
    try:
        # StrictLoader is a SafeLoader: no tag builds anything but plain values.
        data = yaml.load(text, Loader=StrictLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        raise SpecError(file, place, one_line(error.problem or str(error))) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = f"line {before.count(chr(10)) + 1}, column {error.position - before.rfind(chr(10))}"
        reason = f"the character U+{error.character:04X} may not stand here"
        raise SpecError(file, place, reason) from error
    except (ValueError, RecursionError) as error:
        raise SpecError(file, "", f"a value cannot be read: {one_line(str(error))}") from error
    if data is None:
        raise SpecError(file, "", "the file is empty")
    if not _is_bounded(data):
        raise SpecError(file, "", f"its aliases add up to more than {VALUES_MAX} values")
    return data


def convert(data: Mapping[str, Any], kind: type[Any], file: str, prefix: str = "") -> Any:
    """Return ``data`` as a ``kind``.  Raises `SpecError`; ``prefix`` is the path of ``data``."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        path, reason = _explained(str(error), data, kind)
        raise SpecError(file, ".".join(part for part in (prefix, path) if part), reason) from error


def _explained(text: str, data: Any, kind: type[Any]) -> tuple[str, str]:
    """Return (path, reason) of msgspec's sentence ``text``."""
    match = _AT.match(text)
    assert match is not None, "the pattern matches any text"
    what, path = match["what"], match["path"] or ""
    if match["key"]:
        return path.removeprefix("."), "the name of a field must be a text"
    value, expected = _walk(path, data, msgspec.inspect.type_info(kind))
    path = path.removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        name = unknown[1]
        return f"{path}.{one_line(name)}".removeprefix("."), _unknown(name, expected)
    if missing := _MISSING.match(what):
        return f"{path}.{missing[1]}".removeprefix("."), "this field is required"
    if what.startswith("Invalid enum value"):
        return path, _choice(value, expected)
    if wanted := _EXPECTED.match(what):
        return path, f"must be {_kind(wanted['wanted'])}, but is {_shown(value)}"
    own = _OWN.match(what)
    if own is None:
        return path, one_line(what)
    return f"{path}.{own['field']}".removeprefix("."), one_line(own["reason"])


def _is_bounded(data: Any) -> bool:
    """Return whether ``data`` stays small when written out: no cycle, no towers of aliases."""
    left, stack = VALUES_MAX, [data]
    while stack and left > 0:
        item = stack.pop()
        left -= 1
        if isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return not stack


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
            kinds = tuple(
                member
                for item in kinds
                if isinstance(item, msgspec.inspect.VarTupleType)
                for member in _members(item.item_type)
            )
    return data, kinds


def _members(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _fields(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Field, ...]:
    return kind.fields if isinstance(kind, msgspec.inspect.StructType) else ()


def _unknown(name: str, kinds: tuple[msgspec.inspect.Type, ...]) -> str:
    names = [field.encode_name for kind in kinds for field in _fields(kind)]
    folded = {known.lower().replace("_", ""): known for known in names}
    near = difflib.get_close_matches(name.lower().replace("_", ""), folded, n=1, cutoff=0.75)
    if near:
        return f"this field does not exist; did you mean {folded[near[0]]}?"
    return f"this field does not exist; the fields here are {', '.join(names)}"


def _choice(value: Any, kinds: tuple[msgspec.inspect.Type, ...]) -> str:
    allowed = [
        str(choice)
        for kind in kinds
        if isinstance(kind, msgspec.inspect.LiteralType)
        for choice in kind.values
    ]
    return f"must be one of {', '.join(allowed)}, but is {_shown(value)}"


def _kind(wanted: str) -> str:
    """Return msgspec's `int | null` and `str` of length >= 1 in words."""
    words = re.sub(
        r"`([^`]*)`",
        lambda match: " or ".join(
            _KINDS.get(part, part) for part in match[1].split(" | ") if part != "null"
        ),
        wanted,
    )
    return one_line(words.replace("matching regex", "that matches"))


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    kind = "the text " if isinstance(value, str) else ""
    return kind + one_line(repr(value), 80)
