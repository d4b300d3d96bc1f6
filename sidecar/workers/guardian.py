"""A small process that outlives its sidecar just long enough to end what the sidecar started.

A worker dies with its sidecar by the kernel's word, but what the worker has put into sessions of
its own does not.  The guardian waits for the sidecar's end, whatever it is, kills every process
that carries the sidecar's mark, and ends.  It decides nothing else, and holds nothing.
"""

import logging
import os
import select
import signal
import subprocess
import sys
from typing import Final

from sidecar.own_process import own_command
from sidecar.workers.marks import SidecarMark, end_marked

MODULE: Final = "sidecar.workers.guardian"
TRY_S_MAX: Final = 60.0
"""How long processes that outlive SIGKILL are tried again; they hang in the kernel."""
LEFTOVERS_S_MAX: Final = 10.0
"""A killed process is gone within milliseconds, unless the kernel holds it."""
DEAF_TO: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal or a supervisor sends to all of a service: it ends when the sidecar has."""

_LOG: Final = logging.getLogger("outrider.sidecar")


class Guardian:
    """The sidecar's side: one guardian, started again should it have been killed."""

    def __init__(self, mark: SidecarMark) -> None:
        self.mark: Final = mark
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> frozenset[int]:
        """Return the process, which is no worker and nobody's orphan."""
        return frozenset() if self._process is None else frozenset({self._process.pid})

    def begin(self) -> None:
        """Start it, after ending what this node's killed sidecars left if theirs was killed too.

        Blocks for as long as that takes, at most `LEFTOVERS_S_MAX`.
        """
        ended = end_marked(self.mark.is_dead_predecessor, limit_s=LEFTOVERS_S_MAX)
        if ended.killed:
            _LOG.warning("ended what a killed sidecar of this node had left: %s", ended)
        self.ensure()

    def ensure(self) -> None:
        """Start a guardian unless one runs."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            _LOG.warning("the guardian of the workers' children was ended; starting another")
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                own_command(MODULE, self.mark.text),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # what ends the sidecar's group must not end it
            )
        except OSError as error:
            self._process = None
            _LOG.warning(
                "no guardian (%s): should this sidecar be killed, what its workers put into"
                " sessions of their own lives until the node's next sidecar starts",
                error,
            )

    def close(self, limit_s: float) -> None:
        """Let it look one last time, and wait up to ``limit_s`` for its end."""
        if self._process is None:
            return
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _LOG.warning("the guardian still waits for processes that outlive SIGKILL")
        self._process = None


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
