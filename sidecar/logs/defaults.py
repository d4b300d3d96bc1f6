"""The rules that every job gets: shipped as a file, so that they can be read and copied."""

import functools
from importlib import resources

import yaml

from sidecar.logs.rules import LogRule, parse_rules


@functools.cache
def default_rules() -> tuple[LogRule, ...]:
    """Return the shipped rules."""
    text = (resources.files("sidecar.logs") / "default_rules.yaml").read_text(encoding="utf-8")
    return parse_rules(yaml.safe_load(text))
