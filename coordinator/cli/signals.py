r"""Which signals ask a command to leave, beside Ctrl-C.

They are a scheduler's, that of a terminal that closes, and Ctrl-\.  A signal that was
ignored before we were started, as under ``nohup``, stays ignored.
"""

import signal
import sys
from typing import NoReturn

from coordinator.cli.errors import TERMINATED


def asks_to_leave() -> tuple[signal.Signals, ...]:
    """Return those signals that somebody may send us."""
    all_of_them = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    return tuple(number for number in all_of_them if signal.getsignal(number) is not signal.SIG_IGN)


def leave_politely() -> None:
    """Let such a signal end the process as an exception does: what was begun is taken away."""
    for number in asks_to_leave():
        signal.signal(number, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    del number, frame
    sys.exit(TERMINATED)
