"""The rules that every job gets: those of the shipped library that tell of faults."""

from sidecar.logs.library.catalogue import fault_rules
from sidecar.logs.rules import LogRule


def default_rules() -> tuple[LogRule, ...]:
    """Return the shipped rules."""
    return fault_rules()
