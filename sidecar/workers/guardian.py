"""The sidecar's side of the guardian, and the mark that the guardian looks for.

See `sidecar.workers.guard` for the process itself.
"""

import hashlib
import logging
import os
import secrets
import subprocess
from typing import Final

from sidecar.own_process import own_command
from sidecar.workers.marks import SidecarMark, end_marked
from sidecar.workers.processes import read_process

_LOG: Final = logging.getLogger("outrider.sidecar")
MODULE: Final = "sidecar.workers.guard"
NAMESPACES: Final = ("pid", "time")
"""Where process numbers and start times are counted: a mark from another one says nothing here."""
LEFTOVERS_S_MAX: Final = 10.0
"""A killed process is gone within milliseconds, unless the kernel holds it."""


def draw_mark(job: str, node: str) -> SidecarMark:
    """Draw the mark of a sidecar of ``node`` in this process."""
    us = read_process(os.getpid())
    assert us is not None, "this process exists"
    return SidecarMark(
        token=secrets.token_hex(16),
        node=hashlib.sha256(f"{job}\0{node}".encode()).hexdigest()[:32],
        pid=us.pid,
        started=us.started,
        counted_in=_namespaces(),
    )


def _namespaces() -> str:
    return "-".join(str(_inode(f"/proc/self/ns/{name}")) for name in NAMESPACES)


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - it need not be a path
    except OSError:  # a kernel without this kind of namespace has but one
        return 0


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
