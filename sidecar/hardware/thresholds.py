"""What counts as too much: every limit of the hardware judgement, with its unit and default.

Decides that a set of limits makes sense, and nothing else.  Rates are per time, so they mean the
same however often a device is polled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

from sidecar.hardware.readings import Severity
from sidecar.hardware.xid import FATAL_CODES

FOLLOW_UP_XIDS: Final = frozenset({45, 154})
"""Echoes of another error (45) and advice about one (154): convicting on them blames twice."""

LIMIT_MAX: Final = 1e9
"""A number beyond it is a slip: as seconds it is thirty years, as a rate more than a link has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Thresholds.  ``*_warn*`` only records a precursor; ``*_fatal*`` convicts the device."""

    poll_interval_s: float = 5.0
    fatal_on_uncorrectable_ecc: bool = True
    fatal_on_remap_failure: bool = True
    ecc_correctable_warn_per_min: float = 100.0
    nvlink_errors_warn_per_min: float = 100.0
    nvlink_errors_fatal_per_min: float = 10_000.0
    pcie_replay_warn_per_min: float = 8.0
    temperature_warn_c: float = 88.0
    temperature_fatal_margin_c: float = 2.0
    """Fatal when no more than this is left until the device switches itself off."""
    fatal_xids: frozenset[int] = FATAL_CODES
    ignored_xids: frozenset[int] = FOLLOW_UP_XIDS
    query_stuck_warn_s: float = 10.0
    query_stuck_fatal_s: float | None = 60.0
    """None: a driver call that never returns stays a warning."""
    debounce_s: float = 2.0
    """How long a gauge must stay beyond its limit, over two readings at least."""
    missing_debounce_s: float = 20.0
    """Longer: a driver that is being reloaded lists no device for a while."""
    fabric_debounce_s: float = 60.0
    throttle_debounce_s: float = 30.0
    clear_after_s: float = 30.0
    """How long a metric must be well again before its fault is taken back."""
    xid_warning_hold_s: float = 600.0
    xid_clear_after_s: float = 300.0
    """How long the driver must ask for no recovery before a fatal Xid is taken back."""
    xid_quiet_clear_s: float = 3600.0
    """Without the driver's word: how long no error may have come."""
    unknown_after_s: float = 30.0
    """A reading older than this says nothing about now."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if not 0 <= value <= LIMIT_MAX:
                words = "must not be negative" if value < 0 else f"must be at most {LIMIT_MAX:.0f}"
                raise ValueError(f"{field.name} {words}, but is {value}")
        if self.poll_interval_s <= 0:
            raise ValueError("poll_interval_s must be above zero")
        if self.nvlink_errors_warn_per_min > self.nvlink_errors_fatal_per_min:
            raise ValueError(
                "nvlink_errors_warn_per_min must not be above nvlink_errors_fatal_per_min"
            )
        for name in ("fatal_xids", "ignored_xids"):
            codes: Iterable[int] = getattr(self, name)
            object.__setattr__(self, name, frozenset(codes))

    def xid_severity(self, code: int, claim: Severity | None) -> Severity:
        """Return how bad an Xid is.  A kernel line that says so itself knows better than a code."""
        if claim is not None:
            return claim
        if code in self.fatal_xids:
            return Severity.FATAL
        return Severity.HEALTHY if code in self.ignored_xids else Severity.WARNING
