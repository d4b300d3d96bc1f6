"""Descendants that outlive their worker: which they are, and how they are ended.

A process is ours when it hangs below the sidecar (its subreaper) and stands in a worker's session,
carries a worker's mark, or descends from such a one.  Nobody else is touched, whatever its number.
"""

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sidecar.workers.environment import LAUNCH_MARK_ENV
from sidecar.workers.marks import SIDECAR_MARK_ENV
from sidecar.workers.processes import (
    ProcessInfo,
    all_processes,
    carries_mark,
    descendants,
    reap,
    signal_process,
)

WORKERS_REMEMBERED_MAX: Final = 4096
"""Workers whose sessions and marks are kept: 64 a node for 64 generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A copy of what is known about our workers, for a look from another thread.

    ``marks`` maps every worker ever started to its mark, ``running`` are those not reaped yet,
    ``keep`` those of them that stay.  ``sidecar_mark`` is what they have in common, and what is
    left of a warm worker, whose forked children show the environment of the process it came from.
    ``sole_parent`` makes every other child of this process
    an orphan.
    """

    marks: Mapping[int, str]
    running: frozenset[int]
    keep: frozenset[int]
    sidecar_mark: str | None
    sole_parent: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What needs another look: orphans by pid, and why some may not have been seen at all."""

    pids: tuple[int, ...]
    unseen: str | None

    @property
    def nobody(self) -> bool:
        """Whether all was seen and none is left."""
        return not self.pids and self.unseen is None

    def told(self, workers: Iterable[int]) -> str:
        """Return one sentence about those and the ``workers`` that outlive SIGKILL as well."""
        if self.unseen is not None:
            return f"whether every process has ended cannot be seen ({self.unseen}); looking again"
        pids = sorted({*self.pids, *workers})
        return f"processes {pids} outlive SIGKILL; they hang in the kernel"


def kill_orphans(family: Family) -> Left:
    """Kill and reap orphans; return what needs another look."""
    left: list[int] = []
    try:
        table = all_processes()
        for pid in sorted(_orphans(family, table)):
            info = table[pid]
            if info.state != "Z":
                left.append(pid)
                signal_process(info, signal.SIGKILL)
            elif info.parent == os.getpid():
                reap(pid)
            else:  # becomes ours to reap when its parent is gone
                left.append(pid)
    except OSError as error:  # no descriptor is left to look with
        return Left(pids=tuple(left), unseen=error.strerror or str(error))
    return Left(pids=tuple(left), unseen=None)


def find_strays(family: Family) -> tuple[int, ...]:
    """Return orphans that ended by themselves and wait for us, none where nobody can be seen."""
    us = os.getpid()
    try:
        table = all_processes()
    except OSError:  # as above; the next look comes soon
        return ()
    return tuple(
        info.pid
        for info in table.values()
        if info.parent == us
        and info.state == "Z"
        and info.pid not in family.marks
        and (family.sole_parent or info.session in family.marks)
    )


def _orphans(family: Family, table: Mapping[int, ProcessInfo]) -> set[int]:
    us = os.getpid()
    leaders = family.marks.keys() - family.keep
    marks = [family.marks[leader] for leader in leaders]
    spared = family.running.union(*(descendants(leader, table) for leader in family.keep))
    candidates = descendants(us, table) - spared

    def ours(info: ProcessInfo) -> bool:
        if info.session in leaders:
            return True
        if info.parent != us:
            return False
        return (
            family.sole_parent
            or carries_mark(info.pid, LAUNCH_MARK_ENV, marks)
            or (
                family.sidecar_mark is not None
                and not family.keep
                and carries_mark(info.pid, SIDECAR_MARK_ENV, [family.sidecar_mark])
            )
        )

    roots = {pid for pid in candidates if ours(table[pid])}
    return roots.union(*(descendants(root, table) for root in roots)) - spared
