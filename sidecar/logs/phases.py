"""Stretches in which a rank may be silent for longer: evaluation, a checkpoint, compilation.

Decides how long silence is allowed.  Every phase is bounded, and one that ran out cannot be opened
again before the rank made progress: a loop that prints "evaluating" for ever is a hang.  Patterns
open and close phases, and so does the worker itself, whose page says what it declared.
"""

import copy
from dataclasses import dataclass, field
from typing import Final

from scout.clock import MILLISECOND, Duration, Instant, after
from scout.snapshot import Phase, RankSnapshot

SAME_WITHIN: Final = Duration(100 * MILLISECOND)
"""Two looks at one phase date its beginning from an age each, so not to the nanosecond alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A phase that a worker says it is in: it began at ``since`` and may last ``limit``."""

    name: str
    since: Instant
    limit: Duration

    def is_same_as(self, other: "Declared | None") -> bool:
        """Return whether both looks saw one and the same phase."""
        return (
            other is not None
            and (self.name, self.limit) == (other.name, other.limit)
            and abs(self.since - other.since) <= SAME_WITHIN
        )


def declared(seen: RankSnapshot, now: Instant) -> Declared | None:
    """Return the phase that a rank's page declares, None when it declares none.

    Only a phase with a limit is one: what hooks notice by themselves says not how long it may last.
    """
    if seen.phase_limit_ns is None:
        return None
    kind = "" if seen.phase is Phase.UNKNOWN else f"{seen.phase.name.lower()} "
    name = f"{kind}(declared)"  # no rule's name, unless somebody insists
    since = Instant(now - (seen.phase_started_age_ns or 0))
    return Declared(name=name, since=since, limit=Duration(seen.phase_limit_ns))


@dataclass(slots=True)
class _Open:
    since: Instant
    until: Instant


@dataclass(slots=True)
class Phases:
    """The phases of one rank."""

    _open: dict[str, _Open] = field(default_factory=dict)
    _ended: Instant | None = None

    def fork(self) -> "Phases":
        """Return a copy that goes on by itself."""
        return Phases({name: copy.copy(phase) for name, phase in self._open.items()}, self._ended)

    def begin(self, name: str, limit: Duration, now: Instant) -> None:
        """Open a phase.  One that is open already is not extended."""
        self._open.setdefault(name, _Open(now, after(now, limit)))

    def end(self, name: str, now: Instant) -> None:
        """Close a phase; silence counts from here.  One that ran out ended when it did."""
        phase = self._open.pop(name, None)
        if phase is not None:
            ended = min(now, phase.until)
            self._ended = ended if self._ended is None else max(self._ended, ended)

    def progressed(self, now: Instant) -> None:
        """Take note of a step: phases that ran out may be opened again."""
        for name in [name for name, phase in self._open.items() if now >= phase.until]:
            self.end(name, now)

    def deadline(self, progress: Instant, recurring: Duration) -> Instant:
        """Return when silence since ``progress`` is too long."""
        last = progress if self._ended is None else max(progress, self._ended)
        ends = [phase.until for phase in self._open.values()]
        return max(after(last, recurring), *ends) if ends else after(last, recurring)

    @property
    def are_open(self) -> bool:
        """Whether any phase was opened and not ended."""
        return bool(self._open)

    def running(self, now: Instant) -> str | None:
        """Return the name of the phase that was open last, or None."""
        opened = [(phase.since, name) for name, phase in self._open.items() if phase.since <= now]
        return max(opened)[1] if opened else None
