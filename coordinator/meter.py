"""The job core with a meter around it: what it hears and asks for is measured on the way.

It keeps the core's contract, changes nothing, and decides nothing.
"""

from collections.abc import Sequence
from typing import Final

from coordinator.command_times import CommandTimes
from coordinator.events import Effect, Event, LinkClosed, LinkSpoke, Send
from coordinator.job import JobCore
from coordinator.ledger import Ledger, Seen
from coordinator.told_times import ToldTimes
from scout.clock import SECOND, Duration, Instant, since
from sidecar.api import StatusReport

LOOK_EVERY: Final = Duration(SECOND)
"""Between two looks while nothing but steps changes: as often as nodes tell their steps."""


class Meter:
    """Measures one core.  ``wall_offset_ns`` turns an `Instant` into wall clock nanoseconds."""

    def __init__(self, core: JobCore, ledger: Ledger, wall_offset_ns: int, now: Instant) -> None:
        self.ledger = ledger
        self.commands = CommandTimes()
        self.told = ToldTimes()
        self.told.restored(core.state.complete_checkpoints, core.state.verified_steps)
        self._core = core
        self._wall_offset_ns = wall_offset_ns
        self._looked_at = now
        self._look(now)

    def handle(self, event: Event, now: Instant) -> Sequence[Effect]:
        """Take one event to the core, and measure."""
        match event:
            case LinkSpoke(link=link, message=StatusReport() as status):
                incident = self._core.state.open_incident
                self.commands.heard(link, status, now, "" if incident is None else incident.id)
                effects = self._core.handle(event, now)
                whole = self._core.state.complete_checkpoints
                self.told.heard(status, whole, now + self._wall_offset_ns)
                return self._measured(effects, now)
            case LinkClosed(link=link):
                self.commands.closed(link, now)
            case _:
                pass
        return self._measured(self._core.handle(event, now), now)

    def handle_timer(self, now: Instant) -> Sequence[Effect]:
        """Take the passing of time to the core, and measure."""
        return self._measured(self._core.handle_timer(now), now)

    def next_deadline(self) -> Instant | None:
        """Return when the core wants to be called next."""
        return self._core.next_deadline()

    def look(self, now: Instant) -> Ledger:
        """Return the accounts as they are now."""
        self._look(now)
        return self.ledger

    def _measured(self, effects: Sequence[Effect], now: Instant) -> Sequence[Effect]:
        for effect in effects:
            if isinstance(effect, Send):
                self.commands.sent(effect.link, effect.command, now)
        state = self._core.state
        phase, incident = self._known
        changed = state.phase is not phase or state.open_incident is not incident
        if changed or since(self._looked_at, now) >= LOOK_EVERY:
            self._look(now)
        return effects

    def _look(self, now: Instant) -> None:
        state, (step, attached) = self._core.state, self._core.progress()
        self._known = (state.phase, state.open_incident)
        self._looked_at = now
        seen = Seen(
            phase=state.phase,
            ranks=self._core.world_size,
            step=step,
            attached=attached,
            incident=state.open_incident,
        )
        self.ledger.look(now + self._wall_offset_ns, seen)
