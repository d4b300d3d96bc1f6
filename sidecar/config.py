"""What a node is told about itself: the file behind ``outrider sidecar --config``.

Decides whether the configuration can be used; every refusal names the file, the field and the
reason.  It opens no socket and starts nothing.
"""

import socket
from pathlib import Path
from typing import Annotated, Final

import msgspec

from sidecar.access import Access, AccessError
from sidecar.field_errors import explained
from sidecar.folders import folder_problem
from sidecar.given_files import GivenFileError, read_given_text
from sidecar.hardware.catalogue import CODE_MAX, XidOverride, shipped
from sidecar.hardware.node_file import HealthSection, HealthSectionError
from sidecar.hardware.pci import normalise_pci
from sidecar.logs.rules_file import RulesFileError, read_rules_file
from sidecar.names import host_problem, labels_problem, name_problem, shown, url_problem
from sidecar.strict_yaml import YamlError, load_yaml
from sidecar.web_pages import is_loopback
from sidecar.workers.command import CommandError, WorkerCommand
from sidecar.workers.ipc_server import SocketPathError, check_socket_path
from sidecar.workers.tee import read_tee
from sidecar.workers.warm_pool import DEFAULT_MODULES

LOOPBACK: Final = "127.0.0.1"
SOCKET_NAME: Final = "worker.sock"
CONFIG_BYTES_MAX: Final = 1 << 20

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1023)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class ConfigError(ValueError):
    """The configuration cannot be used; the text is one line for a person."""


class GpuAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which physical device sits at which PCI address."""

    index: Index
    pci: str


class NodeConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """One node's sidecar.

    ``coordinator`` is the URL to dial.  ``host`` is the address other nodes reach this one at;
    ``httpHost`` and ``httpPort`` (0: any free one) are where the node's own API listens.
    ``runDir`` holds the workers' socket.  ``resourceConfigDir`` is where
    ``pod_resourceconfig.json`` is kept, for scripts that read it.  ``kernelLog`` is a file to
    follow instead of ``/dev/kmsg``; ``gpus`` names devices where NVML cannot; ``xids`` replaces
    severity or action of a code in the shipped catalogue; ``health`` holds limits of the hardware's
    judgement and further sources of it. ``logRules`` is a file of log rules beside the job's,
    read again when it is edited; where both have a name, the node's rule holds. ``tokenFile``
    holds the bearer token that guards the API and is shown to the coordinator. ``tls`` is a folder
    of certificates as `outrider certs` writes them: the coordinator is dialled, and the API
    served, with them. ``metricsListen`` (HOST:PORT) is a second address that tells numbers only,
    to anybody. ``warmWorkers``
    keeps a process that has imported ``warmModules`` (torch's own by default), from which a
    restart forks its workers.
    """

    node_name: str
    job: str
    coordinator: str
    command: tuple[str, ...]
    host: str = msgspec.field(default_factory=socket.gethostname)
    http_host: str = LOOPBACK
    http_port: Port = 0
    nproc_per_node: Count = 1
    spare: bool = False
    labels: dict[str, str] = {}
    log_dir: str = ".outrider/logs"
    run_dir: str = ".outrider/run"
    resource_config_dir: str | None = None
    kernel_log: str | None = None
    gpus: tuple[GpuAddress, ...] = ()
    xids: dict[Annotated[int, msgspec.Meta(ge=1, le=CODE_MAX)], XidOverride] = {}
    health: HealthSection = HealthSection()
    log_rules: str | None = None
    token_file: str | None = None
    tls: str | None = None
    metrics_listen: str | None = None
    module: bool = False
    no_python: bool = False
    warm_workers: bool = True
    warm_modules: tuple[str, ...] = DEFAULT_MODULES
    tee: str = "0"

    def worker_command(self) -> WorkerCommand:
        """Return the command of this node's workers."""
        return WorkerCommand(argv=self.command, module=self.module, no_python=self.no_python)

    def scrapes(self) -> tuple[str, int] | None:
        """Return the host and port that ``metricsListen`` names."""
        if self.metrics_listen is None:
            return None
        host, _, port = self.metrics_listen.rpartition(":")
        return host.strip("[]"), int(port)

    def socket_path(self) -> Path:
        """Return where the workers' socket stands."""
        return Path(self.run_dir).absolute() / SOCKET_NAME


def load_node_config(path: Path) -> NodeConfig:
    """Read and check ``path``.  Raises `ConfigError` naming file, field and reason."""
    try:
        body = load_yaml(read_given_text(path, CONFIG_BYTES_MAX))
    except GivenFileError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except YamlError as error:
        raise ConfigError(f"{path}: not YAML for a node: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: must be a mapping of fields, such as `nodeName: node-0`")
    try:
        config = msgspec.convert(body, NodeConfig)
    except msgspec.ValidationError as error:
        field, reason = explained(str(error), body, NodeConfig)
        raise ConfigError(f"{path}: {field}: {reason}" if field else f"{path}: {reason}") from None
    try:
        check_node_config(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def check_node_config(config: NodeConfig) -> None:
    """Check what types cannot say, before anything starts.  Raises `ConfigError`."""
    _check_names(config)
    _check_texts(config)
    _check_gpus(config.gpus)
    try:
        check_socket_path(config.socket_path())
    except SocketPathError as error:
        raise ConfigError(f"runDir: {error}") from None
    try:
        _check_folders(config)
    except FileNotFoundError:
        raise ConfigError(
            "the folder that this was started in does not exist any more; change to one that does"
        ) from None
    try:
        config.worker_command().resolve()
    except CommandError as error:
        raise ConfigError(f"command: {error}") from None
    try:
        config.health.config(shipped().with_overrides(config.xids).fatal_codes())
        config.health.sources()
    except HealthSectionError as error:
        raise ConfigError(f"health.{error}") from None
    if config.kernel_log is not None and Path(config.kernel_log).is_dir():
        raise ConfigError(f"kernelLog: {config.kernel_log} is a directory, not a log file")
    if config.log_rules is not None:
        try:
            read_rules_file(Path(config.log_rules))
        except RulesFileError as error:
            raise ConfigError(f"logRules: {error}") from None
    try:
        read_tee(config.tee)
    except ValueError as error:
        raise ConfigError(f"tee: {error}") from None
    _check_access(config)


def read_access(config: NodeConfig) -> Access:
    """Return what the node shows and asks for.  Raises `ConfigError`."""
    try:
        return Access.read(config.token_file, config.tls)
    except AccessError as error:
        raise ConfigError(str(error)) from None


def _check_access(config: NodeConfig) -> None:
    access = read_access(config)
    if not access.asked and not is_loopback(config.http_host):
        raise ConfigError(
            f"httpHost: {config.http_host} can be reached from other machines, where anybody "
            f"could stop the workers; give tls or a tokenFile, or use {LOOPBACK}"
        )
    if config.tls is not None and not config.coordinator.startswith(("https:", "wss:")):
        raise ConfigError(
            f"coordinator: {shown(config.coordinator)} would be asked without TLS, and tls is "
            "given; write https://"
        )
    if config.metrics_listen is not None:
        host, _, port = config.metrics_listen.rpartition(":")
        digits = port.isascii() and port.isdigit() and len(port) <= 5  # noqa: PLR2004 - 65535
        if host_problem(host) is not None or not digits or int(port) > 65_535:  # noqa: PLR2004
            raise ConfigError(
                f"metricsListen: {shown(config.metrics_listen)} is not HOST:PORT, such as"
                " 10.0.0.7:9400"
            )


def _check_names(config: NodeConfig) -> None:
    problems = {
        "nodeName": name_problem(config.node_name),
        "job": name_problem(config.job),
        "coordinator": url_problem(config.coordinator, ("http", "https", "ws", "wss")),
        "host": host_problem(config.host),
        "httpHost": host_problem(config.http_host),
        "labels": labels_problem(config.labels),
    }
    for field, reason in problems.items():
        if reason is not None:
            raise ConfigError(f"{field}: {reason}")


def _check_texts(config: NodeConfig) -> None:
    """Refuse what no path and no argument can hold: the system ends them at a zero byte."""
    texts = {
        **{f"command[{index}]": text for index, text in enumerate(config.command)},
        **{f"warmModules[{index}]": text for index, text in enumerate(config.warm_modules)},
        "logDir": config.log_dir,
        "runDir": config.run_dir,
        "kernelLog": config.kernel_log or "",
        "tokenFile": config.token_file or "",
        "tls": config.tls or "",
    }
    for field, text in texts.items():
        if "\0" in text:
            raise ConfigError(f"{field}: {shown(text)} holds a zero byte, which ends a text")


def _check_folders(config: NodeConfig) -> None:
    """Check, without making them, that the node's folders can be made and written."""
    log_folder = Path(config.log_dir).absolute() / config.job / config.node_name
    for field, folder in (("runDir", Path(config.run_dir).absolute()), ("logDir", log_folder)):
        reason = folder_problem(folder)
        if reason is not None:
            raise ConfigError(f"{field}: {reason}; name a folder that can be written")


def _check_gpus(gpus: tuple[GpuAddress, ...]) -> None:
    seen: dict[str, int] = {}
    for position, gpu in enumerate(gpus):
        address = normalise_pci(gpu.pci)
        if address is None:
            raise ConfigError(
                f"gpus[{position}].pci: {gpu.pci!r} is not a PCI address such as 0000:3b:00"
            )
        if address in seen:
            raise ConfigError(f"gpus[{position}].pci: {gpu.pci} is that of GPU {seen[address]}")
        if gpu.index in seen.values():
            raise ConfigError(f"gpus[{position}].index: {gpu.index} stands there twice")
        seen[address] = gpu.index
