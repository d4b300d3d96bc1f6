"""``outrider incidents``: what stopped the job so far, one line each."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from coordinator.cli.arguments import add_json, add_limit
from coordinator.cli.console import cell, clock, console, print_json, span, table
from coordinator.cli.incident_source import add_source, source_of

SHOWN_DEFAULT: Final = 20
OUTCOME_STYLES: Final[Mapping[str, str]] = {
    "open": "yellow",
    "recovered": "green",
    "failed": "bold red",
    "stopped": "cyan",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider incidents``."""
    add_source(parser)
    add_json(parser)
    add_limit(parser, SHOWN_DEFAULT)


def run(args: argparse.Namespace) -> int:
    """Print the newest incidents, oldest first."""
    found = source_of(args).listed(args.limit)
    if args.json:
        print_json(found)
        return 0
    out = console()
    if not found:
        out.print("nothing has stopped the job so far")
        return 0
    columns = ("incident", "when", "kind", "node", "rank#", "gpu#", "what", "decision")
    shown = table("", (*columns, "recovery#", "steps lost#", "outcome"))
    for line in found:
        shown.add_row(
            cell(line["id"]),
            cell(clock(line["at_ns"])),
            cell(line["kind"]),
            cell(line["node"]),
            cell(line["rank"]),
            cell(line["gpu"]),
            cell(_what(line)),
            cell(_decision(line)),
            cell(span(line["recovery_s"])),
            cell(line["steps_lost"]),
            cell(line["outcome"], OUTCOME_STYLES.get(line["outcome"], "")),
        )
    out.print(shown)
    out.print(cell("`outrider explain INCIDENT` tells one of them", "dim"))
    return 0


def _what(line: Mapping[str, Any]) -> str:
    if line["verdict"] == "attributed":
        return str(line["reason"])
    if line["kind"] == "operator":
        return str(line["trigger"])
    return f"nobody named: {line['reason'] or line['trigger']}"


def _decision(line: Mapping[str, Any]) -> str:
    if line["mode"] is not None:
        return str(line["mode"])
    return {"failed": "gave up", "stopped": "ended the job"}.get(line["outcome"], "-")
