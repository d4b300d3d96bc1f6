"""Bodies of the node's HTTP API, in the HyperPod elastic agent's field names.

Decides what a body means as a command, and what a status looks like to such a client.  Every
refusal names the field.  It opens no socket and obeys nothing.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec

from sidecar.api import AgentState, CheckpointPointer, Start, StatusReport, Stop
from sidecar.codec import to_plain
from sidecar.field_errors import explained
from sidecar.logs.rules import RuleError, parse_rules
from worker_shim.messages import RestartMode

GRACE_DEFAULT_S: Final = 15.0
"""A graceful stop that names no ``timeout``."""
GRACE_S_MAX: Final = 3600.0

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


class StartBody(UpdateBody):
    """``/start`` also says which checkpoints to load."""

    progress: dict[str, _Progress] = {}


class StopBody(msgspec.Struct):
    """``/stop``, where everything may be left out."""

    restart_mode: str = RestartMode.PROCESS.value
    is_graceful: bool = False
    timeout: float | None = None
    generation: _Natural | None = None


def start_command(body: Any, present: StatusReport) -> tuple[Start, str | None]:
    """Return the command in a ``/start`` body, and its ``ipVersion``.  Raises `BodyError`."""
    start = _convert(body, StartBody)
    _check(start)
    newest = max(present.generation, present.stopped_generation)
    command = Start(
        generation=newest + 1 if start.generation is None else start.generation,
        topology_version=(
            present.topology_version + 1
            if start.topology_version is None
            else start.topology_version
        ),
        group_rank=start.rank,
        nnodes=start.nnodes,
        master_addr=start.master_addr,
        master_port=_port(start.master_port),
        fault_count=start.fault_count,
        node_hosts=_hosts(start),
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
    return command, start.ip_version


def check_update(body: Any, present: StatusReport) -> tuple[str | None, str | None]:
    """Check an ``/update`` body; return why it is stale, if it is, and its ``ipVersion``.

    Nothing of it is kept: every start carries the whole topology.  Raises `BodyError`.
    """
    update = _convert(body, UpdateBody)
    _check(update)
    if update.generation is not None and update.generation < present.generation:
        return f"generation {update.generation} is over, {present.generation} runs here", None
    version = update.topology_version
    if version is not None and version < present.topology_version:
        return f"topology version {version} is older than {present.topology_version}", None
    return None, update.ip_version


def stop_command(body: Any, present: StatusReport) -> Stop:
    """Return the command in a ``/stop`` body, which may be None.  Raises `BodyError`."""
    stop = _convert({} if body is None else body, StopBody)
    mode = MODE_NAMES.get(stop.restart_mode.lower())
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


def status_body(
    report: StatusReport,
    transitions: Mapping[AgentState, float],
    *,
    agent_version: str,
    spare: bool,
    ip_version: str | None,
) -> dict[str, Any]:
    """Return the ``/status`` reply.  ``transitions`` are seconds since the epoch.

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
        "restartMode": (report.restart_mode or RestartMode.PROCESS).value,
        "rank_labels": labels,
        "ipversion": ip_version or str(report.topology_version),
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


def _check(body: UpdateBody) -> None:
    if body.rank >= body.nnodes:
        raise BodyError("rank", f"{body.rank} does not fit {body.nnodes} nodes")
    if not body.master_addr:
        raise BodyError("master_addr", "is required")
    _port(body.master_port)
    _hosts(body)
    try:
        parse_rules(body.log_monitoring_configuration)
    except RuleError as error:
        raise BodyError("log_monitoring_configuration", str(error)) from None


def _port(value: int | str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or not 1 <= value <= 65535:  # noqa: PLR2004 - TCP's range
        raise BodyError("master_port", f"{value!r} is not a port from 1 to 65535")
    return value


def _count(prefix: str, value: int | str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or value < 0:
        raise BodyError(f"progress.{prefix}.progressCount", f"{value!r} is not a step")
    return value


def _hosts(body: UpdateBody) -> tuple[str, ...]:
    if not body.rank_ips:
        return ()
    known = {item.rank: item.ip for item in body.rank_ips}
    missing = [rank for rank in range(body.nnodes) if rank not in known]
    if missing:
        raise BodyError("rankIps", f"the table is incomplete: rank {missing[0]} has no address")
    if len(known) != len(body.rank_ips) or len(known) > body.nnodes:
        raise BodyError("rankIps", f"must name each of the {body.nnodes} ranks once")
    return tuple(known[rank] for rank in range(body.nnodes))


def _listed() -> str:
    return ", ".join(MODE_NAMES)
