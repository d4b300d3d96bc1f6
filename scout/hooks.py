"""Who hears of results when a script names nobody: whoever attached this process.

One slot for the process, filled by the guest that a launcher brought.  Nothing here imports it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from scout.results import CheckResult, OrchestrationHooks, SCOUTFaultReport

_log: Final = logging.getLogger("outrider")


def nobody(*_: object) -> None:
    """Hear, and do nothing."""


NOBODY: Final = OrchestrationHooks(report_fault=nobody, report_result=nobody, report_trust=nobody)


@dataclass(slots=True)
class _Slot:
    hooks: OrchestrationHooks = NOBODY
    step: Callable[[], int] = int
    running: list[Callable[[], None]] = field(default_factory=list)


_SLOT: Final = _Slot()


def listen(hooks: OrchestrationHooks, step: Callable[[], int]) -> None:
    """Hear of everything from now on; ``step`` tells how many steps the job has completed."""
    _SLOT.hooks = hooks
    _SLOT.step = step


def running(close: Callable[[], None]) -> None:
    """Remember how to end a comparison that has begun in this process."""
    _SLOT.running.append(close)


def end_all() -> None:
    """End every comparison of this process; the process groups they used may be gone."""
    while _SLOT.running:
        _SLOT.running.pop()()


def listener() -> OrchestrationHooks:
    """Return who hears of results by default."""
    return _SLOT.hooks


def completed_steps() -> int:
    """Return how many steps the job has completed as far as the launcher's guest knows, or 0."""
    return _SLOT.step()


@dataclass(slots=True)
class Safely:
    """Hooks that never raise: an error in one of them is one line in the log, once."""

    hooks: OrchestrationHooks
    _failed: bool = False

    def fault(self, report: SCOUTFaultReport) -> None:
        """Tell of a fault."""
        self._tell(lambda: self.hooks.report_fault(report))

    def result(self, result: CheckResult) -> None:
        """Tell of a check."""
        self._tell(lambda: self.hooks.report_result(result))

    def trust(self, step: int, state: str, reason: str) -> None:
        """Tell how far a step can be trusted."""
        self._tell(lambda: self.hooks.report_trust(step, state, reason))

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - somebody else's code, inside training
            if not self._failed:
                self._failed = True
                _log.warning("outrider: a scout hook raised %s: %s", type(error).__name__, error)
