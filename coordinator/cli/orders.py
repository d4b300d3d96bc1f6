"""``outrider restart``, ``stop`` and ``exclude``: a person tells the coordinator what to do."""

import argparse
import getpass
import sys
from typing import Final

from coordinator.cli.arguments import add_target
from coordinator.cli.client import Client
from coordinator.wording import one_line

WHO_CHARS_MAX: Final = 100
"""As the coordinator takes it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the order that ``parser`` is for."""
    if parser.get_default("command") == "exclude":
        parser.add_argument("node", metavar="NODE", help="the node's name")
    parser.add_argument(
        "--why", required=True, metavar="TEXT", help="the reason; it is kept in the incident"
    )
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    """Hand the order over."""
    path = {
        "restart": ("v1", "job", "restart"),
        "stop": ("v1", "job", "stop"),
        "exclude": ("v1", "nodes", getattr(args, "node", ""), "exclude"),
    }[args.command]
    Client.of(args).post(*path, who=_who(), why=args.why)
    what = f"exclude {args.node}" if args.command == "exclude" else args.command
    sys.stdout.write(
        f"{one_line(what)}: the coordinator has been asked; `outrider status` shows the result\n"
    )
    return 0


def _who() -> str:
    try:
        return getpass.getuser()[:WHO_CHARS_MAX]
    except (KeyError, OSError):  # a container's numeric user without a name
        return "unknown"
