"""Virtual time: what happens next, in which order, and by which dice.

Everything in a simulation happens because an action's time came; two actions of one instant
happen in the order in which they were asked for.  All chance comes from named streams of one
seed, so that a new fault in one place moves no die in another.  Nothing here knows a job.
"""

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import TypeAlias

from scout.clock import Duration, Instant, after, seconds

Action: TypeAlias = Callable[[], None]


class Timer:
    """One thing that will happen, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Let it not happen."""
        self.action = None


class World:
    """A heap of (time, sequence, action), and the digest of everything that was noted."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = Instant(0)
        self.watchers: list[Action] = []
        """Called after every action: the checkers."""
        self.transcript: list[str] | None = None
        """What was noted, for a person to read; None while nobody asked."""
        self.actions = 0
        self._heap: list[tuple[int, int, Timer]] = []
        self._sequence = 0
        self._digest = hashlib.sha256()

    def dice(self, name: str) -> random.Random:
        """Return the stream of chance called ``name``; the same seed gives the same stream."""
        return random.Random(f"{self.seed}/{name}")

    def later(self, delay_s: float, action: Action) -> Timer:
        """Let ``action`` happen ``delay_s`` from now."""
        return self.at(after(self.now, Duration(max(0, seconds(delay_s)))), action)

    def at(self, instant: Instant, action: Action) -> Timer:
        """Let ``action`` happen at ``instant``, or now if that is past."""
        timer = Timer(action)
        self._sequence += 1
        heapq.heappush(self._heap, (max(instant, self.now), self._sequence, timer))
        return timer

    def note(self, text: str) -> None:
        """Add a line to the trace; its digest is what two runs are compared by."""
        line = f"{self.now / 1e9:12.6f} {text}"
        self._digest.update(line.encode())
        if self.transcript is not None:
            self.transcript.append(line)

    def digest(self) -> str:
        """Return the digest of everything noted so far."""
        return self._digest.hexdigest()

    def run(self, until: Instant, done: Callable[[], bool] = lambda: False) -> bool:
        """Let things happen until ``done`` (returns True) or ``until`` (returns False)."""
        while self._heap and self._heap[0][0] <= until:
            instant, _, timer = heapq.heappop(self._heap)
            if timer.action is None:
                continue
            self.now = Instant(instant)
            self.actions += 1
            timer.action()
            for watch in self.watchers:
                watch()
            if done():
                return True
        self.now = until
        return done()
