"""When the coordinator must be told of this node again.

News that somebody acts on goes at once, a step that advanced waits for the next of a few reports
a second, and without any there is a heartbeat.  What is told is none of its business.
"""

from typing import Final

from scout.clock import MILLISECOND, Duration, Instant, after, seconds

HEARTBEAT_DEFAULT_S: Final = 1.0
"""Status interval until the coordinator names its own."""
PROGRESS_NEWS_MIN: Final = Duration(200 * MILLISECOND)
"""Least time between two statuses sent only because a step advanced."""


class News:
    """What has not been told yet, and when something was told last."""

    def __init__(self, now: Instant) -> None:
        self.heartbeat = seconds(HEARTBEAT_DEFAULT_S)
        self.urgent = False
        self.progress = False
        self._told_at = now

    def next_deadline(self) -> Instant:
        """Return when there will be something to tell even if nothing happens."""
        wait = min(self.heartbeat, PROGRESS_NEWS_MIN) if self.progress else self.heartbeat
        return after(self._told_at, wait)

    def take(self, now: Instant) -> bool:
        """Return whether to tell everything at ``now``; True means that it is told."""
        if not self.urgent and now < self.next_deadline():
            return False
        self.urgent = self.progress = False
        self._told_at = now
        return True
