"""The guardian process: it outlives its sidecar just long enough to end what that had started.

A worker dies with its sidecar by the kernel's word, but what the worker has put into sessions of
its own does not.  This process waits for the sidecar's end, whatever it is, kills every process
that carries the sidecar's mark, and ends.  It decides nothing else, and holds nothing: every node
runs one all the time, so it imports little.
"""

import os
import select
import signal
import sys
from typing import Final

from sidecar.workers.marks import SidecarMark, end_marked

TRY_S_MAX: Final = 60.0
"""How long processes that outlive SIGKILL are tried again; they hang in the kernel."""
DEAF_TO: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal or a supervisor sends to all of a service: it ends when the sidecar has."""


def main() -> None:
    """Guard one sidecar: the first argument is its mark, standard input is open while it lives."""
    mark = SidecarMark.parse(sys.argv[1])
    if mark is None:
        sys.exit(f"{sys.argv[1]!r} is no sidecar's mark")
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    _await_end(mark.pid)
    ended = end_marked(lambda other: other.token == mark.token, limit_s=TRY_S_MAX)
    if ended.killed:
        sys.stderr.write(
            f"outrider: the sidecar (process {mark.pid}) is gone; its workers had left, and the"
            f" guardian ended: {ended}\n"
        )


def _await_end(sidecar: int) -> None:
    """Return when standard input is closed or the process has ended, whichever is first.

    A child of the sidecar that was forked just now may hold the pipe open; the kernel's word
    about the process then comes first.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLHUP)
    try:
        process = os.pidfd_open(sidecar)
    except ProcessLookupError:
        return
    if os.getppid() == sidecar:  # else it has ended, and the number may be another's
        poll.register(process, select.POLLIN)
        poll.poll()
