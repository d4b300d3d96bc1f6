"""What nodes tell in passing and a picture of the moment would miss: checkpoints and comparisons.

A pure fold over statuses.  A comparison that finds corruption stops the ranks that told it within
seconds, and a checkpoint is complete the moment its last rank says so: neither waits for a scrape.
Everything counts from the start of this coordinator.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from coordinator.histogram import Histogram
from scout.clock import SECOND
from sidecar.api import CheckpointPointer, StatusReport
from worker_shim.messages import ScoutStatus

UNCONFIRMED: Final = "unconfirmed"
"""Some rank has not confirmed it, or its ranks do not agree where it lies."""
CONFIRMED: Final = "confirmed"
"""Every rank saved it to one place."""
VERIFIED: Final = "recovery_verified"
"""The state of that step was compared among peers and found sound."""
REJECTED: Final = "rejected"
"""It was found corrupt, or could not be told from corrupt."""
TRANSITIONS: Final = (
    (UNCONFIRMED, CONFIRMED),
    (CONFIRMED, VERIFIED),
    (CONFIRMED, REJECTED),
    (VERIFIED, REJECTED),
)
"""Every change of trust in a checkpoint."""
CHECKED: Final = ("not_run", "healthy", "straggler", "inconclusive", "corrupt")
"""What a comparison of peers can find."""
STEPS_MAX: Final = 256
"""Steps that are begun, and comparisons, of which something is remembered: the newest."""
BUCKETS_S: Final = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""From a small model on a local disk to a large one on a disk that everybody shares."""

_Key: TypeAlias = tuple[str, int]
"""Prefix and step of a checkpoint."""


@dataclass(slots=True)
class ToldTimes:
    """Counts and times of one job; moments are wall clock nanoseconds."""

    checks: Counter[str] = field(default_factory=Counter)
    """Outcome -> comparisons; ranks that differ over one count each outcome once."""
    checked_ns: int | None = None
    """When a comparison that could be made was told last."""
    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """From one trust to another -> checkpoints."""
    reached_ns: dict[tuple[str, str], int] = field(default_factory=dict)
    """Prefix and trust -> when its newest checkpoint was first trusted so."""
    confirming: Histogram = field(default_factory=lambda: Histogram(BUCKETS_S))
    """From a step's first rank to its last."""
    _generation: int = 0
    _whole: tuple[CheckpointPointer, ...] = ()
    _begun: dict[_Key, int] = field(default_factory=dict)
    """Of this generation."""
    _trust: dict[_Key, str] = field(default_factory=dict)
    _counted: dict[tuple[int, int, str], None] = field(default_factory=dict)
    """Generation, step and outcome of comparisons."""
    _judged: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The newest verified and rejected steps that were taken in."""

    def restored(self, whole: tuple[CheckpointPointer, ...], verified: Iterable[int]) -> None:
        """Take what was known before this coordinator; when that was is not known."""
        steps = set(verified)
        self._whole = whole
        for it in whole:
            self._trust[it.prefix, it.step] = VERIFIED if it.step in steps else CONFIRMED

    def heard(self, status: StatusReport, whole: tuple[CheckpointPointer, ...], at_ns: int) -> None:
        """Take one node's status; ``whole`` are the checkpoints that are complete with it."""
        if status.generation > self._generation:
            self._generation = status.generation
            self._begun.clear()
        if status.generation == self._generation:
            for item in status.checkpoints:
                key = (item.prefix, item.step)
                if key not in self._trust:
                    self._begun.setdefault(key, at_ns)
        if whole is not self._whole:
            self._complete(whole, at_ns)
        for rank in status.ranks:
            if rank.scout is not None and rank.scout.outcome in CHECKED:
                self._checked((status.generation, rank.scout.step, rank.scout.outcome), at_ns)
                self._judge(rank.scout, at_ns)
        while len(self._begun) > STEPS_MAX:
            del self._begun[next(iter(self._begun))]
        while len(self._counted) > STEPS_MAX:
            del self._counted[next(iter(self._counted))]

    def copy(self) -> "ToldTimes":
        """Return the same numbers, apart from these; what they were made of is left out."""
        return ToldTimes(
            checks=self.checks.copy(),
            checked_ns=self.checked_ns,
            transitions=self.transitions.copy(),
            reached_ns=dict(self.reached_ns),
            confirming=self.confirming.copy(),
        )

    def _complete(self, whole: tuple[CheckpointPointer, ...], at_ns: int) -> None:
        """Take what is complete now; what a restart gave up may be saved, and counted, again."""
        self._whole = whole
        kept = {(it.prefix, it.step) for it in whole}
        self._trust = {key: trust for key, trust in self._trust.items() if key in kept}
        for key in kept - self._trust.keys():
            self.confirming.observe(max(0, at_ns - self._begun.pop(key, at_ns)) / SECOND)
            self._turn(key, UNCONFIRMED, CONFIRMED, at_ns)

    def _judge(self, told: ScoutStatus, at_ns: int) -> None:
        marks = (told.verified, told.rejected)
        if marks == self._judged:
            return  # every rank of the job says the same, again and again
        self._judged = marks
        for steps, trust in ((set(told.verified), VERIFIED), (set(told.rejected), REJECTED)):
            for key, before in list(self._trust.items()):
                if key[1] in steps and (before, trust) in TRANSITIONS:
                    self._turn(key, before, trust, at_ns)

    def _turn(self, key: _Key, before: str, after: str, at_ns: int) -> None:
        self._trust[key] = after
        self.transitions[before, after] += 1
        self.reached_ns[key[0], after] = at_ns

    def _checked(self, check: tuple[int, int, str], at_ns: int) -> None:
        if check in self._counted:
            return
        self._counted[check] = None
        self.checks[check[2]] += 1
        if check[2] != CHECKED[0]:
            self.checked_ns = at_ns
