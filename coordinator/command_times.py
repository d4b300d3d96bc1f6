"""How long commands take to be obeyed by everybody.

A pure fold: commands as they are sent, statuses as they are heard, links as they close.  A
command is obeyed when its node says so; one whose link closes first is missing.
"""

from dataclasses import dataclass, field
from typing import Final

from coordinator.histogram import COMMAND_BUCKETS_S, Histogram
from scout.clock import SECOND, Instant, since
from sidecar.api import Command, Start, StatusReport, Stop

COMMANDS: Final = (Start.TYPE, Stop.TYPE)
ROUNDS_MAX: Final = 8
"""Broadcasts watched at a time; more are stops of strays, whose oldest nobody waits for."""


@dataclass(slots=True)
class _Round:
    """One command of one generation on its way to its nodes."""

    first_sent: Instant
    waiting: dict[int, Instant] = field(default_factory=dict)
    """Link -> when it was first sent there."""
    acked: int = 0


def _histograms() -> dict[str, Histogram]:
    return {command: Histogram(COMMAND_BUCKETS_S) for command in COMMANDS}


@dataclass(slots=True)
class CommandTimes:
    """Durations by command since this coordinator started."""

    broadcasts: dict[str, Histogram] = field(default_factory=_histograms)
    """From the first send to the last answer."""
    acks: dict[str, Histogram] = field(default_factory=_histograms)
    """From the send to one node to its answer."""
    missing: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMMANDS, 0))
    _rounds: dict[tuple[str, int], _Round] = field(default_factory=dict)

    def sent(self, link: int, command: Command, now: Instant) -> None:
        """Note a command on its way; sent again to the same link it keeps its first time."""
        if not isinstance(command, Start | Stop):
            return
        key = (command.TYPE, command.generation)
        if key not in self._rounds and len(self._rounds) >= ROUNDS_MAX:
            oldest = next(iter(self._rounds))
            self.missing[oldest[0]] += len(self._rounds.pop(oldest).waiting)
        self._rounds.setdefault(key, _Round(now)).waiting.setdefault(link, now)

    def heard(self, link: int, status: StatusReport, now: Instant, incident: str = "") -> None:
        """Note what a node obeyed; ``incident`` becomes the example of what it completes."""
        for key, entry in list(self._rounds.items()):
            command, generation = key
            done = status.generation if command == Start.TYPE else status.stopped_generation
            if link not in entry.waiting or done < generation:
                continue
            took_s = since(entry.waiting.pop(link), now) / SECOND
            self.acks[command].observe(took_s)
            entry.acked += 1
            if not entry.waiting:
                self._complete(key, entry, now, incident)

    def closed(self, link: int, now: Instant) -> None:
        """Note that a link is gone: what it had not obeyed is missing."""
        for key, entry in list(self._rounds.items()):
            if entry.waiting.pop(link, None) is None:
                continue
            self.missing[key[0]] += 1
            if not entry.waiting:
                self._complete(key, entry, now, "")

    def copy(self) -> "CommandTimes":
        """Return the same numbers, apart from these; what is under way is left out."""
        return CommandTimes(
            broadcasts={name: it.copy() for name, it in self.broadcasts.items()},
            acks={name: it.copy() for name, it in self.acks.items()},
            missing=dict(self.missing),
        )

    def _complete(self, key: tuple[str, int], entry: _Round, now: Instant, incident: str) -> None:
        del self._rounds[key]
        if entry.acked:
            took_s = since(entry.first_sent, now) / SECOND
            self.broadcasts[key[0]].observe(took_s, incident=incident)
