"""The coordinator's durable state and its JSON form.

What is kept is what a restarted coordinator cannot learn from the sidecars when they dial in
again: numbers that must not go back, who holds which rank, who is excluded, what was spent of the
restart budgets, which checkpoints every rank confirmed, and the open incident.
"""

from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
import orjson

from coordinator.health_events import HealthNotice
from coordinator.incidents import Incident
from coordinator.ledger import CAUSES, Account, Ledger
from coordinator.observing import Observation
from coordinator.phases import JobPhase
from coordinator.poison import Sighting
from coordinator.wording import one_line
from sidecar.api import CheckpointPointer
from worker_shim.messages import RestartMode

SCHEMA_VERSION: Final = 1
ERROR_CHARS_MAX: Final = 8192
"""More than the longest path, and what is said around it."""

T = TypeVar("T")


class JournalError(Exception):
    """The journal cannot be used; the text says why and what to do, on one line.

    SQLite quotes what is damaged, line breaks included.
    """

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, ERROR_CHARS_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One restart that was decided, for the sliding windows (wall clock ns)."""

    at_ns: int
    mode: RestartMode
    node: str | None
    cause: str
    failed: bool = False
    """The job broke again before every rank had made a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableState:
    """One row: the whole durable state of one job."""

    job: str
    phase: JobPhase = JobPhase.WAITING
    generation: int = 0
    topology_version: int = 0
    began_ns: int = 0
    """When the first generation was given out (wall clock), 0 before it."""
    world: tuple[str, ...] = ()
    """Node of each group rank."""
    hosts: tuple[str, ...] = ()
    """Host of each group rank in this topology version."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Excluded node -> reason."""
    restarts: tuple[Restart, ...] = ()
    rank_labels: dict[str, dict[str, str]] = field(default_factory=dict)
    """Global rank (as text) -> its place in the parallel layout, as its worker told."""
    sightings: tuple[Sighting, ...] = ()
    """Failures whose cause is not known yet, by what stays the same of them; the newest last."""
    observations: tuple[Observation, ...] = ()
    """What observed detectors said, the newest last."""
    complete_checkpoints: tuple[CheckpointPointer, ...] = ()
    """Confirmed by every rank of the job, newest last, bounded."""
    chosen_checkpoints: tuple[CheckpointPointer, ...] = ()
    """What the present generation was told to load."""
    tells_steps: bool = False
    """A worker attached in this or an earlier generation: every later one will tell its steps."""
    verified_steps: tuple[int, ...] = ()
    """Steps whose state every rank found like its peers', newest last, bounded."""
    next_incident: int = 1
    open_incident: Incident | None = None
    outcome_reason: str = ""
    health: tuple[HealthNotice, ...] = ()
    """What others say of nodes, as long as it stands."""
    health_counts: dict[str, int] = field(default_factory=dict)
    """Words heard so far, by severity."""
    schema_version: int = SCHEMA_VERSION


def encode_state(state: DurableState) -> bytes:
    """Return the JSON bytes of ``state``."""
    return orjson.dumps(state)


def decode_state(data: bytes) -> DurableState:
    """Return the state in ``data``.  Raises `JournalError` when it is not one of ours."""
    return _decode(data, DurableState, SCHEMA_VERSION)


def encode_incident(incident: Incident) -> bytes:
    """Return the JSON bytes of ``incident``."""
    return orjson.dumps(incident)


def decode_incident(data: bytes) -> Incident:
    """Return the incident in ``data``.  Raises `JournalError`."""
    return _decode(data, Incident, 1)


def encode_ledger(ledger: Ledger) -> bytes:
    """Return the JSON bytes of ``ledger``."""
    return msgspec.json.encode(ledger)


def decode_ledger(data: bytes) -> Ledger:
    """Return the ledger in ``data``; accounts it does not know are empty.

    Raises `JournalError`.
    """
    try:
        ledger = msgspec.json.decode(data, type=Ledger)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise JournalError(f"the journal's Ledger is damaged: {error}") from error
    ledger.booked_ns = dict.fromkeys(Account, 0) | ledger.booked_ns
    ledger.lost_rank_ns = dict.fromkeys(CAUSES, 0) | ledger.lost_rank_ns
    return ledger


def _decode(data: bytes, cls: type[T], version: int) -> T:
    try:
        body = orjson.loads(data)
        found = body.get("schema_version") if isinstance(body, dict) else None
        if found != version:
            raise JournalError(
                f"the journal holds {cls.__name__} of schema {found!r}, this version reads "
                f"{version}; use the matching outrider, or move the state directory away"
            )
        return msgspec.convert(body, cls)
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise JournalError(f"the journal's {cls.__name__} is damaged: {error}") from error
