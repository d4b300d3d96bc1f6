"""A stop that is under way on this node: whom it waits for, and until when.

An in-process stop ends when every worker that is to stay stands at the barrier and every other
one is gone; any other stop ends when all are gone.  Who cannot come back is given up, and that is
how a stop becomes a deeper one for him.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from scout.clock import SECOND, Duration, Instant, after, seconds
from sidecar.api import Stop
from worker_shim.messages import RestartMode

STOP_FORCED_AFTER: Final = Duration(5 * SECOND)
"""Time beyond its deadline after which a stop that has not ended is repeated with SIGKILL."""


@dataclass(slots=True)
class Stopping:
    """One stop.  ``returning`` are the local ranks that are to come back alive."""

    stop: Stop
    returning: frozenset[int]
    forced_at: Instant
    barrier_at: Instant | None
    """When who is not back is given up; None when nobody is to come back."""
    emptied: bool = False
    """Everybody who is not to come back is gone."""
    missed: set[int] = field(default_factory=set)
    """Those who were given up."""

    @classmethod
    def begin(cls, stop: Stop, restartable: frozenset[int], now: Instant) -> "Stopping":
        """Begin ``stop``; ``restartable`` are the workers that can be brought back."""
        in_process = stop.restart_mode is RestartMode.IN_PROCESS
        returning = restartable if in_process else frozenset()
        wait_s = max(stop.grace_s, stop.barrier_s if returning else 0.0)
        return cls(
            stop=stop,
            returning=returning,
            forced_at=after(now, Duration(seconds(wait_s) + STOP_FORCED_AFTER)),
            barrier_at=after(now, seconds(stop.barrier_s)) if returning else None,
        )

    def give_up(self, local_ranks: Iterable[int]) -> frozenset[int]:
        """Expect these no more; return those that were expected until now."""
        given_up = self.returning & frozenset(local_ranks)
        self.returning -= given_up
        self.missed |= given_up
        return given_up

    def overdue(self, waiting: frozenset[int], now: Instant) -> frozenset[int]:
        """Return who is not back although the deadline has passed."""
        late = self.barrier_at is not None and now >= self.barrier_at
        return self.returning - waiting if late else frozenset()

    def gone(self, kept: frozenset[int]) -> None:
        """Everybody but ``kept`` is gone.  What was kept must be what is to stay by now."""
        self.emptied = kept <= self.returning

    def is_over(self, waiting: frozenset[int]) -> bool:
        """Return whether nothing is left to wait for."""
        return self.emptied and self.returning <= waiting

    def next_deadline(self, waiting: frozenset[int]) -> Instant:
        """Return when there is something to do if nothing happens."""
        if self.barrier_at is not None and not self.returning <= waiting:
            return min(self.barrier_at, self.forced_at)
        return self.forced_at
