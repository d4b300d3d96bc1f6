"""The ``outrider`` command: finds the sub-command, words its errors.

Sub-commands are imported when they are asked for, so that ``outrider --help`` answers at once.
"""

import importlib
import os
import sys
import threading
from argparse import SUPPRESS
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final, NoReturn

from coordinator.cli.arguments import Parser
from coordinator.cli.errors import INTERRUPTED, USAGE, UserError
from coordinator.streams import (
    drop,
    open_missing_streams,
    print_error,
    refused_by_the_system,
)
from coordinator.wording import one_line

ERROR_CHARS_MAX: Final = 2_000
"""Longest complaint; a path alone may have twice as many characters."""

COMMANDS: Final = MappingProxyType(
    {
        "run": ("coordinator.cli.run", "launch this node's workers, shaped like torchrun"),
        "sidecar": ("coordinator.cli.sidecar", "launch this node's workers from a file"),
        "coordinator": ("coordinator.cli.coordinator", "serve one job's coordinator"),
        "status": ("coordinator.cli.status", "show the job and its nodes"),
        "incidents": ("coordinator.cli.incidents", "list what stopped the job so far"),
        "explain": ("coordinator.cli.explain", "tell one incident from trigger to first step"),
        "observed": ("coordinator.cli.observed", "tell what observed detectors would have done"),
        "ledger": ("coordinator.cli.ledger", "tell where the job's time went"),
        "wait": ("coordinator.cli.wait", "wait until the job runs or has ended"),
        "restart": ("coordinator.cli.orders", "restart the job's processes"),
        "stop": ("coordinator.cli.orders", "end the job for good"),
        "exclude": ("coordinator.cli.orders", "give a node no rank any more"),
        "include": ("coordinator.cli.orders", "let an excluded node be given ranks again"),
        "audit": ("coordinator.cli.audit", "list who ordered what, and what came of it"),
        "certs": ("coordinator.cli.certs", "make certificates for TLS between all parts"),
        "rules": ("coordinator.cli.rules", "try, check and list log rules"),
        "demo": ("coordinator.cli.demo", "break a small training run and watch it recover"),
    }
)
DESCRIPTION: Final = """\
Fault localization and recovery beside distributed training: finds which rank broke a job and
why, stops everyone in seconds, and resumes from a checkpoint that can be trusted."""


def entry() -> NoReturn:
    """Run one command as a process: nothing that still hangs keeps it from ending."""
    status = main()
    if any(
        thread is not threading.current_thread() and thread.is_alive() and not thread.daemon
        for thread in threading.enumerate()
    ):
        os._exit(status)  # a thread waits for a disk or a driver, perhaps for good
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    open_missing_streams()
    try:
        status = _dispatch(given)
        sys.stdout.flush()
    except UserError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough
        drop(sys.stdout)
        return 0
    except (OSError, MemoryError) as error:
        # What the system denies us (disk, memory, descriptors) is nobody's bug, wherever it is.
        return _complain(refused_by_the_system(error), USAGE)
    return status


def _complain(text: str, status: int) -> int:
    print_error(f"outrider: error: {one_line(text, ERROR_CHARS_MAX)}\n")
    return status


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        name = argv[0]
        module_name, summary = COMMANDS[name]
        module = importlib.import_module(module_name)
        parser = Parser(f"outrider {name}", f"{summary[0].upper()}{summary[1:]}.")
        parser.set_defaults(command=name)
        module.add_arguments(parser)
        try:
            args = parser.parse_args(argv[1:])
        except SystemExit:  # argparse after --help
            return 0
        status: int = module.run(args)
        return status
    parser = _overview()
    try:
        args = parser.parse_args(argv)
    except SystemExit:  # as above
        return 0
    if args.version:
        version = importlib.import_module("coordinator.version").version()
        sys.stdout.write(f"outrider {version}\n")
    else:
        parser.print_help()
    return 0


def _overview() -> Parser:
    lines = [f"  {name:<13}{summary}" for name, (_, summary) in COMMANDS.items()]
    parser = Parser(
        "outrider",
        DESCRIPTION,
        usage="outrider COMMAND ...",
        epilog="\n".join(
            ["commands:", *lines, "", "`outrider COMMAND --help` tells more about each."]
        ),
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), help=SUPPRESS)
    return parser
