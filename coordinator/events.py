"""What the job core hears (events) and asks for (effects).  See `sidecar.events` for the idea."""

from dataclasses import dataclass
from typing import TypeAlias

from coordinator.health_events import HealthWord
from coordinator.incidents import Incident
from coordinator.journal_format import DurableState
from sidecar.api import Command, EvidenceReport, Hello, ProgressReport, StatusReport

# --- events ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOpened:
    """A sidecar dialled in.  ``link`` is the shell's number for the connection."""

    link: int
    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClosed:
    """That connection is gone."""

    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpoke:
    """A status, a progress report or evidence came over ``link``."""

    link: int
    message: StatusReport | ProgressReport | EvidenceReport


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAsked:
    """A person asks: ``action`` is ``restart``, ``stop`` or ``exclude`` (with ``node``)."""

    action: str
    who: str
    why: str
    node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTold:
    """Somebody outside the job says something of a node's health."""

    word: HealthWord


Event: TypeAlias = LinkOpened | LinkClosed | LinkSpoke | OperatorAsked | HealthTold

# --- effects --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept:
    """Answer the hello of ``link`` with a welcome."""

    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Say goodbye on ``link`` with the reason and close it."""

    link: int
    reason: str
    retry: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a command over ``link``."""

    link: int
    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Make ``state`` and, if given, ``incident`` durable *before* any later effect is done."""

    state: DurableState
    incident: Incident | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The job ended: ``outcome`` is ``completed`` or ``failed``, with the reason."""

    outcome: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """A line for the coordinator's log and the live view (``level`` is a logging level name)."""

    level: str
    text: str


Effect: TypeAlias = Accept | Dismiss | Send | Persist | Finished | Say
