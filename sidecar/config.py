"""What a node is told about itself: the file behind ``outrider sidecar --config``.

Decides whether the configuration can be used; every refusal names the file, the field and the
reason.  It opens no socket and starts nothing.
"""

import re
import socket
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
import yaml

from sidecar.hardware.catalogue import CODE_MAX, XidOverride, shipped
from sidecar.hardware.node_file import HealthSection, HealthSectionError
from sidecar.hardware.pci import normalise_pci
from sidecar.workers.command import CommandError, WorkerCommand
from sidecar.workers.ipc_server import SocketPathError, check_socket_path
from sidecar.workers.warm_pool import DEFAULT_MODULES

NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Job and node names become folder names and metric labels."""
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
    ``runDir`` holds the workers' socket. ``kernelLog`` is a file to follow instead of
    ``/dev/kmsg``; ``gpus`` names devices where NVML cannot; ``xids`` replaces severity or
    action of a code in the shipped catalogue; ``health`` holds limits of the hardware's
    judgement and further sources of it. ``tokenFile`` holds the bearer token that guards the
    API and is shown to the coordinator. ``warmWorkers`` keeps a process that has imported
    ``warmModules`` (torch's own by default), from which a restart forks its workers.
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
    kernel_log: str | None = None
    gpus: tuple[GpuAddress, ...] = ()
    xids: dict[Annotated[int, msgspec.Meta(ge=1, le=CODE_MAX)], XidOverride] = {}
    health: HealthSection = HealthSection()
    token_file: str | None = None
    module: bool = False
    no_python: bool = False
    warm_workers: bool = True
    warm_modules: tuple[str, ...] = DEFAULT_MODULES

    def worker_command(self) -> WorkerCommand:
        """Return the command of this node's workers."""
        return WorkerCommand(argv=self.command, module=self.module, no_python=self.no_python)

    def socket_path(self) -> Path:
        """Return where the workers' socket stands."""
        return Path(self.run_dir).absolute() / SOCKET_NAME


class _Loader(yaml.SafeLoader):
    """YAML's plain types, without texts that no file and no message could hold."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Build a text, or raise a marked error."""
        value: Any = super().construct_scalar(node)
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            reason = "an escape here is half of a character"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
        return value


def load_node_config(path: Path) -> NodeConfig:
    """Read and check ``path``.  Raises `ConfigError` naming file, field and reason."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(text) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {CONFIG_BYTES_MAX} bytes, not a node's file")
    try:
        body = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: must be a mapping of fields, such as `nodeName: node-0`")
    try:
        config = msgspec.convert(body, NodeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_worded(str(error))}") from None
    try:
        check_node_config(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def check_node_config(config: NodeConfig) -> None:
    """Check what types cannot say, before anything starts.  Raises `ConfigError`."""
    _check_names(config)
    _check_coordinator(config.coordinator)
    _check_gpus(config.gpus)
    try:
        check_socket_path(config.socket_path())
    except SocketPathError as error:
        raise ConfigError(f"runDir: {error}") from None
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
    token = read_token(config)
    if token is None and config.http_host not in (LOOPBACK, "localhost", "::1"):
        raise ConfigError(
            f"httpHost: {config.http_host} can be reached from other machines, where anybody "
            f"could stop the workers; give a tokenFile, or use {LOOPBACK}"
        )


def read_token(config: NodeConfig) -> str | None:
    """Return the bearer token, None when no file is configured.  Raises `ConfigError`."""
    if config.token_file is None:
        return None
    try:
        token = Path(config.token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(f"tokenFile: {config.token_file}: {reason}") from None
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"tokenFile: {config.token_file} must hold one token and nothing else")
    return token


def _check_names(config: NodeConfig) -> None:
    for field, name in (("nodeName", config.node_name), ("job", config.job)):
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{field}: {name!r} is not a name; use up to 63 letters, digits, `.`, `_`, `-`, "
                "with a letter or digit at both ends"
            )


def _check_coordinator(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https", "ws", "wss") and bool(parts.hostname)
        usable = usable and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"coordinator: {url!r} is not a URL such as http://host:8081")


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


_AT: Final = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<field>[^`]*)`)?", re.DOTALL)


def _worded(text: str) -> str:
    """Turn msgspec's `reason - at `$.field`` into `field: reason`."""
    match = _AT.fullmatch(text)
    assert match is not None, "the pattern matches any text"
    field, reason = match["field"], match["reason"]
    known = ", ".join(sorted(NodeConfig.__struct_encode_fields__))
    if "unknown field" in reason and not field:
        reason = f"{reason}; known fields: {known}"
    return f"{field}: {reason}" if field else reason
