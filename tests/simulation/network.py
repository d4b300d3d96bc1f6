"""The connections between sidecars and the coordinator.

A link is one TCP stream: what is sent arrives in order and late, or the link breaks and takes
everything under way with it.  The two ends learn of a break separately, sometimes seconds apart;
until then what they send is lost.  Messages travel as the bytes of the real codec.  A status may
arrive twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from scout.clock import Instant, after, seconds
from sidecar.api import DOWNWARD, UPWARD, Downward, Hello, StatusReport, Upward
from sidecar.codec import decode, encode
from tests.simulation.world import World

DOUBLED: Final = 0.03
"""Share of statuses that arrive twice."""
LATE: Final = 0.02
"""Share of messages that take a hundred times longer than most."""
DELAY_MAX_S: Final = 2.0
"""What takes longer is a link that breaks."""
HALF_OPEN: Final = 0.3
"""Share of broken links that an end takes for alive until its next ping."""
PING_LIMIT_S: Final = 7.5
"""When the WebSocket's ping has told the last end."""


class Dialler(Protocol):
    """A sidecar's end."""

    name: str
    slowness: float

    def reachable(self) -> bool:
        """Return whether its packets reach the coordinator's machine."""

    def link_up(self, link: "Link") -> None:
        """The connection stands."""

    def link_lost(self, link: "Link") -> None:
        """The connection is gone."""

    def dial_failed(self) -> None:
        """Nobody answered."""

    def told(self, link: "Link", message: Downward) -> None:
        """A message arrived."""


class Listener(Protocol):
    """The coordinator's end."""

    life: int
    """Which start of the process this is; nothing of an earlier one reaches it."""

    def accept(self) -> int | None:
        """Return the process's number for a new connection, or None while none runs."""

    def opened(self, link: "Link", hello: Hello) -> None:
        """A sidecar presented itself."""

    def spoke(self, link: "Link", message: Upward) -> None:
        """A message arrived."""

    def closed(self, link: "Link") -> None:
        """A connection is gone."""


@dataclass(eq=False)
class Link:
    """One connection.  The ends are told once each that it is gone."""

    number: int
    life: int
    dialler: Dialler
    broken: bool = False
    presented: bool = False
    dialler_knows: bool = False
    listener_knows: bool = False
    clear_at: dict[str, Instant] = field(default_factory=dict)
    """Per direction: when everything sent before has arrived."""


class Network:
    """Every link, and the delays of each message."""

    def __init__(self, world: World, listener: Callable[[], Listener]) -> None:
        self._world = world
        self._listener = listener
        self._dice = world.dice("network")
        self.links: list[Link] = []

    def dial(self, dialler: Dialler) -> None:
        """Let ``dialler`` try to connect."""
        self._world.later(self._delay(dialler), lambda: self._answer(dialler))

    def up(self, link: Link, message: Upward) -> None:
        """Send from a sidecar."""
        data = encode(message)
        twice = isinstance(message, StatusReport) and self._dice.random() < DOUBLED
        for _ in range(1 + twice):
            self._carry(link, "up", lambda: self._arrive_up(link, data))

    def down(self, link: Link, message: Downward) -> None:
        """Send from the coordinator."""
        data = encode(message)
        self._carry(link, "down", lambda: self._arrive_down(link, data))

    def hang_up(self, link: Link) -> None:
        """Close from the coordinator's side, behind everything that was sent."""
        self._carry(link, "down", lambda: self.drop(link, quiet=False))

    def drop(self, link: Link, *, quiet: bool) -> None:
        """Break ``link``; ``quiet`` when no end is told before its next ping."""
        if link.broken:
            return
        link.broken = True
        self.links.remove(link)
        self._world.note(f"link {link.number} of {link.dialler.name} broke")
        self._world.later(self._notice(quiet=quiet), lambda: self._dialler_learns(link))
        self._world.later(self._notice(quiet=quiet), lambda: self._listener_learns(link))

    def drop_all(self) -> None:
        """Break every link at once: the coordinator's process ended."""
        for link in list(self.links):
            self.drop(link, quiet=False)

    # --- inside -----------------------------------------------------------------------------

    def _answer(self, dialler: Dialler) -> None:
        number = self._listener().accept() if dialler.reachable() else None
        if number is None:
            dialler.dial_failed()
            return
        link = Link(number, self._listener().life, dialler)
        self.links.append(link)
        dialler.link_up(link)

    def _carry(self, link: Link, direction: str, arrive: Callable[[], None]) -> None:
        due = after(self._world.now, seconds(self._delay(link.dialler)))
        due = max(due, link.clear_at.get(direction, due))
        link.clear_at[direction] = due
        self._world.at(due, lambda: None if link.broken else arrive())

    def _arrive_up(self, link: Link, data: bytes) -> None:
        self._world.note(f"link {link.number} up {data.decode()}")
        message = decode(data, UPWARD)
        if isinstance(message, Hello):
            link.presented = True
            self._listener().opened(link, message)
        else:
            self._listener().spoke(link, message)

    def _arrive_down(self, link: Link, data: bytes) -> None:
        self._world.note(f"link {link.number} down {data.decode()}")
        link.dialler.told(link, decode(data, DOWNWARD))

    def _dialler_learns(self, link: Link) -> None:
        if not link.dialler_knows:
            link.dialler_knows = True
            link.dialler.link_lost(link)

    def _listener_learns(self, link: Link) -> None:
        if not link.listener_knows:
            link.listener_knows = True
            if link.presented and link.life == self._listener().life:
                self._listener().closed(link)

    def _delay(self, dialler: Dialler) -> float:
        delay = 0.0002 + self._dice.expovariate(1 / 0.001)
        if self._dice.random() < LATE:
            delay *= 100
        return min(delay * dialler.slowness, DELAY_MAX_S)

    def _notice(self, *, quiet: bool) -> float:
        if quiet or self._dice.random() < HALF_OPEN:
            return self._dice.uniform(0.0, PING_LIMIT_S)
        return self._dice.uniform(0.0, 0.05)
