"""``outrider ledger``: where the job's time went, and what each kind of fault cost."""

import argparse
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from coordinator.cli.arguments import add_json, add_target
from coordinator.cli.client import Client
from coordinator.cli.console import cell, console, print_json, span, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider ledger``."""
    add_target(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the accounts."""
    found = Client.of(args).get("v1", "ledger")
    if args.json:
        print_json(found)
        return 0
    out = console()
    for name, text in (
        ("job", cell(found["job"])),
        ("wall clock", cell(span(found["wall_s"]))),
        ("goodput", cell(_share(found["goodput"]))),
        ("ETTR", cell(_share(found["ettr"]))),
    ):
        out.print(Text(f"{name + ':':<14}", "dim").append(text))
    out.print(_accounts(found))
    lost = found["lost_gpu_hours"]
    if not lost:
        out.print("no time was lost so far")
        return 0
    shown = table("", ("lost to", "GPU hours#"))
    for cause, hours in sorted(lost.items(), key=lambda item: -item[1]):
        shown.add_row(cell(cause), cell(f"{hours:.4f}"))
    out.print(shown)
    return 0


def _accounts(found: Mapping[str, Any]) -> Any:
    shown = table("", ("account", "time#", "share#"))
    wall_s = found["wall_s"]
    rows = [(name, value) for name, value in found["accounts_s"].items() if value > 0]
    rows.append(("not judged yet", found["held_s"]))
    for name, value in rows:
        share = "-" if wall_s <= 0 else f"{100 * value / wall_s:.2f} %"
        shown.add_row(cell(name.replace("_", " ")), cell(span(value)), cell(share))
    return shown


def _share(value: float | None) -> str:
    return "not known yet" if value is None else f"{100 * value:.2f} %"
