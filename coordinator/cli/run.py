"""``outrider run``: this node's workers, launched like torchrun launches them.

With ``--standalone`` the coordinator is in the same process and the job is this one machine.
"""

import argparse
import asyncio
import logging
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import msgspec

from coordinator.cli.arguments import (
    DEFAULT_PORT,
    add_target,
    given_name,
    port,
    read_tokens,
    target,
)
from coordinator.cli.client import Client
from coordinator.cli.coordinator import (
    add_job,
    add_state_dir,
    job_settings,
    node_count,
    worded,
)
from coordinator.cli.errors import TERMINATED, UNREACHABLE, UserError
from coordinator.cli.log_lines import start_logging
from coordinator.cli.signals import leave_politely
from sidecar.names import shown
from sidecar.whole_numbers import whole_number

if TYPE_CHECKING:  # the real imports wait until the command line is known to be right
    from sidecar.config import NodeConfig

STANDALONE_JOB: Final = "standalone"
LOG_DIR: Final = ".outrider/logs"
STATE_DIR: Final = "state"
"""In the folder of a run that stands alone: where its journal is kept."""
RETRY_S_MIN: Final = 0.2
RETRY_S_MAX: Final = 5.0
"""Bounds of the back-off while the coordinator cannot be asked for its job's name."""
SAY_AGAIN_S_MIN: Final = 5.0
"""A wait for the coordinator is told of at once, after this long, and then each time it doubled."""
NOT_NEEDED: Final = (
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts"),
    *("--node-rank", "--master-addr", "--master-port", "--local-addr", "--monitor-interval"),
    *("--start-method", "--redirects"),
)
"""torchrun's options whose work the coordinator or the log folder does; taken and not used."""
OPTION_OF_FIELD: Final = {
    "nodeName": "--node-name",
    "nprocPerNode": "--nproc-per-node",
    "coordinator": "--coordinator",
    "host": "--host",
    "httpHost": "--http-host",
    "labels": "--label",
    "warmModules": "--warm-module",
    "logDir": "--log-dir",
    "runDir": "--run-dir",
    "kernelLog": "--kernel-log",
    "logRules": "--log-rules",
    "tokenFile": "--token-file",
    "tls": "--tls",
    "metricsListen": "--metrics-listen",
    "job": "--job",
    "tee": "--tee",
}

log = logging.getLogger("outrider.run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider run``."""
    parser.usage = "outrider run [options] [--] SCRIPT [ARGUMENT ...]"
    parser.add_argument(
        "--standalone",
        action="store_true",
        help="this machine is the whole job: serve the coordinator too, and end with the job",
    )
    add_job(parser)
    _add_node(parser)
    _add_places(parser)
    for name in NOT_NEEDED:
        spellings = {name, name.replace("-", "_").replace("__", "--", 1)}
        parser.add_argument(*sorted(spellings), dest="not_needed", action=_Noted, metavar="X")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "--no-python", "--no_python", action="store_true", help="SCRIPT is a program by itself"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the training script")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="its own")


def _add_node(parser: argparse.ArgumentParser) -> None:
    node = parser.add_argument_group("this node")
    add_target(parser)
    node.add_argument("--node-name", metavar="NAME", help="its name (default: the host's)")
    node.add_argument(
        "--host", metavar="ADDR", help="where other nodes reach it (default: the host's name)"
    )
    node.add_argument("--spare", action="store_true", help="stand by for a node that fails")
    node.add_argument(
        "--label",
        metavar="KEY=VALUE",
        action="append",
        type=_pair,
        default=[],
        help="where it stands, such as rack=7 (may be repeated)",
    )
    node.add_argument(
        "--gpu",
        metavar="INDEX=PCI",
        action="append",
        type=_gpu,
        default=[],
        help="PCI address of a device, where NVML cannot tell (may be repeated)",
    )
    node.add_argument(
        "--kernel-log",
        type=given_name,
        metavar="FILE",
        help="kernel log to follow instead of /dev/kmsg",
    )
    node.add_argument(
        "--log-rules",
        type=given_name,
        metavar="FILE",
        help="log rules of this node beside the job's; read again when the file is edited",
    )
    node.add_argument(
        "--http-host", default="127.0.0.1", metavar="ADDR", help="where its own API listens"
    )
    node.add_argument(
        "--http-port",
        type=port,
        default=0,
        metavar="PORT",
        help="port of its own API (default: any free one)",
    )
    node.add_argument(
        "--no-warm-workers",
        action="store_true",
        help="start workers cold: keep no process that has imported torch for them (0.3 GiB)",
    )
    node.add_argument(
        "--warm-module",
        metavar="MODULE",
        action="append",
        help="what to import for warm workers, instead of torch's modules (may be repeated)",
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    places = parser.add_argument_group("places")
    places.add_argument(
        "--log-dir",
        metavar="DIR",
        type=given_name,
        default=LOG_DIR,
        help=f"each run's output goes to a new folder in DIR/JOB/NODE (default: {LOG_DIR})",
    )
    places.add_argument(
        *("-t", "--tee"),
        metavar="WHAT",
        default="0",
        help="show on this terminal too, each line behind `[rank N]`: 1 stdout, 2 stderr, 3 both,"
        " or by local rank, as in 0:3,1:2",
    )
    places.add_argument(
        "--run-dir",
        type=given_name,
        metavar="DIR",
        help="folder of the workers' socket (default: a private one)",
    )
    places.add_argument(
        "--metrics-listen",
        metavar="HOST:PORT",
        help="tell the node's numbers, and no more, at this address too, to anybody",
    )
    add_state_dir(places, "with --standalone, `state` in the run's folder")


def run(args: argparse.Namespace) -> int:
    """Launch this node's workers and stay until the job ends."""
    start_logging(verbose=args.verbose)
    if args.not_needed:
        log.info("not needed here and not used: %s", ", ".join(args.not_needed))
    if args.script is None:
        raise UserError("no training script given; put it, with its arguments, after `--`")
    leave_politely()  # until the sidecar handles it
    with ExitStack() as stack:
        if args.run_dir is None:
            private = tempfile.TemporaryDirectory(prefix="outrider-", ignore_cleanup_errors=True)
            args.run_dir = stack.enter_context(private)
        return _standalone(args) if args.standalone else _join(args)


def _join(args: argparse.Namespace) -> int:
    """Run the sidecar of one node of a coordinator's job."""
    if args.nnodes is not None:
        node_count(args.nnodes)
    check_node(args, job=args.job or STANDALONE_JOB, url=target(args))  # before any waiting
    client = Client.of(args)
    if args.job_spec is not None:
        settings = job_settings(args)
        args.job, args.nproc_per_node = settings.job, settings.nproc_per_node
    if args.job is None or args.nproc_per_node is None:
        job, nproc = _ask_job(client)
        args.job, args.nproc_per_node = args.job or job, args.nproc_per_node or nproc
    config = check_node(args, job=args.job, url=client.url)

    from coordinator.cli.process import run_until_signal  # noqa: PLC0415 - see the module's head
    from coordinator.cli.sidecar import worded_sidecar  # noqa: PLC0415

    return run_until_signal(lambda stop: worded_sidecar(config, stop), sigterm=TERMINATED)


def _standalone(args: argparse.Namespace) -> int:
    """Run coordinator and sidecar of a job of one node."""
    if args.job_spec is None:
        args.nnodes = args.nnodes or "1"
    settings = job_settings(args, default_name=STANDALONE_JOB)
    if settings.nnodes != 1:
        raise UserError(
            f"--standalone is one node, not {settings.nnodes}; raise --nproc-per-node, or start"
            " `outrider coordinator` and one `outrider run --coordinator URL` per node"
        )
    if args.tls is not None:
        raise UserError("--standalone stays on this machine and speaks no TLS; leave out --tls")
    own = ("outrider-standalone", secrets.token_hex(8))
    args.label.append(own)
    args.nproc_per_node = settings.nproc_per_node
    args.host = "127.0.0.1" if args.host is None else args.host
    node = check_node(args, job=settings.job, url=target(args))
    tokens = read_tokens(args.token_file)

    from coordinator.cli.process import run_until_signal  # noqa: PLC0415 - see the module's head
    from coordinator.cli.run_summary import say_what_happened  # noqa: PLC0415
    from coordinator.cli.sidecar import worded_sidecar  # noqa: PLC0415
    from coordinator.daemon import CoordinatorConfig  # noqa: PLC0415
    from coordinator.listening import Door  # noqa: PLC0415
    from coordinator.standalone import run_standalone  # noqa: PLC0415
    from sidecar.daemon import SidecarError, prepare  # noqa: PLC0415

    try:
        output = prepare(node)
    except SidecarError as error:
        raise UserError(str(error)) from error
    state_dir = args.state_dir or output / STATE_DIR
    coordinator = CoordinatorConfig(
        settings=settings,
        state_dir=state_dir,
        door=Door(port=_usual_port(), tokens=tokens),
        linger_s=0.0,
        refuse_ended=True,
        admit_label=own,
        after_stop="its workers have ended with it",
    )

    def sidecar(url: str, stop: asyncio.Event) -> Coroutine[Any, Any, int]:
        return worded_sidecar(check_node(args, job=settings.job, url=url), stop, output)

    def main(stop: asyncio.Event) -> Coroutine[Any, Any, int]:
        return worded(run_standalone(coordinator, sidecar, stop))

    status = run_until_signal(main, sigterm=TERMINATED)
    say_what_happened(state_dir)
    return status


def check_node(args: argparse.Namespace, *, job: str, url: str) -> "NodeConfig":
    """Return this node's configuration.  Raises `UserError`."""
    from sidecar.config import (  # noqa: PLC0415 - see the module's head
        ConfigError,
        GpuAddress,
        NodeConfig,
        check_node_config,
    )

    name = socket.gethostname() if args.node_name is None else args.node_name
    config = NodeConfig(
        node_name=name,
        job=job,
        coordinator=url,
        command=(args.script, *args.arguments),
        host=socket.gethostname() if args.host is None else args.host,
        http_host=args.http_host,
        http_port=args.http_port,
        nproc_per_node=args.nproc_per_node or 1,
        spare=args.spare,
        labels=dict(args.label),
        log_dir=args.log_dir,
        run_dir=str(args.run_dir),
        kernel_log=args.kernel_log,
        log_rules=args.log_rules,
        gpus=tuple(GpuAddress(index=index, pci=pci) for index, pci in args.gpu),
        token_file=None if args.token_file is None else str(args.token_file),
        tls=None if args.tls is None else str(args.tls),
        metrics_listen=args.metrics_listen,
        module=args.module,
        no_python=args.no_python,
        warm_workers=not args.no_warm_workers,
        tee=args.tee,
    )
    if args.warm_module:
        config = msgspec.structs.replace(config, warm_modules=tuple(args.warm_module))
    try:
        check_node_config(config)
    except ConfigError as error:
        raise UserError(as_option(str(error))) from error
    return config


def as_option(text: str) -> str:
    """Return a complaint about a field as one about the option that sets it."""
    field, colon, reason = text.partition(": ")
    if not colon:
        return text
    name = re.sub(r"\[.*", "", field)
    if name == "command":
        return reason
    option = "--gpu" if name == "gpus" else OPTION_OF_FIELD.get(name)
    return text if option is None else f"{option}: {reason}"


def _ask_job(client: Client) -> tuple[str, int]:
    """Return the coordinator's job and its workers a node, however long that takes."""
    pause_s, began = RETRY_S_MIN, time.monotonic()
    say_again_s = 0.0
    while True:
        try:
            job = client.get("v1", "job")
            return str(job["job"]), int(job["nproc_per_node"])
        except UserError as error:
            if error.exit_code != UNREACHABLE:
                raise
            waited_s = time.monotonic() - began
            if waited_s >= say_again_s:
                log.warning("%s; retrying (for %.0f s so far)", error, waited_s)
                say_again_s = max(SAY_AGAIN_S_MIN, 2 * waited_s)
        time.sleep(pause_s)
        pause_s = min(RETRY_S_MAX, pause_s * 2)


def _usual_port() -> int:
    """Return the port that `outrider status` asks by itself, or 0 where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError:
            return 0
    return DEFAULT_PORT


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not KEY=VALUE")
    return key, value


def _gpu(text: str) -> tuple[int, str]:
    name, equals, pci = text.partition("=")
    index = whole_number(name)
    if not equals or index is None or not pci:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not INDEX=PCI, such as 0=0000:3b:00.0")
    return index, pci


class _Noted(argparse.Action):
    """Remember that an option was given, and drop its value."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(
            option_strings, dest, default=[], help=argparse.SUPPRESS, metavar=options["metavar"]
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Note the option."""
        del parser, values
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), option_string])
