"""``outrider demo``: break a small training run in turn, and show who was named for it."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Final

from coordinator.cli.arguments import given_path
from coordinator.cli.errors import UserError
from coordinator.cli.signals import leave_politely

SCRIPT: Final = Path(__file__).resolve().parents[2] / "examples" / "pytorch_ddp" / "train.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider demo``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--list", action="store_true", help="list the scenarios and end")
    which.add_argument(
        "--only", metavar="NAME", action="append", help="run this scenario (may be repeated)"
    )
    which.add_argument("--all", action="store_true", help="run every scenario there is")
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=given_path,
        help="keep logs, journal and checkpoints in a new DIR",
    )
    parser.add_argument(
        "--script",
        type=given_path,
        default=SCRIPT,
        help="the training script (default: the example's)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    from coordinator.demo.scenarios import SCENARIOS  # noqa: PLC0415 - `--help` stays quick

    if args.list:
        for scenario in SCENARIOS:
            mark = "" if scenario.default else " (with --all)"
            sys.stdout.write(f"{scenario.name:<18} {scenario.summary}{mark}\n")
        return 0
    known = {scenario.name: scenario for scenario in SCENARIOS}
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        raise UserError(f"no scenario {unknown[0]!r}; there are {', '.join(known)}")
    if not args.script.is_file():
        raise UserError(
            f"no training script at {args.script}; run the demo from a source checkout, or give "
            "--script"
        )
    if importlib.util.find_spec("torch") is None:
        raise UserError("the demo trains with torch, which is not installed; `make demo` does that")
    if args.keep is not None and args.keep.exists():
        raise UserError(f"--keep {args.keep} exists already; name a new folder")

    from coordinator.demo.run import run_demo  # noqa: PLC0415

    leave_politely()

    chosen = [known[name] for name in args.only] if args.only else list(SCENARIOS)
    if not args.only and not args.all:
        chosen = [scenario for scenario in chosen if scenario.default]
    return run_demo(args.script.resolve(), chosen, args.keep)
