"""One metric's judged state over time: raised after holding, cleared after holding, never lost.

A table decides how a state moves; a pair that is not in it is a mistake of ours.  "Unknown"
neither convicts nor acquits: it replaces any state but a fatal one, and no verdict of its own
follows from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from scout.clock import Duration, Instant, after
from sidecar.hardware.readings import Severity


class Move(StrEnum):
    """How a state goes where its readings point."""

    STAY = "stay"
    AT_ONCE = "at_once"
    WHEN_HELD = "when_held"
    """After the verdict's own hold time."""
    WHEN_WELL = "when_well"
    """After the clearing time."""


_H, _U, _W, _F = Severity.HEALTHY, Severity.UNKNOWN, Severity.WARNING, Severity.FATAL

MOVES: Final[Mapping[tuple[Severity, Severity], Move]] = MappingProxyType(
    {
        (_H, _H): Move.STAY,
        (_H, _U): Move.AT_ONCE,
        (_H, _W): Move.WHEN_HELD,
        (_H, _F): Move.WHEN_HELD,
        (_U, _H): Move.AT_ONCE,
        (_U, _U): Move.STAY,
        (_U, _W): Move.WHEN_HELD,
        (_U, _F): Move.WHEN_HELD,
        (_W, _H): Move.WHEN_WELL,
        (_W, _U): Move.AT_ONCE,
        (_W, _W): Move.STAY,
        (_W, _F): Move.WHEN_HELD,
        (_F, _H): Move.WHEN_WELL,
        (_F, _U): Move.STAY,  # not seeing a broken device does not mend it
        (_F, _W): Move.WHEN_WELL,
        (_F, _F): Move.STAY,
    }
)


@dataclass(slots=True)
class Track:
    """The state of one metric of one device, as one source sees it."""

    state: Severity = Severity.UNKNOWN
    since: Instant | None = None
    reason: str = "not read yet"
    _move: Move = Move.STAY
    _pending_since: Instant | None = None
    _due: Instant | None = None

    def step(
        self, wanted: Severity, reason: str, *, at: Instant, hold: Duration, clear: Duration
    ) -> None:
        """Take a verdict about the instant ``at``."""
        move = MOVES[self.state, wanted]
        if self.since is None:
            self.since = at
        match move:
            case Move.STAY:
                self._settle()
                if wanted is self.state:
                    self.reason = reason
            case Move.AT_ONCE:
                self._go(wanted, reason, at)
            case Move.WHEN_HELD | Move.WHEN_WELL:
                patience = hold if move is Move.WHEN_HELD else clear
                if move is not self._move or self._pending_since is None:
                    self._move, self._pending_since = move, at
                if at - self._pending_since >= patience:
                    self._go(wanted, reason, at)
                else:
                    self._due = after(self._pending_since, patience)

    @property
    def rises_at(self) -> Instant | None:
        """When a verdict that is being held will count, if the next reading confirms it."""
        return self._due if self._move is Move.WHEN_HELD else None

    def _go(self, state: Severity, reason: str, at: Instant) -> None:
        self.state, self.reason, self.since = state, reason, at
        self._settle()

    def _settle(self) -> None:
        self._move, self._pending_since, self._due = Move.STAY, None, None
