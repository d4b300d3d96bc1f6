"""What a scrape asks of the shells: the ranks' output, their pages, the loop itself.

It only hands on; nothing is kept here, so nothing outlives what it speaks of.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from scout.clock import SECOND, since
from scout.snapshot import RankSnapshot
from sidecar.drive import monotonic
from sidecar.logs.numbers import Extracted
from sidecar.logs.tail import LogWatcher
from sidecar.logs.verdicts import SEVERITY
from sidecar.loop_lag import LoopLag
from sidecar.workers.pages import ProgressPages


@dataclass(frozen=True, slots=True)
class LiveNumbers:
    """The shells of one node that have numbers."""

    logs: LogWatcher
    pages: ProgressPages
    lag: LoopLag

    def log_counters(self) -> tuple[int, Mapping[str, int]]:
        """Return lines read, and matches by rule."""
        return self.logs.counters.lines, self.logs.counters.rule_matches

    def log_trouble(self) -> tuple[int, int]:
        """Return reads of output that failed, and rules that could not be used."""
        return self.logs.counters.read_errors, self.logs.counters.rules_refused

    def log_match_ages_s(self) -> Mapping[str, float]:
        """Return rule -> seconds since its last match, of rules that have matched."""
        now = monotonic()
        return {
            rule: since(at, now) / SECOND
            for rule, at in list(self.logs.counters.matched_at.items())
        }

    def log_series(self) -> Mapping[int, Mapping[str, Extracted]]:
        """Return rank -> the metrics that its output holds."""
        return self.logs.series()

    def log_severities(self) -> Mapping[str, int]:
        """Return rule -> the worst that any rank of this node is by it."""
        worst: dict[str, int] = {}
        for states in self.logs.states().values():
            for rule, state in states.items():
                worst[rule] = max(SEVERITY[state], worst.get(rule, 0))
        return worst

    def ranks(self) -> tuple[RankSnapshot, ...]:
        """Return what the pages of the running ranks say now."""
        return self.pages.snapshots(monotonic())

    def loop_lag(self) -> tuple[Metric, ...]:
        """Return how late this process's loop was."""
        return self.lag.families()
