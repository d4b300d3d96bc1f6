"""What a script says about itself because no hook can see it: long phases and waits for data.

A declared phase may last as long as it says without being called a stall.  Every call works
without a sidecar, and then does nothing.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar

from scout.clock import seconds
from scout.hang import Phase
from worker_shim.track import DETAIL_CODES, Before, Track

LIMIT_S_MAX: Final = 7 * 86_400.0
"""Longest declared phase.  Whoever needs a week without progress has switched the watch off."""

CheckpointDirection = Literal["read", "write"]
T = TypeVar("T")

_PHASES: Final = {phase.name.lower(): phase for phase in Phase}


class DeclaredPhase(contextlib.ContextDecorator):
    """A phase that stands from ``with`` to its end.  One object may be entered several times."""

    def __init__(
        self, track: Track | None, phase: Phase, limit_ns: int | None, detail: int = 0
    ) -> None:
        self._track = track
        self._words = (phase, limit_ns, detail)
        self._before: list[Before | None] = []

    def __enter__(self) -> Self:
        if self._track is not None:
            self._before.append(self._track.declare(*self._words))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._track is not None and self._before:
            self._track.withdraw(self._before.pop())


def declared_phase(
    track: Track | None, name: str, limit_s: float | None, complain: Callable[[str], None]
) -> DeclaredPhase:
    """Return the context of a phase.  What makes no sense is complained of and left out."""
    phase = _PHASES.get(str(name).lower())
    if phase is None:
        known = ", ".join(sorted(_PHASES))
        complain(f"phase {name!r} is none of {known}; only its limit is published")
    return DeclaredPhase(track, phase or Phase.UNKNOWN, _limit_ns(limit_s, complain))


def checkpoint_phase(
    track: Track | None, direction: str, limit_s: float | None, complain: Callable[[str], None]
) -> DeclaredPhase:
    """Return the context of reading or writing a checkpoint."""
    detail = DETAIL_CODES.get(str(direction), 0)
    if not detail:
        complain(f'checkpoint_io is "read" or "write", not {direction!r}')
    return DeclaredPhase(track, Phase.CHECKPOINT, _limit_ns(limit_s, complain), detail)


def _limit_ns(limit_s: float | None, complain: Callable[[str], None]) -> int | None:
    if limit_s is None:
        return None
    try:
        limit = float(limit_s)
    except (TypeError, ValueError):
        limit = math.nan
    if not 0 < limit <= LIMIT_S_MAX:
        complain(f"a phase's limit is above 0 and at most {LIMIT_S_MAX:.0f} s, not {limit_s!r}")
        return None
    return max(1, seconds(limit))


class WatchedLoader(Generic[T]):
    """A loader whose waits are published; in everything else it is the loader."""

    def __init__(self, track: Track, loader: Iterable[T]) -> None:
        self._track = track
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        before = self._track.enter(Phase.DATA)
        try:
            batches = iter(self._loader)
        finally:
            self._track.leave(before)
        return _WatchedIterator(self._track, batches)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type] # raises what the loader raises

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _WatchedIterator(Iterator[T]):
    def __init__(self, track: Track, batches: Iterator[T]) -> None:
        self._track = track
        self._batches = batches

    def __next__(self) -> T:
        before = self._track.enter(Phase.DATA)
        try:
            return next(self._batches)
        finally:
            self._track.leave(before)
