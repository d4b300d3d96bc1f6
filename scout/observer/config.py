"""Who an observer watches, whom it talks to, and where: settled before it starts.

Where observers meet follows from what is given: an address or a port means TCP, a folder alone
means files in it, and nothing at all means TCP on a port that every rank derives alike from the
run and its generation.  This module reads no environment and opens nothing.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

PORT_MIN: Final = 20_000
PORTS: Final = 12_000
"""Derived ports lie below the range from which systems hand out ephemeral ones."""
MEETING_PORTS: Final = 4
"""Ports tried in turn, so that a foreign listener on one of them is no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverConfig:
    """One observer.

    ``page`` and ``token`` open the rank's progress page; ``pid`` is the training process.
    ``address`` and ``port`` are where rank 0's observer listens; with ``address`` None the
    observers meet in ``folder``.  ``status`` is the file that tells what the observer is doing.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    run: str
    generation: int
    pid: int
    page: str
    token: int
    status: str
    gpu: int | None = None
    address: str | None = None
    port: int | None = None
    folder: str | None = None
    secret: str = ""
    stall_timeout_s: float = 30.0
    """Longest silence of a rank in any phase that was not declared."""
    stall_timeout_min_s: float = 10.0
    stall_factor: float = 10.0
    data_timeout_s: float = 10.0
    checkpoint_timeout_s: float = 60.0
    stage_ratio: float = 2.0
    stage_rounds: int = 2
    join_within_s: float = 120.0
    """A rank that was not heard of by then counts as absent."""
    silent_after_s: float = 3.0
    """An observer that says nothing for so long does not answer."""

    def to_json(self) -> str:
        """Return it as text for the observer's standard input."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build it from `to_json`'s text.  Raises `ValueError` or `TypeError`."""
        body: dict[str, Any] = json.loads(text)
        return cls(**body)

    @property
    def key(self) -> str:
        """What members of one run and generation share, and no other run knows."""
        told = f"{self.run}|{self.generation}|{self.world_size}|{self.secret}"
        return hashlib.sha256(told.encode()).hexdigest()

    @property
    def ports(self) -> tuple[int, ...]:
        """Where to look for rank 0's observer, in order."""
        return (self.port,) if self.port else derived_ports(self.run, self.generation)


def meeting(
    *, address: str | None, port: int | None, folder: str | None, fallback: str
) -> tuple[str | None, int | None, str | None]:
    """Return address, port and folder of the exchange; exactly one of address and folder is set.

    ``fallback`` is the address of the process group's master.
    """
    if address is None and port is None and folder is not None:
        return None, None, folder
    return address or fallback, port, None


def derived_ports(run: str, generation: int) -> tuple[int, ...]:
    """Return ports that all observers of a generation come to, and rarely those of another."""
    digest = hashlib.sha256(f"outrider observer|{run}|{generation}".encode()).digest()
    first = int.from_bytes(digest[:8], "big")
    return tuple(PORT_MIN + (first + 97 * turn) % PORTS for turn in range(MEETING_PORTS))
