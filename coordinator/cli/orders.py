"""``outrider restart``, ``stop``, ``exclude`` and ``include``: what a person may order."""

import argparse
import getpass
import sys
from typing import Final

from coordinator.cli.arguments import add_target
from coordinator.cli.client import Client
from coordinator.wording import one_line

OF_A_NODE: Final = ("exclude", "include")
"""Orders that name a node; the others are about the job."""
WHO_CHARS_MAX: Final = 100
"""As the coordinator takes it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the order that ``parser`` is for."""
    if parser.get_default("command") in OF_A_NODE:
        parser.add_argument("node", metavar="NODE", help="the node's name")
    parser.add_argument(
        "--why", required=True, metavar="TEXT", help="the reason; it is kept in the incident"
    )
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    """Hand the order over."""
    node = (args.node,) if args.command in OF_A_NODE else ()
    subject = ("nodes", *node) if node else ("job",)
    Client.of(args).post("v1", *subject, args.command, who=_who(), why=args.why)
    what = " ".join((args.command, *node))
    sys.stdout.write(
        f"{one_line(what)}: the coordinator has been asked; `outrider status` shows the result\n"
    )
    return 0


def _who() -> str:
    try:
        return getpass.getuser()[:WHO_CHARS_MAX]
    except (KeyError, OSError):  # a container's numeric user without a name
        return "unknown"
