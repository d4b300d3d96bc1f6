"""Reads docs/metrics.md, and PromQL, for the tests of dashboards and alerts."""

import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser

ROOT = Path(__file__).resolve().parents[3]

TARGET_LABELS = frozenset({"job", "instance", "node", "cluster"})
"""What Prometheus adds to every series of a target."""


def labels_by_metric() -> dict[str, frozenset[str]]:
    """Every series name in the reference, a histogram's three included, with its labels."""
    found: dict[str, frozenset[str]] = {"up": frozenset()}
    table = re.compile(r"^\| `(outrider_\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    of_sidecars = set(table.findall(text.split("\n## Sidecar\n")[1]))
    for row in table.findall(text):
        name, kind, labels = row
        names = frozenset(re.findall(r"`(\w+)`", labels))
        if row in of_sidecars:
            names |= {"training_job"}
        found[name] = names
        if kind == "histogram":
            found |= {
                f"{name}_sum": names,
                f"{name}_count": names,
                f"{name}_bucket": names | {"le"},
            }
    return found


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Every series an expression selects, with the labels it matches on."""
    promql_parser.parse(expression)
    for name, matchers in re.findall(r"\b(outrider_\w+|up)\b(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
