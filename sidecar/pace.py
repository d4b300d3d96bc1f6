"""Reads a peer that talks too fast more slowly; the kernel then holds it back."""

import asyncio


class Pace:
    """A token bucket of one connection: ``per_second`` messages, and ``burst`` at once."""

    __slots__ = ("_burst", "_filled_at", "_left", "_per_second")

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left = burst
        self._filled_at = asyncio.get_running_loop().time()

    async def keep(self) -> None:
        """Count one message, and wait where there have been too many."""
        now = asyncio.get_running_loop().time()
        refill = (now - self._filled_at) * self._per_second
        self._left = min(self._burst, self._left + refill) - 1
        self._filled_at = now
        if self._left < 0:
            await asyncio.sleep(-self._left / self._per_second)
