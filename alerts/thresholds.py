"""Every number that the alerts compare with, in one place, each with its reason.

Change one, run `make alerts`, and the rules and their texts follow; a test that names the old
number then says what else it was promised to.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Durations are Prometheus' (``1m``), spans that are compared with a series are seconds."""

    down_for: str = "1m"
    """Four missed scrapes: a restart of the process takes less."""
    sidecars_down_ratio: float = 0.1
    """More at once is a network or a rollout, not machines."""
    silent_s: int = 30
    """A sidecar speaks every second; the coordinator gives a node up after fifteen."""
    version_skew_for: str = "2m"
    fault_open_for: str = "1m"
    """A recovery that goes well is over before anybody has got up."""
    hung_s: int = 120
    stalled_for: str = "1m"
    """Outrider itself asks who it is at once; a minute later it has acted or cannot."""
    observer_for: str = "1m"
    """Observers find one another within seconds of their ranks' start."""
    observer_silent_s: int = 60
    """It writes every five seconds."""
    no_step_for: str = "10m"
    slow_for: str = "3m"
    comparison_stale_s: int = 3600
    """Many times the interval at which anybody compares."""
    ecc_corrected_per_hour: int = 100
    """What a healthy device corrects in months."""
    nvlink_errors_per_s: int = 1
    thermal_margin_c: int = 5
    telemetry_stale_s: int = 120
    """Two polls of sixty seconds, the slowest that is configured anywhere."""
    checkpoint_stale: str = "2h"
    verified_stale_s: int = 7200
    """As long as a checkpoint may be overdue at all."""
    checkpoint_spread_for: str = "15m"
    recovery_stuck_s: int = 900
    restart_budget_low: int = 1
    restarts_in_half_an_hour: int = 3
    broadcast_slow_s: int = 5
    """A stop reaches ten thousand nodes in less."""
    goodput_low: float = 0.9
    goodput_low_for: str = "15m"
    loop_lag_s: float = 0.5
