"""Which phase the training thread is in, read from its stack ten times a second.

Hooks would tell it too, but each is a call out of torch into Python that finds cold caches, in
every step.  The functions of torch that a phase consists of are known by their code, and the
background thread looks which of them the training thread is inside of: that costs the training
thread nothing, sees a model that is compiled whole, and leaves modules as they are.

Of several known functions inside one another the innermost counts, with one exception: whatever
runs inside backward is backward, a forward pass that recomputes activations included.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

from scout.hang import Phase

FRAMES_MAX: Final = 512
"""Frames looked at, from the innermost; a model nests a few dozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Where the thread was seen: ``phase`` None is in none of the known functions.

    ``spot`` is the id of the innermost watched module that is being called, 0 for none: where it
    changes, a pass moves.  ``is_evaluating`` is whether a watched model's mode says so.
    """

    phase: Phase | None = None
    spot: int = 0
    is_evaluating: bool = False


NOWHERE: Final = Sighting()


class StackSampler:
    """Knows the code of torch's functions."""

    def __init__(self, is_watched: Callable[[Any], bool]) -> None:
        self._is_watched = is_watched
        self._phases: dict[CodeType, Phase] = {}
        self._module_call: CodeType | None = None

    def know(self, function: Any, phase: Phase) -> None:
        """Take ``function`` for a sign of ``phase``.  Raises `AttributeError` for one in C."""
        self._phases[function.__code__] = phase

    def know_module_call(self, function: Any) -> None:
        """Take ``function`` for the call of any module, whose first argument is the module."""
        self._module_call = function.__code__
        self.know(function, Phase.FORWARD)

    def sample(self, thread: int) -> Sighting:
        """Return where ``thread`` (an identity of `threading`) is."""
        return self.judge(sys._current_frames().get(thread))  # noqa: SLF001 - documented, in spite of its name

    def judge(self, frame: FrameType | None) -> Sighting:
        """Return what a stack shows, given its innermost frame."""
        phase: Phase | None = None
        spot, is_evaluating = 0, False
        for _ in range(FRAMES_MAX):
            if frame is None:
                break
            code = frame.f_code
            known = self._phases.get(code)
            if known is not None:
                if phase is None or known is Phase.BACKWARD:
                    phase = known
                if code is self._module_call:
                    module = frame.f_locals.get(code.co_varnames[0])
                    if module is not None and self._is_watched(module):
                        spot = spot or id(module)
                        is_evaluating = is_evaluating or not module.training
            frame = frame.f_back
        return Sighting(phase=phase, spot=spot, is_evaluating=is_evaluating)
