"""``outrider sidecar``: this node's workers, launched as a file says."""

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.cli.arguments import given_path
from coordinator.cli.errors import TERMINATED, UserError
from coordinator.cli.log_lines import start_logging

if TYPE_CHECKING:  # the real imports wait until the command line is known to be right
    from sidecar.config import NodeConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider sidecar``."""
    parser.add_argument(
        "--config", type=given_path, required=True, metavar="FILE", help="this node as YAML"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")


def run(args: argparse.Namespace) -> int:
    """Launch this node's workers and stay until the job ends."""
    start_logging(verbose=args.verbose)

    from coordinator.cli.process import run_until_signal  # noqa: PLC0415 - `--help` stays quick
    from sidecar.config import ConfigError, load_node_config  # noqa: PLC0415

    try:
        config = load_node_config(args.config)
    except ConfigError as error:
        raise UserError(str(error)) from error
    return run_until_signal(lambda stop: worded_sidecar(config, stop), sigterm=TERMINATED)


async def worded_sidecar(
    config: "NodeConfig", stop: asyncio.Event, output: Path | None = None
) -> int:
    """Run a sidecar, and turn what its owner can mend into a `UserError`."""
    from sidecar.config import ConfigError  # noqa: PLC0415 - as above
    from sidecar.daemon import SidecarError, run_sidecar  # noqa: PLC0415 - as above

    try:
        return await run_sidecar(config, stop, sole_parent=True, output=output)
    except (ConfigError, SidecarError) as error:
        raise UserError(str(error)) from error
