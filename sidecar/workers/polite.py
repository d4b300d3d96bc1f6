"""Asking workers to leave before they are killed: SIGUSR1, then SIGTERM, then the deadline.

SIGUSR1 asks a training loop to save and leave; a worker that does not handle it would die of it,
so it goes only to those that do, and only to the worker itself.  Who has not left by half of the
time, or handles none, gets SIGTERM with its whole group.  A stopped process can hear neither and
is killed at once.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sidecar.workers.processes import process_state, signal_group

SHARE_FOR_SAVING: Final = 0.5
"""Part of the time that a worker has between SIGUSR1 and SIGTERM."""


class Courtesy:
    """One stop's polite part; ``now`` and deadlines are the event loop's seconds."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._told: dict[int, set[signal.Signals]] = {}

    def ask(self, pids: Iterable[int], deadline: float, now: float) -> None:
        """Send each worker what it is to be told at this moment, once."""
        saving = now < self._began + SHARE_FOR_SAVING * (deadline - self._began)
        for pid in pids:
            told = self._told.setdefault(pid, set())
            if told and process_state(pid) in "Tt" and now < deadline:
                signal_group(pid, signal.SIGKILL)
            elif saving and (signal.SIGUSR1 in told or catches(pid, signal.SIGUSR1)):
                if signal.SIGUSR1 not in told:
                    told.add(signal.SIGUSR1)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)  # not reaped yet: the number is still its own
            elif signal.SIGTERM not in told:
                told.add(signal.SIGTERM)
                signal_group(pid, signal.SIGTERM)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return True when the process has a handler for this signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace")
    except OSError:
        return False
    line = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt:\t0")
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
