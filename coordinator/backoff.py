"""How long a job waits before it is started again: exponential, capped, with full jitter.

The jitter is applied after the cap, over the whole of it: jobs that broke together would otherwise
come back together, exactly at the maximum.  (Brooker, "Exponential Backoff And Jitter", 2015.)
The draw is an argument, so the same incident of the same job waits the same time.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.journal_format import Restart

_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffPolicy:
    """``first_s`` bounds the wait before the second restart without progress; each doubles it.

    The first restart does not wait.  A second is what a driver needs to let go of a device; a
    minute is what a storage or a network that went away needs to come back.
    """

    first_s: float = 1.0
    most_s: float = 60.0


def pause_s(policy: BackoffPolicy, repeated: int, draw: float) -> float:
    """Return the wait in seconds before a restart that ``repeated`` others came before.

    ``draw`` is uniform in [0, 1).
    """
    assert 0 <= draw < 1, "a draw is a part of the whole"
    if repeated <= 0:
        return 0.0
    doubled = policy.first_s * 2.0 ** min(repeated - 1, 64)
    return draw * min(policy.most_s, doubled)


def repeated(history: Sequence[Restart], cause: str) -> int:
    """Return how many of the last restarts began where the next one will: without progress."""
    origin, count = _origin(cause), 0
    for restart in reversed(history):
        if _origin(restart.cause) != origin:
            break
        count += 1
    return count


def draw(job: str, incident: str) -> float:
    """Return a number in [0, 1) that is spread over jobs and incidents and the same each time."""
    digest = hashlib.sha256(f"{job}/{incident}".encode()).digest()[:_DIGEST_BYTES]
    return int.from_bytes(digest) / float(1 << (8 * _DIGEST_BYTES)) % 1.0


def _origin(cause: str) -> str:
    return cause.rpartition("@")[2]
