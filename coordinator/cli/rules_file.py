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
    return rules_of(read_document(path), path)


def read_document(path: Path) -> Any:
    """Return what is in the file at ``path`` as plain values.  Raises `UserError`."""
    from coordinator.spec_errors import SpecError, parse_yaml_value  # noqa: PLC0415 - `--help` stays quick
    from sidecar.given_files import GivenFileError, read_given_text  # noqa: PLC0415 - as above

    try:
        text = read_given_text(path, RULES_BYTES_MAX)
    except GivenFileError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    try:
        return parse_yaml_value(text, str(path))
    except SpecError as error:
        raise UserError(str(error)) from error


def rules_of(document: Any, path: Path) -> list[Any]:
    """Return the rules in the ``document`` that stood at ``path``.  Raises `UserError`."""
    from sidecar.logs.rule_files import PLACES, rules_in  # noqa: PLC0415 - as above

    rules = rules_in(document)
    if rules is None:
        place = ".".join(PLACES[1])
        raise UserError(
            f"{path} holds no rules; it must be a list of them, or a job spec ({place})"
        )
    return rules


def spec_problem(document: Any, path: Path) -> str | None:
    """Say what is wrong with a whole job spec besides its rules, None for a mere list of rules."""
    from coordinator.spec import check_job_spec  # noqa: PLC0415 - as above
    from coordinator.spec_errors import SpecError  # noqa: PLC0415 - as above

    body = document.get("spec", document) if isinstance(document, dict) else None
    if not isinstance(body, dict) or "replicaSpecs" not in body:
        return None  # a part of one, kept apart
    try:
        check_job_spec(document, str(path))
    except SpecError as error:
        # What is wrong with a rule is told rule by rule.
        return None if "logMonitoringConfiguration[" in error.path else str(error)
    return None
