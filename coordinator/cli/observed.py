"""``outrider observed``: what detectors on probation would have done, and how often rightly."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from coordinator.cli.arguments import add_json, add_target
from coordinator.cli.client import Client
from coordinator.cli.console import cell, clock, console, print_json, table

SHOWN: Final = 20
"""Newest observations that are listed."""
STYLES: Final[Mapping[str, str]] = {"confirmed": "green", "false_alarm": "bold red", "pending": ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider observed``."""
    add_target(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the score of every observed detector, and its newest words."""
    job = Client.of(args).get("v1", "job")
    scores, observed = job["observed_scores"], job["observed"]
    if args.json:
        print_json({"scores": scores, "observed": observed})
        return 0
    out = console()
    if not scores:
        out.print("no observed detector has said anything (detectorPolicy.observe names them)")
        return 0
    columns = ("detector", "would have stopped#", "rightly#", "wrongly#", "not known yet#")
    summed = table("What would have been", columns)
    for score in scores:
        numbers = (score["stops"], score["confirmed"], score["false_alarms"], score["pending"])
        summed.add_row(cell(score["kind"]), *(cell(number) for number in numbers))
    out.print(summed)
    listed = table("", ("when", "detector", "node", "rank#", "what", "times#", "verdict"))
    for item in observed[-SHOWN:]:
        listed.add_row(
            cell(clock(item["at_ns"])),
            cell(item["kind"]),
            cell(item["node"] or "-"),
            cell(item["rank"]),
            cell(item["message"]),
            cell(item["times"]),
            cell(_verdict(item), STYLES[item["verdict"]]),
        )
    out.print(listed)
    return 0


def _verdict(item: Mapping[str, Any]) -> str:
    return str(item["verdict"]).replace("_", " ")
