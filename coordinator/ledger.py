"""Where the job's time went: every nanosecond of it in exactly one account.

A pure fold over looks at the job.  Running time is held back until a step confirms it: only then
was it productive, and when a fault comes instead, what passed since the fault belongs to finding
it.  So no account ever goes back, and at every moment
``sum of the accounts + what is held back == wall clock since the beginning``.

Times are wall-clock nanoseconds since the epoch; a clock that is set back books nothing until it
has caught up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from coordinator.incidents import Incident, IncidentPhase
from coordinator.phases import JobPhase
from scout.snapshot import Phase
from sidecar.api import FaultKind

HOUR_NS: Final = 3_600_000_000_000


class Account(StrEnum):
    """What a stretch of the job's time was."""

    PRODUCTIVE = "productive"
    """It ended in a step that had never been completed before."""
    RECOMPUTE = "recompute"
    """It ended in a step that a fault had taken back."""
    DETECTING = "detecting"
    """From the fault to the verdict."""
    CAPTURING = "capturing"
    """The last look at every rank before the stop."""
    STOPPING = "stopping"
    DECIDING = "deciding"
    """The back-off between two restarts included."""
    WAITING_FOR_NODE = "waiting_for_node"
    STARTING = "starting"
    LOADING = "loading"
    """From started processes to their first step: imports, rendezvous, checkpoint, warm-up."""
    STRAGGLING = "straggling"
    """From the beginning of a slowness to its detection."""
    CHECKPOINT_STALL = "checkpoint_stall"
    """From the beginning of a stall while saving a checkpoint to its detection."""
    IDLE = "idle"
    """The job has ended and its coordinator still answers."""


START: Final = "start"
"""The cause of what a job spends before its first step, when nothing had broken yet."""
UNKNOWN: Final = "unknown"
CAUSES: Final = (START, *(kind.value for kind in FaultKind), UNKNOWN)
_WORTH: Final = frozenset({Account.PRODUCTIVE, Account.IDLE})
"""Accounts that nothing was lost by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one look at the job saw.

    ``step`` is the furthest step of the present generation, ``attached`` whether any worker will
    tell its steps, ``ranks`` how many devices stand still while the job does.
    """

    phase: JobPhase
    ranks: int
    step: int | None = None
    attached: bool = False
    incident: Incident | None = None


@dataclass(slots=True, kw_only=True)
class Ledger:
    """One job's accounts.  ``at_ns`` is until when everything is booked.

    Every field is kept by the journal, so that a restarted coordinator goes on where it was: what
    passed in between is booked by the phase that the job was in.
    """

    begun_ns: int
    at_ns: int
    seen_ns: int
    """The last look; what lies between ``at_ns`` and it is held back."""
    booked_ns: dict[Account, int] = field(default_factory=lambda: dict.fromkeys(Account, 0))
    lost_rank_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """Cause -> time of ranks that stood still or worked in vain for it."""
    phase: JobPhase = JobPhase.WAITING
    step: int | None = None
    furthest: int = 0
    """Furthest step ever completed: everything up to it is done again after a restart."""
    cause: str = START
    untold: bool = False
    """Workers run and none of them tells steps, as far as the last look saw."""

    @classmethod
    def begin(cls, now_ns: int) -> "Ledger":
        """Return empty accounts that begin now."""
        return cls(begun_ns=now_ns, at_ns=now_ns, seen_ns=now_ns)

    @property
    def held_ns(self) -> int:
        """Time that no step and no verdict has confirmed yet."""
        return self.seen_ns - self.at_ns

    def copy(self) -> "Ledger":
        """Return the same accounts, apart from these."""
        return Ledger(
            begun_ns=self.begun_ns,
            at_ns=self.at_ns,
            seen_ns=self.seen_ns,
            booked_ns=dict(self.booked_ns),
            lost_rank_ns=dict(self.lost_rank_ns),
            phase=self.phase,
            step=self.step,
            furthest=self.furthest,
            cause=self.cause,
            untold=self.untold,
        )

    def look(self, now_ns: int, seen: Seen) -> None:
        """Take in what the job is at ``now_ns``; what passed since the last look is booked."""
        self.seen_ns = max(self.seen_ns, now_ns)
        if seen.incident is not None:
            self.cause = _kind(seen.incident)
        match self.phase:
            case JobPhase.RUNNING:
                self._ran(seen)
            case JobPhase.LOCALIZING:
                self._judged(seen)
            case JobPhase.WAITING:
                self._waited(seen)
            case JobPhase.STARTING:
                self._book(Account.STARTING, self.seen_ns, seen)
            case JobPhase.STOPPING:
                self._book(Account.STOPPING, self.seen_ns, seen)
            case JobPhase.COMPLETED | JobPhase.FAILED | JobPhase.STOPPED:
                self._book(Account.IDLE, self.seen_ns, seen)
        if seen.phase is not self.phase and seen.phase in (JobPhase.STARTING, JobPhase.WAITING):
            self.step = None
        elif seen.step is not None and seen.phase in (JobPhase.RUNNING, JobPhase.LOCALIZING):
            self.step = seen.step
            self.furthest = max(self.furthest, seen.step)
        self.untold = not seen.attached and seen.step is None
        self.phase = seen.phase

    # --- one rule a phase -------------------------------------------------------------------

    def _ran(self, seen: Seen) -> None:
        """The job ran since the last look."""
        if seen.phase is JobPhase.LOCALIZING:
            return  # held until the verdict says since when it was broken
        if seen.phase.terminal:
            lost = seen.phase is JobPhase.FAILED
            self._book(Account.DETECTING if lost else self._running_account(), self.seen_ns, seen)
        elif seen.phase is not JobPhase.RUNNING:
            self._judged(seen)
        elif self.step is None:
            told = self.untold and not seen.attached and seen.step is None
            self._book(Account.PRODUCTIVE if told else Account.LOADING, self.seen_ns, seen)
        elif seen.step is not None and seen.step > self.step:
            again = min(max(self.furthest - self.step, 0), seen.step - self.step)
            split = self.at_ns + self.held_ns * again // (seen.step - self.step)
            self._book(Account.RECOMPUTE, split, seen)
            self._book(Account.PRODUCTIVE, self.seen_ns, seen)

    def _judged(self, seen: Seen) -> None:
        """The culprit was looked for since the last look."""
        incident = seen.incident
        if seen.phase is JobPhase.LOCALIZING or (
            seen.phase is JobPhase.RUNNING and incident is None
        ):
            return  # still looking, or a pause that was none: the next step tells
        if incident is None:
            self._book(Account.DETECTING, self.seen_ns, seen)
            return
        self._book(self._running_account(), _at(incident, IncidentPhase.FAULT), seen)
        self._book(_before_detection(incident), _at(incident, IncidentPhase.DETECTED), seen)
        self._book(Account.DETECTING, _at(incident, IncidentPhase.LOCALIZED), seen)
        self._book(Account.CAPTURING, _at(incident, IncidentPhase.CAPTURED), seen)
        self._book(Account.STOPPING, self.seen_ns, seen)

    def _waited(self, seen: Seen) -> None:
        """Nodes were waited for since the last look."""
        incident = seen.incident
        if incident is not None and incident.decision is not None:
            decided = _at(incident, IncidentPhase.DECIDED)
            until = decided + round(incident.decision.backoff_s * 1e9)
            self._book(Account.DECIDING, until, seen)
        self._book(Account.WAITING_FOR_NODE, self.seen_ns, seen)

    def _running_account(self) -> Account:
        if self.step is None:
            return Account.PRODUCTIVE if self.untold else Account.LOADING
        return Account.RECOMPUTE if self.step < self.furthest else Account.PRODUCTIVE

    def _book(self, account: Account, until_ns: int, seen: Seen) -> None:
        """Book everything up to ``until_ns``, never beyond the last look, never backwards."""
        until_ns = min(until_ns, self.seen_ns)
        if until_ns <= self.at_ns:
            return
        span = until_ns - self.at_ns
        self.booked_ns[account] += span
        if account not in _WORTH:
            self.lost_rank_ns[self.cause] += span * seen.ranks
        self.at_ns = until_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """The accounts as people and programs read them.

    ``accounts_s`` and ``held_s`` add up to ``wall_s``.  ``goodput`` is the productive share of
    the time in which the job had its machines, ``ettr`` (effective training time ratio) that of
    all its time; both leave out what came after its end, and are None before anything happened.
    """

    job: str
    begun_ns: int
    wall_s: float
    held_s: float
    accounts_s: Mapping[str, float]
    lost_gpu_hours: Mapping[str, float]
    """Cause -> hours of devices; causes that cost nothing are left out."""
    goodput: float | None
    ettr: float | None


def report(job: str, ledger: Ledger) -> LedgerReport:
    """Return ``ledger`` in seconds and hours."""
    booked = ledger.booked_ns
    productive = booked[Account.PRODUCTIVE]
    alive = sum(booked.values()) - booked[Account.IDLE]
    held = alive - booked[Account.WAITING_FOR_NODE]
    return LedgerReport(
        job=job,
        begun_ns=ledger.begun_ns,
        wall_s=(ledger.seen_ns - ledger.begun_ns) / 1e9,
        held_s=ledger.held_ns / 1e9,
        accounts_s={account.value: ns / 1e9 for account, ns in booked.items()},
        lost_gpu_hours={cause: ns / HOUR_NS for cause, ns in ledger.lost_rank_ns.items() if ns > 0},
        goodput=productive / held if held > 0 else None,
        ettr=productive / alive if alive > 0 else None,
    )


def _kind(incident: Incident) -> str:
    if incident.finding is not None and incident.finding.culprit is not None:
        return incident.finding.culprit.kind.value
    return incident.faults[0].report.kind.value if incident.faults else UNKNOWN


def _at(incident: Incident, phase: IncidentPhase) -> int:
    """Return when a milestone was reached; one that was not reached takes no time."""
    return incident.at(phase) or 0


def _before_detection(incident: Incident) -> Account:
    """Return what the job was between the fault and its detection."""
    kind = _kind(incident)
    if kind == FaultKind.LOG_SLOW:
        return Account.STRAGGLING
    culprit = None if incident.finding is None else incident.finding.culprit
    saving = {item.rank for item in incident.snapshots if item.phase is Phase.CHECKPOINT}
    if kind == FaultKind.PROCESS_STALL and culprit is not None and culprit.rank in saving:
        return Account.CHECKPOINT_STALL
    return Account.DETECTING
