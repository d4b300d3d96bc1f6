"""The mark that says which sidecar a process comes from, and the end of those that carry one.

A worker is given its sidecar's mark in the environment and hands it on to all that it starts, into
whatever session or group.  The kernel shows the environment that a process was started with, so a
mark outlives both the worker and the sidecar.  Nothing else makes a process ours: neither its name
nor its number, session or parent.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sidecar.workers.processes import GONE, ProcessInfo, read_process, signal_process

SIDECAR_MARK_ENV: Final = "OUTRIDER_SIDECAR_MARK"
LOOK_PERIOD_S: Final = 0.05
"""Between two looks for processes that were killed, or were started in the meantime."""
ENDED_NAMED_MAX: Final = 1024
"""Processes that are told of by number; more are ended all the same."""
COMMAND_CHARS_MAX: Final = 120

_MARK: Final = re.compile(
    r"(?P<token>[0-9a-f]{32})\.(?P<node>[0-9a-f]{32})"
    r"\.(?P<pid>[1-9][0-9]{0,9})\.(?P<started>[0-9]{1,19})\.(?P<counted_in>[0-9-]{1,64})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarMark:
    """One sidecar process.  ``token`` is drawn once and tells it from every other.

    ``node`` stands for a node of a job, ``started`` is the process's start in clock ticks since
    boot, and ``counted_in`` names the kernel's namespaces in which ``pid`` and ``started`` hold.
    """

    token: str
    node: str
    pid: int
    started: int
    counted_in: str

    @classmethod
    def parse(cls, text: str) -> "SidecarMark | None":
        """Return the mark that ``text`` is, or None."""
        found = _MARK.fullmatch(text)
        if found is None:
            return None
        return cls(
            token=found["token"],
            node=found["node"],
            pid=int(found["pid"]),
            started=int(found["started"]),
            counted_in=found["counted_in"],
        )

    @property
    def text(self) -> str:
        """The mark as a variable's value."""
        return f"{self.token}.{self.node}.{self.pid}.{self.started}.{self.counted_in}"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variable that a worker is started with."""
        return {SIDECAR_MARK_ENV: self.text}

    def is_dead_predecessor(self, other: "SidecarMark") -> bool:
        """Return whether ``other`` was a sidecar of the same node whose process is gone.

        False where that cannot be told from here.
        """
        if (other.node, other.counted_in) != (self.node, self.counted_in):
            return False
        process = read_process(other.pid)
        gone = process is None or process.state in (GONE, "Z") or process.started != other.started
        return gone and other.token != self.token


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a search for marked processes came to: pid -> command of those that were killed."""

    killed: Mapping[int, str]
    left: tuple[int, ...]

    def __str__(self) -> str:
        """One line: each process by number and command, and those that would not go."""
        named = ", ".join(f"{pid} ({command})" for pid, command in self.killed.items())
        left = f"; still there: {', '.join(map(str, self.left))}" if self.left else ""
        return f"{named}{left}"


def end_marked(wanted: Callable[[SidecarMark], bool], *, limit_s: float) -> Ended:
    """Kill every process whose mark is ``wanted``, until a look finds none or ``limit_s`` is over.

    Only processes of this user are looked at, never this one.
    """
    deadline = time.monotonic() + limit_s
    killed: dict[int, str] = {}
    while True:
        found = [info for info, mark in _marked() if wanted(mark)]
        if not found or time.monotonic() >= deadline:
            return Ended(killed=killed, left=tuple(info.pid for info in found))
        for info in found:
            if info.pid not in killed and len(killed) < ENDED_NAMED_MAX:
                killed[info.pid] = _command(info.pid)
            with contextlib.suppress(PermissionError):  # it has become another user's since
                signal_process(info, signal.SIGKILL)
        time.sleep(LOOK_PERIOD_S)


def _marked() -> Iterator[tuple[ProcessInfo, SidecarMark]]:
    """Yield every other process of this user that carries a mark and is no older than it."""
    us, user = os.getpid(), os.geteuid()
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        # Its start is read first: should the number pass on meanwhile, the signal is not sent.
        info = read_process(pid)
        if info is None or pid == us:
            continue
        mark = _mark_of(pid, user)
        if mark is not None and info.started >= mark.started:
            yield info, mark


def _mark_of(pid: int, user: int) -> SidecarMark | None:
    folder = f"/proc/{pid}"
    try:
        if os.stat(folder).st_uid != user:  # noqa: PTH116 - once for every process there is
            return None
        environ = Path(folder, "environ").read_bytes()
    except OSError:
        return None
    name = f"{SIDECAR_MARK_ENV}=".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(name):
            return SidecarMark.parse(entry[len(name) :].decode(errors="replace"))
    return None


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return "?"
    text = words.decode(errors="replace").strip()
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    return printable[:COMMAND_CHARS_MAX] or "?"
