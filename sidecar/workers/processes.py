"""What the kernel says about processes: states, families, and who must go.

Reads ``/proc`` and signals through pidfds, so that a number that was given to another process in
the meantime is never hit.  It decides nothing about generations or ranks.
"""

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_PTRACER: Final = 0x59616D61
"""Yama's: who may look into this process although it is no ancestor.  Survives exec."""

ANCESTORS_MAX: Final = 64
"""Generations that are followed; pids that are given anew while we look cannot make a circle."""
STAT_BYTES_MAX: Final = 4096
"""A name of 64 bytes and some fifty numbers need a quarter of it."""
GONE: Final = "X"
"""Process state letter of a process that does not exist."""
UNSEEN: Final = "?"
"""In place of that letter, where the kernel could not be asked."""
_NOTHING_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of what a look needs.  It says nothing of the process: taken for an absence, it would let a
living one go."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PRCTL: Final = _LIBC.prctl
_PRCTL.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One line of ``/proc/<pid>/stat``.  ``started`` tells two owners of one pid apart."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int


def become_subreaper() -> bool:
    """Make orphans of our workers our children.  Returns False where the kernel refuses."""
    return int(_PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return a function for the child between fork and exec: SIGKILL when ``parent`` ends.

    It also lets ``parent`` and its children read the child's stacks, where the kernel asks.
    """
    prctl, getppid, leave = _PRCTL, os.getppid, os._exit

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        prctl(PR_SET_PTRACER, parent, 0, 0, 0)
        if getppid() != parent:  # it ended before the line above
            leave(127)

    return prepare


def read_process(pid: int) -> ProcessInfo | None:
    """Return what the kernel says about ``pid``, or None when there is no such process.

    Raises `OSError` when no descriptor or no memory is left to ask it.
    """
    rest = _stat_fields(pid)
    if rest is None:
        return None
    return ProcessInfo(
        pid=pid,
        state=rest[0],
        parent=int(rest[1]),
        group=int(rest[2]),
        session=int(rest[3]),
        started=int(rest[19]),
    )


def process_state(pid: int) -> str:
    """Return the state letter of ``pid``: `GONE` when it does not exist, or else `UNSEEN`."""
    try:
        rest = _stat_fields(pid)
    except OSError:
        return UNSEEN
    return GONE if rest is None else rest[0]


def _stat_fields(pid: int) -> list[str] | None:
    """Return what stands behind the name in ``/proc/<pid>/stat``; asked many times a second."""
    try:
        handle = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOTHING_LEFT:
            raise
        return None
    try:
        text = os.read(handle, STAT_BYTES_MAX)
    except OSError:  # it ended since
        return None
    finally:
        os.close(handle)
    # The name stands in parentheses and may itself hold blanks and parentheses.
    return text[text.rfind(b")") + 2 :].decode("ascii", errors="replace").split()


def all_processes() -> dict[int, ProcessInfo]:
    """Return every process that can be seen, by pid.  Raises `OSError` as `read_process` does."""
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    found = (read_process(pid) for pid in pids)
    return {info.pid: info for info in found if info is not None}


def descendants(root: int, table: Mapping[int, ProcessInfo]) -> set[int]:
    """Return every pid below ``root`` in ``table``."""
    children: dict[int, list[int]] = {}
    for info in table.values():
        children.setdefault(info.parent, []).append(info.pid)
    below: set[int] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in below:
                below.add(pid)
                todo.append(pid)
    return below


def ancestors(pid: int) -> Iterator[int]:
    """Yield ``pid``, its parent, and so on, as far as they are there and can be seen."""
    for _ in range(ANCESTORS_MAX):
        yield pid
        try:
            info = read_process(pid)
        except OSError:
            return
        if info is None or info.parent <= 1:
            return
        pid = info.parent


def carries_mark(pid: int, name: str, marks: Iterable[str]) -> bool:
    """Return whether the environment ``pid`` was started with has ``name`` set to a mark.

    Raises `OSError` as `read_process` does.
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError as error:
        if error.errno in _NOTHING_LEFT:
            raise
        return False
    wanted = {f"{name}={mark}".encode() for mark in marks}
    return not wanted.isdisjoint(environ.split(b"\0"))


def uses_torch(pid: int) -> bool:
    """Return whether ``pid`` has torch's library loaded."""
    try:
        return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False


def signal_process(info: ProcessInfo, number: signal.Signals) -> None:
    """Signal exactly the process in ``info``; a later owner of its pid is left alone.

    Raises `OSError` as `read_process` does, and `PermissionError` for another user's.
    """
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(info.pid)
        try:
            present = read_process(info.pid)
            if present is not None and present.started == info.started:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def signal_group(leader: int, number: signal.Signals) -> None:
    """Signal the process group of ``leader``, whose pid the caller still holds unreaped."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def reap(pid: int) -> int | None:
    """Collect the wait status of our child ``pid``; None while it lives or when it is not ours."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found == pid else None
