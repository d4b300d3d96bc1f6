"""Bodies of the node's HTTP API, in the HyperPod elastic agent's field names.

Decides what a body means as a command, and what a status looks like to such a client.  Every
refusal names the field.  It opens no socket and obeys nothing.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec

from sidecar.api import (
    AgentState,
    CheckpointPointer,
    RankHost,
    Start,
    StatusReport,
    Stop,
    Update,
)
from sidecar.codec import to_plain
from sidecar.field_errors import explained
from sidecar.logs.rules import RuleError, parse_rules
from sidecar.names import shown
from sidecar.rank_table import Incomplete, RankTable, merged
from sidecar.whole_numbers import whole_number
from worker_shim.messages import RestartMode

GRACE_DEFAULT_S: Final = 15.0
"""A graceful stop that names no ``timeout``."""
GRACE_S_MAX: Final = 3600.0
WORKER_DATA_BYTES_MAX: Final = 256 << 10
"""What an operator may tell all workers: it has to fit a worker's frame, with its environment."""
NO_TABLE: Final = RankTable()
NOTHING_TOLD: Final[Mapping[str, str]] = MappingProxyType({})

MODE_NAMES: Final[Mapping[str, RestartMode]] = MappingProxyType(
    {
        **{mode.value: mode for mode in RestartMode},
        "ipr": RestartMode.IN_PROCESS,
        "plr": RestartMode.PROCESS,
        "jlr": RestartMode.JOB,
    }
)

_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
_Nodes = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class BodyError(ValueError):
    """A body that cannot be used: ``field`` (empty for the whole) and ``reason``."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.field = field
        self.reason = reason


class _RankIp(msgspec.Struct):
    rank: _Rank
    ip: _Text


class _Progress(msgspec.Struct, rename="camel"):
    progress_count: int | str
    progress_data: _Text


class UpdateBody(msgspec.Struct):
    """What ``/update`` and ``/start`` share."""

    rank: _Rank
    nnodes: _Nodes
    fault_count: _Natural = msgspec.field(name="faultCount")
    master_addr: _Text = ""
    master_port: int | str = 0
    log_monitoring_configuration: list[dict[str, Any]] = []
    ip_version: str | None = msgspec.field(default=None, name="ipVersion")
    rank_ips: list[_RankIp] = msgspec.field(default_factory=list, name="rankIps")
    worker_data: Any = None
    spare: bool | int = False
    generation: _Natural | None = None
    topology_version: _Natural | None = None
    base_topology_version: _Natural | None = None


class StartBody(UpdateBody):
    """``/start`` also says which checkpoints to load."""

    progress: dict[str, _Progress] = {}


class StopBody(msgspec.Struct):
    """``/stop``, where everything may be left out.

    Without ``restart_mode`` workers that have a barrier are brought back to it.
    """

    restart_mode: str | None = None
    is_graceful: bool = False
    timeout: float | None = None
    generation: _Natural | None = None


def start_command(body: Any, present: StatusReport, table: RankTable = NO_TABLE) -> Start:
    """Return the command in a ``/start`` body.  Raises `BodyError`.

    ``rankIps`` may hold what changed since ``table``, or be left out.
    """
    start = _convert(body, StartBody)
    _check(start, table.hosts)
    newest = max(present.generation, present.stopped_generation)
    return Start(
        generation=newest + 1 if start.generation is None else start.generation,
        topology_version=(
            max(present.topology_version + 1, table.version)
            if start.topology_version is None
            else start.topology_version
        ),
        group_rank=start.rank,
        nnodes=start.nnodes,
        master_addr=start.master_addr,
        master_port=_port(start.master_port),
        fault_count=start.fault_count,
        node_hosts=_hosts(start, table.hosts),
        ip_version=start.ip_version or "",
        worker_data=start.worker_data,
        checkpoints=tuple(
            CheckpointPointer(
                prefix=prefix,
                step=_count(prefix, pointer.progress_count),
                path=pointer.progress_data,
            )
            for prefix, pointer in start.progress.items()
        ),
        log_rules=tuple(start.log_monitoring_configuration),
    )


def update_command(body: Any, table: RankTable) -> Update:
    """Return the command in an ``/update`` body.  Raises `BodyError`.

    ``rankIps`` may hold the changed ranks only, once a whole ``table`` is known.
    """
    update = _convert(body, UpdateBody)
    _check(update, table.hosts)
    return Update(
        group_rank=update.rank,
        nnodes=update.nnodes,
        master_addr=update.master_addr,
        master_port=_port(update.master_port),
        fault_count=update.fault_count,
        changed=tuple(RankHost(rank=item.rank, host=item.ip) for item in update.rank_ips),
        topology_version=update.topology_version,
        base_topology_version=update.base_topology_version,
        generation=update.generation,
        ip_version=update.ip_version or "",
        worker_data=update.worker_data,
    )


def stop_command(body: Any, present: StatusReport) -> Stop:
    """Return the command in a ``/stop`` body, which may be None.  Raises `BodyError`."""
    stop = _convert({} if body is None else body, StopBody)
    name = capability(present) if stop.restart_mode is None else stop.restart_mode
    mode = MODE_NAMES.get(name.lower())
    if mode is None:
        raise BodyError("restart_mode", f"{stop.restart_mode!r} is not one of {_listed()}")
    timeout = GRACE_DEFAULT_S if stop.timeout is None else stop.timeout
    if not 0 <= timeout <= GRACE_S_MAX:
        raise BodyError("timeout", f"must be 0 to {GRACE_S_MAX:g} seconds")
    return Stop(
        generation=present.generation if stop.generation is None else stop.generation,
        restart_mode=mode,
        reason="asked for over the node's HTTP API",
        grace_s=timeout if stop.is_graceful else 0.0,
    )


def capability(report: StatusReport) -> RestartMode:
    """Return the lightest restart that this node's workers can take: what they registered for."""
    waits = any(rank.restartable or rank.at_barrier for rank in report.ranks)
    return RestartMode.IN_PROCESS if waits else RestartMode.PROCESS


def status_body(
    report: StatusReport,
    transitions: Mapping[AgentState, float],
    *,
    agent_version: str,
    spare: bool,
    table: RankTable,
    worker_data: Mapping[str, str] = NOTHING_TOLD,
) -> dict[str, Any]:
    """Return the ``/status`` reply.  ``transitions`` are seconds since the epoch.

    ``worker_data`` is what waiting ranks have to say, by global rank.

    As in the HyperPod agent, what is empty is left out, and single values travel as text.
    """
    assigned = None if report.group_rank is None else str(report.group_rank)
    labels = next((dict(rank.labels) for rank in report.ranks if rank.labels), {})
    body = {
        "status": report.state.value,
        "transitions": {
            state.value: datetime.fromtimestamp(at, tz=UTC).isoformat()
            for state, at in transitions.items()
        },
        "reason": report.reason,
        "message": report.message,
        "restartMode": (report.restart_mode or capability(report)).value,
        "rank_labels": labels,
        "ipversion": table.ip_version or str(max(table.version, report.topology_version)),
        "worker_data": dict(worker_data),
        "progress": _node_progress(report),
        "agent_version": agent_version,
        "assigned_rank": assigned,
        "spare": str(spare and report.group_rank is None),
    }
    filled = {name: value for name, value in body.items() if value not in (None, "", {})}
    return {**filled, "rank_labels": labels, "outrider": to_plain(report)}


def _node_progress(report: StatusReport) -> dict[str, Any]:
    """Return the newest step of each prefix that every local rank confirmed."""
    everyone = {rank.rank for rank in report.ranks}
    newest: dict[str, Any] = {}
    for item in report.checkpoints:
        if not item.paths or not everyone or not everyone <= set(item.ranks):
            continue
        known = newest.get(item.prefix)
        if known is None or item.step > known["progressCount"]:
            newest[item.prefix] = {"progressCount": item.step, "progressData": item.paths[0]}
    return newest


def _convert(body: Any, cls: type[msgspec.Struct]) -> Any:
    if not isinstance(body, dict):
        raise BodyError("", "the body must be a JSON object")
    try:
        return msgspec.convert(body, cls)
    except msgspec.ValidationError as error:
        field, reason = explained(str(error), body, cls)
        raise BodyError(field, reason) from None


def _check(body: UpdateBody, known: tuple[str, ...]) -> None:
    if body.rank >= body.nnodes:
        raise BodyError("rank", f"{body.rank} does not fit {body.nnodes} nodes")
    if not body.master_addr:
        raise BodyError("master_addr", "is required")
    _port(body.master_port)
    _hosts(body, known)
    if len(msgspec.json.encode(body.worker_data)) > WORKER_DATA_BYTES_MAX:
        raise BodyError("worker_data", f"is larger than {WORKER_DATA_BYTES_MAX} bytes as JSON")
    try:
        parse_rules(body.log_monitoring_configuration)
    except RuleError as error:
        raise BodyError("log_monitoring_configuration", str(error)) from None


def _port(value: int | str) -> int:
    number = whole_number(value) if isinstance(value, str) else value
    if number is None or not 1 <= number <= 65535:  # noqa: PLR2004 - TCP's range
        raise BodyError("master_port", f"{shown(str(value))} is not a port from 1 to 65535")
    return number


def _count(prefix: str, value: int | str) -> int:
    number = whole_number(value) if isinstance(value, str) else value
    if number is None or number < 0:
        raise BodyError(f"progress.{prefix}.progressCount", f"{shown(str(value))} is not a step")
    return number


def _hosts(body: UpdateBody, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the whole table: ``known`` with what the body changes."""
    given = {item.rank: item.ip for item in body.rank_ips}
    if len(given) != len(body.rank_ips) or any(rank >= body.nnodes for rank in given):
        raise BodyError("rankIps", f"must name each of the {body.nnodes} ranks once at most")
    hosts = merged(known, given, body.nnodes)
    if isinstance(hosts, Incomplete):
        raise BodyError("rankIps", f"the table is incomplete: rank {hosts.rank} has no address")
    return hosts


def _listed() -> str:
    return ", ".join(MODE_NAMES)
