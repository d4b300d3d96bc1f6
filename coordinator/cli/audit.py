"""``outrider audit``: who ordered what, why, and what came of it."""

import argparse
from typing import Final

from coordinator.cli.arguments import add_json, add_limit
from coordinator.cli.client import Client
from coordinator.cli.console import cell, clock, console, print_json, table
from coordinator.cli.errors import UserError
from coordinator.cli.incident_source import add_source
from coordinator.journal_format import JournalError
from coordinator.kept_journal import kept_orders
from sidecar.codec import to_plain

SHOWN_DEFAULT: Final = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider audit``."""
    add_source(parser)
    add_json(parser)
    add_limit(parser, SHOWN_DEFAULT)


def run(args: argparse.Namespace) -> int:
    """Print the newest orders, oldest first."""
    if args.state_dir is None:
        found = Client.of(args).get("v1", "audit", limit=args.limit)["orders"]
    else:
        try:
            found = [to_plain(order) for order in kept_orders(args.state_dir)[-args.limit :]]
        except (JournalError, OSError) as error:
            raise UserError(str(error)) from error
    if args.json:
        print_json(found)
        return 0
    out = console()
    if not found:
        out.print("nobody has ordered anything so far")
        return 0
    shown = table("", ("when", "order", "node", "who", "why", "proof", "from", "outcome"))
    for line in found:
        proof = " ".join(part for part in (line["proof"], line["name"]) if part)
        shown.add_row(
            cell(clock(line["at_ns"])),
            cell(line["order"]),
            cell(line["node"]),
            cell(line["who"]),
            cell(line["why"]),
            cell(proof),
            cell(line["address"]),
            cell(line["outcome"], "green" if line["accepted"] else "red"),
        )
    out.print(shown)
    return 0
