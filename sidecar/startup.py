"""What a sidecar is made from: its configuration turned into what each part is told once."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

from sidecar.agent_config import AgentConfig
from sidecar.api import PROTOCOL_VERSION, Hello
from sidecar.api_server import ApiServer
from sidecar.config import NodeConfig, check_node_config
from sidecar.drive import monotonic
from sidecar.events import HardwareFinding, HardwareRecovered, LogFinding, ProcessNote
from sidecar.file_limit import allow_files
from sidecar.given_files import system_reason
from sidecar.hardware.catalogue import shipped
from sidecar.hardware.kernel_log import KMSG
from sidecar.hardware.node_watch import NodeWatch
from sidecar.hardware.nvml import GpuInventory, list_gpus
from sidecar.logs.rules_file import RulesFile, RulesFileError, read_rules_file
from sidecar.logs.tail import POSITIONS_NAME, LogWatcher
from sidecar.workers.files import new_run_folder
from sidecar.workers.launch import LaunchSettings
from sidecar.workers.marks import SidecarMark
from sidecar.workers.tee import read_tee

CURSOR_NAME: Final = "kernel-log.json"
FILES_PER_WORKER: Final = 12
"""Files held open for each worker: process, outputs, page, connections, a look at its stacks."""


log = logging.getLogger("outrider.sidecar")


class SidecarError(Exception):
    """The sidecar cannot start; the text says why and what to do."""


def prepare(config: NodeConfig) -> Path:
    """Check what a node needs, and make and return the folder of this run's output.

    What is refused here would fail every start instead, and cost the job its restarts.  Raises
    `sidecar.config.ConfigError` or `SidecarError`.
    """
    check_node_config(config)
    reason = allow_files(FILES_PER_WORKER * config.nproc_per_node)
    if reason is not None:
        raise SidecarError(reason)
    folder = Path(config.log_dir).absolute() / config.job / config.node_name
    try:
        output = new_run_folder(folder)
    except OSError as error:
        raise SidecarError(
            f"the workers' output cannot be kept in {folder}: {system_reason(error)}; "
            "choose another logDir (--log-dir)"
        ) from None
    log.info("the workers' output goes to %s", output)
    return output


async def known_gpus() -> GpuInventory:
    """Return the node's devices; what cannot be known of them is said."""
    inventory = await asyncio.to_thread(list_gpus)
    if inventory.reason:
        log.info("GPUs are not known from NVML: %s", inventory.reason)
    return inventory


def agent_version() -> str:
    """Return the installed distribution's version, or ``unknown`` in a bare source tree."""
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:
        return "unknown"


def agent_config(config: NodeConfig, incarnation: str) -> AgentConfig:
    """Return what the core is told."""
    return AgentConfig(
        job=config.job,
        node=config.node_name,
        incarnation=incarnation,
        nproc_per_node=config.nproc_per_node,
    )


def introduction(
    config: NodeConfig, incarnation: str, http_port: int, inventory: GpuInventory
) -> Hello:
    """Return how the node presents itself to the coordinator."""
    gpus = {gpu.index for gpu in config.gpus} or {gpu.index for gpu in inventory.gpus}
    return Hello(
        protocol=PROTOCOL_VERSION,
        agent_version=agent_version(),
        job=config.job,
        node=config.node_name,
        incarnation=incarnation,
        host=config.host,
        http_port=http_port,
        nproc_per_node=config.nproc_per_node,
        spare=config.spare,
        labels=config.labels,
        gpus=tuple(sorted(gpus)),
    )


def launch_settings(
    config: NodeConfig, output: Path, mark: SidecarMark, *, sole_parent: bool
) -> LaunchSettings:
    """Return what the launcher is told.  Raises `sidecar.workers.command.CommandError`."""
    return LaunchSettings(
        job=config.job,
        node=config.node_name,
        nproc=config.nproc_per_node,
        command=config.worker_command().resolve(),
        output=output,
        socket_path=str(config.socket_path()),
        inherited={**os.environ, **mark.environment},
        sole_parent=sole_parent,
        tee=read_tee(config.tee),
        resource_config=None
        if config.resource_config_dir is None
        else Path(config.resource_config_dir).absolute(),
    )


async def listen(api: ApiServer, config: NodeConfig) -> int:
    """Serve the node's API, and its numbers, and return the API's port.  Raises `SidecarError`."""
    host, port = config.http_host, config.http_port
    try:
        bound = await api.start(host, port)
    except OSError as error:
        raise cannot_listen(error, host, port) from None
    if (scrapes := config.scrapes()) is not None:
        try:
            await api.start_scrapes(*scrapes)
        except OSError as error:
            where = f"metricsListen {config.metrics_listen}"
            raise SidecarError(
                f"{where}: {os.strerror(error.errno or 0)}; give another address and port"
            ) from None
    return bound


def cannot_listen(error: OSError, host: str, port: int) -> SidecarError:
    """Return why the node's API cannot be served, and what to do about it."""
    if error.errno == errno.EADDRINUSE:
        hint = "choose another httpPort (--http-port), 0 takes any free one"
        return SidecarError(f"port {port} on {host} is in use; {hint}")
    return SidecarError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}")


def cannot_make_socket(error: OSError, path: Path) -> SidecarError:
    """Return why the workers have no socket, and what to do about it."""
    return SidecarError(
        f"the workers' socket {path} cannot be made: {error.strerror or error}; "
        "choose another runDir (--run-dir)"
    )


def node_watch(
    config: NodeConfig,
    inventory: GpuInventory,
    emit: Callable[[HardwareFinding | HardwareRecovered | ProcessNote], None],
    *,
    owner: Callable[[int], int | None],
) -> NodeWatch:
    """Return the watch over the node's hardware; ``owner`` says whose worker a process is."""
    catalogue = shipped().with_overrides(config.xids)
    return NodeWatch(
        inventory,
        KMSG if config.kernel_log is None else Path(config.kernel_log),
        emit,
        gpus={gpu.pci: gpu.index for gpu in config.gpus} or inventory.by_pci(),
        nproc=config.nproc_per_node,
        catalogue=catalogue,
        health=config.health.config(catalogue.fatal_codes()),
        others=config.health.sources(),
        cursor=config.socket_path().with_name(CURSOR_NAME),
        owner=owner,
    )


def log_watch(
    config: NodeConfig, emit: Callable[[LogFinding], None]
) -> tuple[LogWatcher, RulesFile | None]:
    """Return the watch over the workers' output, and that over the node's own file of rules.

    Raises `SidecarError` when that file cannot be used.
    """
    path = None if config.log_rules is None else Path(config.log_rules)
    try:
        rules = () if path is None else read_rules_file(path)
    except RulesFileError as error:
        raise SidecarError(f"logRules: {error}") from None
    logs = LogWatcher(
        emit,
        monotonic,
        config.socket_path().with_name(POSITIONS_NAME),
        node_rules=rules,
    )
    return logs, None if path is None else RulesFile(path, logs.set_node_rules)
