"""The node's running ranks: pid, progress, stall and labels of each, for one generation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scout.clock import Duration, Instant, since
from scout.hang import RankSnapshot
from sidecar.api import RankStatus


@dataclass(slots=True)
class Worker:
    """What is known of one local rank.  ``step`` is None until it completed one."""

    pid: int | None = None
    step: int | None = None
    progress_at: Instant | None = None
    stalled: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)

    def observe(self, seen: RankSnapshot, limit: Duration, now: Instant) -> bool:
        """Take a look at its page.  Returns True when the coordinator must hear of it at once.

        The first step is such news, because it ends a recovery, and so is entering or leaving a
        stall: silence longer than ``limit`` (0 switches the judgement off) after a first step.
        """
        if seen.step is None:
            return False
        first = self.step is None
        self.step = seen.step
        if seen.progress_age_ns is not None:
            self.progress_at = Instant(now - seen.progress_age_ns)
        age = self.progress_age(now)
        stalled = bool(limit) and age is not None and age > limit
        turned, self.stalled = stalled != self.stalled, stalled
        return first or turned

    def progress_age(self, now: Instant) -> int | None:
        """Return nanoseconds since its last progress, or None when there was none."""
        return None if self.progress_at is None else since(self.progress_at, now)

    def status(self, rank: int, local_rank: int, now: Instant) -> RankStatus:
        """Return it as the coordinator is told."""
        return RankStatus(
            rank=rank,
            local_rank=local_rank,
            pid=self.pid,
            step=self.step,
            progress_age_ns=self.progress_age(now),
            stalled=self.stalled,
            labels=self.labels,
        )
