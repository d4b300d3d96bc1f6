"""``outrider wait``: blocks until the job runs or has ended, for scripts."""

import argparse
import sys
import time
from typing import Final

from coordinator.cli.arguments import add_target, seconds
from coordinator.cli.client import Client
from coordinator.cli.errors import TIMED_OUT, UNREACHABLE, UserError
from coordinator.phases import JobPhase
from coordinator.wording import one_line

LOOK_EVERY_S: Final = 0.2
"""Pause between two looks: shorter than a finished coordinator lingers."""
ABSENCE_S: Final = 30.0
"""A coordinator that was there and is not any more may be restarting for this long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider wait``."""
    add_target(parser)
    parser.add_argument(
        "--for",
        dest="goal",
        choices=("running", "ended"),
        default="ended",
        help="what to wait for (default: ended)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help="give up after this long, with exit status 4 (default: never)",
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 when the goal was reached, 1 when the job failed."""
    client = Client.of(args)
    now = time.monotonic()
    deadline = None if args.timeout is None else now + args.timeout
    seen = None
    while True:
        now = time.monotonic()
        try:
            job = client.get("v1", "job")
            seen = now
        except UserError as error:
            lost = seen is None or now - seen > ABSENCE_S
            if error.exit_code != UNREACHABLE or lost:
                raise
        else:
            phase = JobPhase(job["phase"])
            if phase.terminal or (args.goal == "running" and phase is JobPhase.RUNNING):
                reason = one_line(job["outcome_reason"])
                sys.stdout.write(f"{phase}{': ' if reason else ''}{reason}\n")
                return int(phase is JobPhase.FAILED)
        if deadline is not None and now >= deadline:
            raise UserError(f"the job has not {_reached(args.goal)} in time", TIMED_OUT)
        time.sleep(LOOK_EVERY_S)


def _reached(goal: str) -> str:
    return "ended" if goal == "ended" else "started to run"
