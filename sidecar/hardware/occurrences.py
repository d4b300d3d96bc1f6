"""Error events of one device: counted, never repeated, and taken back on evidence.

Decides how long an event speaks against its device.  A storm of one code is one entry with a
count.  Knows nothing of where events are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from scout.clock import Instant, seconds, since
from sidecar.hardware.readings import Metric, Severity
from sidecar.hardware.severity import HEALTHY, Judgement
from sidecar.hardware.thresholds import HealthConfig

CODES_MAX: Final = 64
"""Codes remembered per device; there are some 170, and a broken device writes a handful."""
TEXT_CHARS_MAX: Final = 500

SETTLED_BY: Final[Mapping[int, Metric]] = MappingProxyType(
    {63: Metric.REMAP_PENDING, 64: Metric.REMAP_FAILURE}
)
"""Xids about row remapping, and the reading that says whether it is still so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of a device from all sources: values with when they were read, and resets."""

    known: Mapping[Metric, tuple[float, Instant]]
    reset_at: Instant | None = None


@dataclass(slots=True, kw_only=True)
class Occurrence:
    """One code's events."""

    severity: Severity
    text: str
    first: Instant
    last: Instant
    count: int = 1


@dataclass(slots=True)
class Occurrences:
    """All events of one kind that a source told of one device."""

    by_code: dict[int, Occurrence] = field(default_factory=dict)
    forgotten: int = 0

    def add(self, code: int, severity: Severity, text: str, at: Instant, count: int = 1) -> None:
        """Count events.  A code's first text is kept, and its worst severity."""
        seen = self.by_code.get(code)
        if seen is None:
            if len(self.by_code) >= CODES_MAX:
                self.forgotten += count
                return
            self.by_code[code] = Occurrence(
                severity=severity, text=text[:TEXT_CHARS_MAX], first=at, last=at, count=count
            )
            return
        seen.count += count
        seen.last = Instant(max(seen.last, at))
        seen.severity = worst(seen.severity, severity)

    def judge(
        self, metric: Metric, config: HealthConfig, evidence: Evidence, now: Instant
    ) -> Judgement:
        """Return the worst that still holds."""
        standing = [
            (_RANK[seen.severity], seen.last, code)
            for code, seen in self.by_code.items()
            if seen.severity is not Severity.HEALTHY
            and not _over(code if metric is Metric.XID else None, seen, config, evidence, now)
        ]
        if not standing:
            return HEALTHY
        code = max(standing)[2]
        seen = self.by_code[code]
        times = f", {seen.count} times" if seen.count > 1 else ""
        name = f"Xid {code}" if metric is Metric.XID else "kernel log"
        text = f": {seen.text}" if seen.text else ""
        return Judgement(seen.severity, f"{name}{times}{text}")


def worst(one: Severity, other: Severity) -> Severity:
    """Return the worse of two severities."""
    return max(one, other, key=_RANK.__getitem__)


_RANK: Final = {severity: rank for rank, severity in enumerate(Severity)}


def _over(
    xid: int | None, seen: Occurrence, config: HealthConfig, evidence: Evidence, now: Instant
) -> bool:
    if evidence.reset_at is not None and evidence.reset_at > seen.last:
        return True
    settling = SETTLED_BY.get(xid) if xid is not None else None
    if settling is not None and settling in evidence.known:
        value, at = evidence.known[settling]
        if at > seen.last:
            return value == 0
    quiet = since(seen.last, now)
    if seen.severity is not Severity.FATAL:
        return quiet >= seconds(config.xid_warning_hold_s)
    if Metric.RECOVERY_ACTION in evidence.known:
        action, at = evidence.known[Metric.RECOVERY_ACTION]
        if action == 0 and since(seen.last, at) >= seconds(config.xid_clear_after_s):
            return True
    return quiet >= seconds(config.xid_quiet_clear_s)
