"""What is wrong with a file that a person wrote, said in one sentence: file, field and reason."""

from collections.abc import Mapping
from typing import Any

import msgspec

from coordinator.wording import one_line
from sidecar.field_errors import explained
from sidecar.strict_yaml import YamlError, load_yaml


class SpecError(Exception):
    """A file cannot be used: ``file``, ``path`` of the field (may be empty) and ``reason``."""

    def __init__(self, file: str, path: str, reason: str) -> None:
        self.file, self.path, self.reason = file, path, reason
        super().__init__(f"{file}: {path}: {reason}" if path else f"{file}: {reason}")


def refusal(field: str, reason: str) -> ValueError:
    """Return what a type's own check raises about ``field``."""
    return ValueError(f"{field}: {reason}")


def parse_yaml(text: str, file: str) -> dict[str, Any]:
    """Return the mapping in ``text``.  Raises `SpecError` with line and column."""
    data = parse_yaml_value(text, file)
    if not isinstance(data, dict):
        raise SpecError(file, "", "the file must hold fields with values, like `name: my-job`")
    return data


def parse_yaml_value(text: str, file: str) -> Any:
    """Return the value in ``text``.  Raises `SpecError` with line and column."""
    try:
        data = load_yaml(text)
    except YamlError as error:
        raise SpecError(file, error.place, one_line(error.reason)) from error
    if data is None:
        raise SpecError(file, "", "the file is empty")
    return data


def convert(data: Mapping[str, Any], kind: type[Any], file: str, prefix: str = "") -> Any:
    """Return ``data`` as a ``kind``.  Raises `SpecError`; ``prefix`` is the path of ``data``."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        path, reason = explained(str(error), data, kind)
        raise SpecError(file, ".".join(part for part in (prefix, path) if part), reason) from error
