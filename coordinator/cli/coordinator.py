"""``outrider coordinator``: serves one job until it ends."""

import argparse
import asyncio
import logging
import os
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coordinator.cli.arguments import (
    DEFAULT_PORT,
    add_access,
    address,
    given_path,
    port,
    read_tokens,
    seconds,
    workers,
)
from coordinator.cli.errors import UserError
from coordinator.cli.log_lines import start_logging
from sidecar.names import shown

if TYPE_CHECKING:  # the real imports wait until the command line is known to be right
    from coordinator.settings import JobSettings

log = logging.getLogger("outrider.coordinator")

LINGER_DEFAULT_S: Final = 60.0
"""Some scrapes of Prometheus."""
FOR_EVER_S: Final = 10 * 365 * 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider coordinator``."""
    add_job(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=port,
        default=DEFAULT_PORT,
        help=f"port to listen on, 0 for any free one (default: {DEFAULT_PORT})",
    )
    add_state_dir(parser, "~/.local/state/outrider/JOB")
    add_access(parser)
    parser.add_argument(
        "--metrics-listen",
        metavar="HOST:PORT",
        type=address,
        help="tell numbers, and no more, at a second address too, without asking for anything",
    )
    parser.add_argument(
        "--allow-insecure-bind",
        action="store_true",
        help="listen beyond this machine although nobody is asked for anything",
    )
    parser.add_argument(
        "--linger",
        type=seconds,
        metavar="SECONDS",
        help="how long the ended job can still be looked at and scraped (default: the job spec's "
        "ttlSecondsAfterFinished, or 60)",
    )
    parser.add_argument(
        "--offenders",
        type=given_path,
        metavar="FILE",
        help="where all jobs remember which nodes broke (default: offenders.sqlite in --state-dir, "
        "or beside the jobs' own where that is not given)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add which job it is: a file, or the three numbers that a plain one needs."""
    job = parser.add_argument_group("the job")
    job.add_argument("--job-spec", type=given_path, metavar="FILE", help="the job as YAML")
    job.add_argument("--job", metavar="NAME", help="the job's name, where there is no file")
    job.add_argument(
        "--nnodes",
        metavar="N[:MAX]",
        help="nodes that hold ranks; those that join beyond N stand by as spares",
    )
    job.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=workers,
        metavar="K",
        help="workers of a node (default: 1)",
    )


def add_state_dir(parser: argparse._ActionsContainer, default: str) -> None:
    """Add where the journal is kept; ``default`` says where that is unless told otherwise."""
    parser.add_argument(
        "--state-dir",
        type=given_path,
        metavar="DIR",
        help=f"where the journal is kept (default: {default})",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the job."""
    start_logging(verbose=args.verbose)
    settings = job_settings(args)
    tokens = read_tokens(args.token_file)

    from coordinator.cli.process import run_until_signal  # noqa: PLC0415 - see the module's head
    from coordinator.daemon import CoordinatorConfig, run_coordinator  # noqa: PLC0415
    from coordinator.listening import Door  # noqa: PLC0415

    config = CoordinatorConfig(
        settings=settings,
        state_dir=args.state_dir or default_state_dir(settings.job),
        door=Door(
            host=args.host,
            port=args.port,
            tokens=tokens,
            certificates=args.tls,
            allow_insecure_bind=args.allow_insecure_bind,
            scrapes=args.metrics_listen,
        ),
        offenders=args.offenders or _offenders_file(args.state_dir),
        linger_s=_linger(args.linger, settings.ttl_s),
    )

    def main(stop: asyncio.Event) -> Coroutine[Any, Any, int]:
        return worded(run_coordinator(config, stop))

    return run_until_signal(main, sigterm=0)


def _offenders_file(state_dir: Path | None) -> Path:
    from coordinator.offender_store import STORE_NAME  # noqa: PLC0415 - see the module's head

    return (state_dir or default_state_dir("any").parent) / STORE_NAME


def _linger(given: float | None, ttl_s: float | None) -> float:
    """Return how long the ended job can still be looked at; -1 in the spec is for ever."""
    if given is not None:
        return given
    if ttl_s is None:
        return LINGER_DEFAULT_S
    return FOR_EVER_S if ttl_s < 0 else ttl_s


async def worded(work: Coroutine[Any, Any, int]) -> int:
    """Await a coordinator, and turn what its owner can mend into a `UserError`."""
    from coordinator.journal_format import JournalError  # noqa: PLC0415
    from coordinator.listening import CoordinatorError  # noqa: PLC0415 - loaded by the caller

    try:
        return await work
    except (CoordinatorError, JournalError) as error:
        raise UserError(str(error)) from error


def default_state_dir(job: str) -> Path:
    """Return where a job's journal is kept unless told otherwise."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    except RuntimeError as error:  # no $HOME, and a user that the system does not know
        raise UserError(
            "there is no home folder to keep the journal in; give --state-dir"
        ) from error
    return Path(base) / "outrider" / job


def job_settings(args: argparse.Namespace, *, default_name: str | None = None) -> "JobSettings":
    """Return the settings that the command line asks for.  Raises `UserError`."""
    from coordinator.spec import JobSpec, load_job_spec  # noqa: PLC0415
    from coordinator.spec_errors import SpecError, convert  # noqa: PLC0415

    nnodes = None if args.nnodes is None else node_count(args.nnodes)
    name = args.job or default_name
    try:
        if args.job_spec is not None:
            spec: JobSpec = load_job_spec(args.job_spec)
            for given, known, option in (
                (args.job, spec.name, "--job"),
                (nnodes, spec.nnodes, "--nnodes"),
            ):
                if given not in (None, known):
                    raise UserError(f"{option} says {given}, {args.job_spec} says {known}")
        elif name is None or nnodes is None:
            raise UserError("which job? give --job-spec FILE, or --job NAME and --nnodes N")
        else:
            group = {"name": "nodes", "replicas": nnodes}
            plain = {"name": name, "replicaSpecs": [group]}
            spec = convert(plain, JobSpec, "the command line")
    except SpecError as error:
        raise UserError(str(error)) from error
    for sentence in spec.remarks() if args.job_spec is not None else ():
        log.warning("%s: %s", args.job_spec, sentence)
    return spec.settings(args.nproc_per_node)


def node_count(text: str) -> int:
    """Return N of ``N`` or ``N:MAX``.  Raises `UserError`."""
    least, colon, most = text.partition(":")
    numbers = [least, *([most] if colon else [])]
    if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers) or int(least) < 1:
        raise UserError(f"--nnodes {shown(text)} is neither N nor N:MAX")
    if colon and int(most) < int(least):
        raise UserError(f"--nnodes {shown(text)}: MAX is smaller than N")
    return int(least)
