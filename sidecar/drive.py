"""The one loop every daemon runs: wait, hand events to the core, start effects."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from scout.clock import Instant

EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT_co = TypeVar("EffectT_co", covariant=True)
E = TypeVar("E")
F = TypeVar("F")

BATCH_MAX: Final = 256
"""Events handed to the core before timers are looked at again."""


class Core(Protocol[EventT_contra, EffectT_co]):
    """What a decision core promises its host."""

    def handle(self, event: EventT_contra, now: Instant) -> Sequence[EffectT_co]:
        """Take one event, return the effects it asks for, in order."""

    def handle_timer(self, now: Instant) -> Sequence[EffectT_co]:
        """Take the passing of time."""

    def next_deadline(self) -> Instant | None:
        """Return when `handle_timer` wants to be called next."""


def monotonic() -> Instant:
    """Return this machine's monotonic clock."""
    return Instant(time.monotonic_ns())


async def drive(core: Core[E, F], inbox: "asyncio.Queue[E]", start: Callable[[F], None]) -> None:
    """Run ``core`` until cancelled.  ``start`` must not block: completions return as events."""
    while True:
        batch = await _next_batch(inbox, core.next_deadline())
        for event in batch:
            for effect in core.handle(event, monotonic()):
                start(effect)
        deadline, now = core.next_deadline(), monotonic()
        if deadline is not None and now >= deadline:
            for effect in core.handle_timer(now):
                start(effect)


async def _next_batch(inbox: "asyncio.Queue[E]", deadline: Instant | None) -> list[E]:
    wait_s = None if deadline is None else max(0, deadline - monotonic()) / 1e9
    batch: list[E] = []
    try:
        async with asyncio.timeout(wait_s):
            batch.append(await inbox.get())
    except TimeoutError:
        return batch
    while len(batch) < BATCH_MAX and not inbox.empty():
        batch.append(inbox.get_nowait())
    return batch
