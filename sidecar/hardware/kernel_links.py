"""Network links that go down and come up again.

Decides when a port flaps too often or stays down too long.  One flap is a warning; knows nothing
of what runs over the port.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from scout.clock import Instant, seconds, since

PORTS_MAX: Final = 256
FLAPS_KEPT_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """When a link convicts its node: ten flaps in ten minutes, or a minute without it.

    Retraining takes seconds, and collectives bear that; beyond a minute they time out.
    """

    flaps_fatal: int = 10
    window_s: float = 600.0
    down_fatal_s: float = 60.0


@dataclass(slots=True)
class Port:
    """One port.  ``trains``: collectives may run over it, so its loss convicts the node."""

    down_at: Instant | None = None
    """When it went down, by our clock; None while it is up."""
    flaps: int = 0
    convicted: bool = False
    trains: bool = False
    down_line_at: Instant | None = None
    """The same moment by the log's own clock, where it has one."""
    recent: deque[Instant] = field(default_factory=lambda: deque(maxlen=FLAPS_KEPT_MAX))


@dataclass(slots=True)
class Links:
    """Every port that was ever spoken of."""

    limits: LinkLimits = field(default_factory=LinkLimits)
    ports: dict[str, Port] = field(default_factory=dict)

    def down(self, name: str, at: Instant, now: Instant, *, trains: bool) -> None:
        """Note that the port went down."""
        port = self._port(name)
        if port is not None and port.down_at is None:
            port.down_at, port.down_line_at, port.trains = now, at, trains

    def up(self, name: str, at: Instant) -> tuple[float, bool] | None:
        """Note that the port came up.

        Returns for how many seconds it was down and whether it flaps too often now; None when it
        had not been down.
        """
        port = self.ports.get(name)
        if port is None or port.down_at is None or port.down_line_at is None:
            return None
        lasted_s = max(0, since(port.down_line_at, at)) / 1e9
        port.down_at = None
        port.flaps += 1
        port.recent.append(at)
        window = seconds(self.limits.window_s)
        flaps = sum(since(seen, at) <= window for seen in port.recent)
        often = port.trains and flaps >= self.limits.flaps_fatal
        fatal = often and not port.convicted
        port.convicted = often
        return lasted_s, fatal

    def overdue(self, now: Instant) -> list[str]:
        """Return the ports that have just been down for too long; each once until it is up."""
        limit = seconds(self.limits.down_fatal_s)
        gone = [
            name
            for name, port in self.ports.items()
            if port.down_at is not None
            and port.trains
            and not port.convicted
            and since(port.down_at, now) >= limit
        ]
        for name in gone:
            self.ports[name].convicted = True
        return gone

    def _port(self, name: str) -> Port | None:
        if name not in self.ports and len(self.ports) >= PORTS_MAX:
            return None
        return self.ports.setdefault(name, Port())
