"""Reading a file of rules that a person names: a list of them, or a job spec."""

from pathlib import Path
from typing import Any, Final

from coordinator.cli.errors import UserError

AUTO: Final = "auto"
"""Instead of a file: the shipped rules that fit the log."""
RULES_BYTES_MAX: Final = 1 << 20
"""Largest file of rules; no job has as many as would fill it."""


def read_rules(path: Path) -> list[Any]:
    """Return the rules in the file at ``path``, as they are written.  Raises `UserError`."""
    from coordinator.spec_errors import SpecError, parse_yaml_value  # noqa: PLC0415 - `--help` stays quick
    from sidecar.given_files import GivenFileError, read_given_text  # noqa: PLC0415 - as above
    from sidecar.logs.rule_files import PLACES, rules_in  # noqa: PLC0415 - as above

    try:
        text = read_given_text(path, RULES_BYTES_MAX)
    except GivenFileError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        document = parse_yaml_value(text, str(path))
    except SpecError as error:
        raise UserError(str(error)) from error
    rules = rules_in(document)
    if rules is None:
        place = ".".join(PLACES[1])
        raise UserError(
            f"{path} holds no rules; it must be a list of them, or a job spec ({place})"
        )
    return rules
