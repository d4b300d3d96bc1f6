"""What the training thread is doing, kept here for whoever publishes it.

Hooks say what they see (`mark`, `enter` and `leave`), the script says what no hook can see
(`declare`): a phase that the script declared stands until it ends, and whatever hooks see
meanwhile only shows that it moves.  This module knows no torch.

After a kernel that took milliseconds the processor's caches hold nothing of ours, and every line
touched is paid for.  So a completed step is two numbers on the page; what happens within a step is
noted in another or read from the thread's stack by the background thread, once steps fail to come;
a collective and a declared phase are published whole, at once.  Nothing here raises into training:
a page that cannot be written any more is let go of, with one line in the rank's log.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from scout.hang import Phase
from scout.page_layout import DETAILS, STEP_WORD, STEPPED_WORD, Movement, pack_what
from scout.progress import PageWriter
from worker_shim.session import StepCounter
from worker_shim.stack_sample import NOWHERE, Sighting

DECLARED_MAX: Final = 32
"""Declared phases inside one another; a script that nests deeper forgot to leave some."""

_UNKNOWN: Final = int(Phase.UNKNOWN)
_UNSEEN: Final = (_UNKNOWN, (0, 0))

_log: Final = logging.getLogger("outrider")
_now: Final = time.monotonic_ns
_thread: Final = threading.get_ident


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What to go back to when a phase ends."""

    phase: int
    started_ns: int
    limit_ns: int
    detail: int


class Track:
    """One rank's position.  Belongs to the training thread, except where a method says more."""

    def __init__(self, page: PageWriter, steps: StepCounter) -> None:
        self._write: Callable[..., None] = page.write
        self._live: Any = page.words
        self.steps = steps
        self.thread = _thread()
        """The thread that trains: the one that attached, until another one steps."""
        self.phase: int = Phase.UNKNOWN
        self.moves = 0
        """Counts whatever a hook sees."""
        self.entries = 0
        """Counts changes of the phase."""
        self._started_ns = _now()
        self._started_entry = 0
        self.stepped_ns = 0
        """When the last optimizer step was complete, 0 before the first."""
        self._noted_ns = 0
        self._noted_moves = 0
        self._sighting = NOWHERE
        self._sighted_step = 0
        self._kept: tuple[int, tuple[int, int]] = _UNSEEN
        self._movement: Movement | None = None
        self._movement_entry = 0
        self._published_ns = 0
        self._limit_ns = 0
        self._detail = 0
        self._declared: list[Before] = []
        self._group = 0
        self._count = 0
        self._fingerprint = 0
        self._operation = 0
        self._since_ns = 0
        self._unstepped = True
        self._what = 0
        self._describe()

    # --- what hooks see -------------------------------------------------------------------

    def mark(self, phase: int) -> None:
        """Note that something moved, and that it was in ``phase``.  For any of torch's threads."""
        self.moves += 1
        if phase != self.phase and not self._declared:
            self.phase = phase
            self.entries += 1

    def enter(self, phase: int) -> int | None:
        """Enter ``phase``; None, and nothing noted, for a thread that does not train."""
        if _thread() != self.thread:
            return None
        before = self.phase
        self.mark(phase)
        return before

    def leave(self, before: int | None) -> None:
        """Go back to where `enter` came from."""
        if before is not None:
            self.mark(before)

    def stepped(self) -> None:
        """Count an optimizer step as complete, on the page too; what follows it is not known.

        Everything else about it the background thread writes.
        """
        step = self.steps.advance()
        self.stepped_ns = now = _now()
        if self._unstepped or self.phase != _UNKNOWN:
            self._end_phase(now)
        try:
            self._live[STEPPED_WORD] = now
            self._live[STEP_WORD] = step + 1
        except ValueError as error:
            self._let_go(error)

    def _end_phase(self, now: int) -> None:
        """Publish a first step, and one that ends what the thread said it was in."""
        self._unstepped = False
        self._describe()
        if not self._declared:
            self._turn_to(_UNKNOWN, now)
        self._publish(now)

    # --- what the background thread makes of it --------------------------------------------

    def note(self, now: int, *, is_heard: bool) -> None:
        """Date what was noted since the last call, and what was heard of elsewhere, as of now."""
        moves = self.moves
        if is_heard or moves != self._noted_moves:
            self._noted_moves, self._noted_ns = moves, now

    def observe(self, now: int, sighting: Sighting = NOWHERE) -> Movement | None:
        """Return where the thread is and when it last moved, after `note`.

        What was said stands before what was seen; after the last that was seen of a step nothing
        else is known until the step ends.
        """
        phase, entries, step = self.phase, self.entries, self.steps.step
        at = step, self._noted_moves
        if sighting != (self._sighting if self._sighted_step == step else NOWHERE):
            self._noted_ns = now
        self._sighting, self._sighted_step = sighting, step
        if sighting.phase is not None:
            is_evaluation = sighting.phase is Phase.FORWARD and sighting.is_evaluating
            self._kept = Phase.EVALUATE if is_evaluation else sighting.phase, at
        if phase == _UNKNOWN and self._kept[1] == at:
            phase = self._kept[0]
        moved_ns = max(self._noted_ns, self.stepped_ns, self._published_ns)
        if not moved_ns:
            return None
        held = self._movement
        is_same = held is not None and (phase, entries) == (held.phase, self._movement_entry)
        started_ns = held.started_ns if held is not None and is_same else now
        self._movement_entry = entries
        self._movement = Movement(phase=phase, started_ns=started_ns, moved_ns=moved_ns)
        return self._movement

    def silent_ns(self, now: int) -> int:
        """Return for how long nothing was seen or published, 0 while nothing ever was.

        For the background thread, after `observe`.
        """
        last = 0 if self._movement is None else self._movement.moved_ns
        return now - last if last else 0

    # --- what the script says -------------------------------------------------------------

    def declare(self, phase: int, limit_ns: int | None, detail: int = 0) -> Before | None:
        """Enter a phase that stands until `withdraw`.  None for a thread that does not train.

        Without a limit it has what is left of the limit of the phase around it.
        """
        if _thread() != self.thread or len(self._declared) >= DECLARED_MAX:
            return None
        now = self._settle(_now())
        before = Before(
            phase=self.phase,
            started_ns=self._started_ns,
            limit_ns=self._limit_ns,
            detail=self._detail,
        )
        left = max(1, self._limit_ns - (now - self._started_ns)) if self._limit_ns else 0
        self._declared.append(before)
        self._turn_to(phase, now)
        self._detail = detail
        self._limit_ns = left if limit_ns is None else limit_ns
        self._describe()
        self._publish(now)
        return before

    def withdraw(self, before: Before | None) -> None:
        """End a declared phase, and those inside it that were never ended."""
        if before is None or not any(it is before for it in self._declared):
            return
        while self._declared.pop() is not before:
            pass
        self._turn_to(before.phase, before.started_ns)
        self._limit_ns, self._detail = before.limit_ns, before.detail
        self._describe()
        self._publish(_now())

    # --- collectives ----------------------------------------------------------------------

    def enter_collective(
        self, group: int, fingerprint: int | None, operation: int, count: int | None = None
    ) -> tuple[int, int] | None:
        """Say that the training thread is inside a collective from now on."""
        if _thread() != self.thread:
            return None
        self._group, self._operation = group, operation
        self._count = 0 if count is None else count + 1
        self._fingerprint = 0 if fingerprint is None else fingerprint + 1
        self._since_ns = now = self._settle(_now())
        before = (self.phase, self._started_ns)
        if not self._declared:
            self._turn_to(Phase.COLLECTIVE, now)
        self._describe()
        self._publish(now)
        return before

    def leave_collective(self, before: tuple[int, int] | None) -> None:
        """Say that it came out."""
        if before is not None:
            self._since_ns = 0
            if not self._declared:
                self._turn_to(*before)
            self._describe()
            self._publish(_now())

    # --- the page -------------------------------------------------------------------------

    def turn_to(self, page: PageWriter) -> None:
        """Publish on ``page`` from now on; of what was before, nothing stands."""
        self._declared.clear()
        self._limit_ns = self._detail = 0
        self._group = self._count = self._fingerprint = self._operation = self._since_ns = 0
        self._unstepped = True
        self.moves = self._noted_moves = 0
        self.stepped_ns = self._noted_ns = self._published_ns = 0
        self._turn_to(_UNKNOWN, _now())
        self._describe()
        self._write, self._live = page.write, page.words
        self._sighting, self._kept, self._movement = NOWHERE, _UNSEEN, None

    def silence(self) -> None:
        """Publish nothing from now on."""
        self._write, self._live = _say_nothing, [0] * (STEPPED_WORD + 1)

    def _describe(self) -> None:
        self._what = pack_what(
            self._operation, self._since_ns != 0, self._detail, unstepped=self._unstepped
        )

    def _turn_to(self, phase: int, started_ns: int) -> None:
        self.phase, self._started_ns = phase, started_ns
        self.entries += 1
        self._started_entry = self.entries

    def _settle(self, now: int) -> int:
        """Date a phase that was only noted: it began since the last publication."""
        if self.entries != self._started_entry:
            self._started_entry = self.entries
            self._started_ns = now
        return now

    def _publish(self, now: int) -> None:
        if self.entries != self._started_entry:
            self._settle(now)
        self._published_ns = now
        step = self.steps.step
        try:
            if not self._unstepped:
                self._live[STEP_WORD] = step + 1
            self._write(
                step,
                self.phase,
                self._started_ns,
                0,
                self._fingerprint,
                now,
                self._limit_ns,
                self._group,
                self._what,
                self._since_ns,
                self._count,
            )
        except (ValueError, struct.error) as error:
            self._let_go(error)

    def _let_go(self, error: Exception) -> None:
        self.silence()
        _log.warning("outrider: progress is no longer published: %s", error)


def _say_nothing(*_words: int) -> None:
    """In the place of a page that is not ours any more."""


DETAIL_CODES: Final = {name: code for code, name in enumerate(DETAILS)}
