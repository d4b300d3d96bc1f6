"""YAML as people's files here may hold it: plain values, each field once, nothing without end.

Decides what is refused and where it stands.  It opens no file and knows no field by name.
"""

from typing import Any, Final

import yaml

VALUES_MAX: Final = 100_000
"""Values of one file once its aliases are written out; a few short lines can ask for billions."""


class YamlError(ValueError):
    """The text cannot be used: ``place`` (line and column; may be empty) and ``reason``."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.place, self.reason = place, reason


def load_yaml(text: str) -> Any:
    """Return the value in ``text``, None when it holds none.  Raises `YamlError`."""
    try:
        # A SafeLoader: no tag builds anything but plain values.
        value = yaml.load(text, Loader=_Loader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
        raise YamlError(place, error.problem or str(error)) from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = f"line {before.count(chr(10)) + 1}, column {error.position - before.rfind(chr(10))}"
        raise YamlError(
            place, f"the character U+{error.character:04X} may not stand here"
        ) from error
    except (ValueError, RecursionError) as error:
        raise YamlError("", f"a value cannot be read: {error}") from error
    if not _is_bounded(value):
        raise YamlError("", f"its aliases add up to more than {VALUES_MAX} values")
    return value


class _Loader(yaml.SafeLoader):
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
        """Build a text.  Raises a marked error for one that no file and no message could hold."""
        value: Any = super().construct_scalar(node)
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            reason = "an escape here is half of a character"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
        return value


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
