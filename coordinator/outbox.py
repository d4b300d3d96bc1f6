"""The order of effects: what must be durable is durable before anything after it is done.

The core's effects queue here as they come.  A `Persist` is awaited before any later effect is
executed, so that no command overtakes the commit that remembers it; commits that stand next to
one another become one transaction.  What an effect does is not known here.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from coordinator.events import Effect, Persist, Say
from coordinator.incidents import Incident
from coordinator.journal_format import DurableState, JournalError

EFFECTS_MAX: Final = 131_072
"""Effects that may wait: a broadcast to 10 000 nodes several times over.  Beyond it the disk has
stood still for so long that going on would command from memory alone."""

Commit: TypeAlias = Callable[[DurableState, Sequence[Incident]], Awaitable[None]]


class Outbox:
    """Effects on their way out, in the core's order."""

    def __init__(self, *, commit: Commit, execute: Callable[[Effect], None]) -> None:
        self._commit = commit
        self._execute = execute
        self._waiting: deque[Effect] = deque()
        self._filled = asyncio.Event()

    def put(self, effect: Effect) -> None:
        """Queue one effect.  Raises `JournalError` when the journal is hopelessly behind."""
        if len(self._waiting) >= EFFECTS_MAX:
            raise JournalError(
                f"the journal does not keep up: {EFFECTS_MAX} effects wait for a commit; look at"
                " the disk of the state directory"
            )
        self._waiting.append(effect)
        self._filled.set()

    async def run(self) -> None:
        """Carry out effects until cancelled.  Raises `JournalError` when a commit fails."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                if isinstance(self._waiting[0], Persist):
                    await self._commit_adjacent()
                else:
                    self._execute(self._waiting.popleft())

    async def _commit_adjacent(self) -> None:
        """Commit the run of persists at the head; lines for the log between them may wait."""
        lines: list[Say] = []
        incidents: dict[str, Incident] = {}
        state: DurableState | None = None
        while self._waiting and isinstance(self._waiting[0], Persist | Say):
            match self._waiting.popleft():
                case Persist() as persist:
                    state = persist.state
                    if persist.incident is not None:
                        incidents[persist.incident.id] = persist.incident
                case Say() as line:
                    lines.append(line)
        assert state is not None, "called with a persist at the head"
        await self._commit(state, list(incidents.values()))
        for line in lines:
            self._execute(line)
