"""One process of a node: what is known of it while it runs, and what its end or its failure says.

It starts nothing, kills nothing and waits for nothing.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sidecar.api import ExitCause
from sidecar.workers.files import LogFiles


@dataclass(slots=True, kw_only=True)
class Worker:
    """A started process, until its exit was collected."""

    generation: int
    local_rank: int
    rank: int
    pid: int
    files: LogFiles
    process: subprocess.Popen[bytes] | None
    """None for a warm worker, which a zygote forked."""
    pidfd: int
    environment: Mapping[str, str]
    """What may be shown of it."""
    flight_record: Path
    """Where the worker leaves torch's Flight Recorder, if it does."""
    mark: str
    """What it and all that it starts carry in their environment."""
    born: int
    """The generation in which it was started; it may have been carried into later ones."""


def settled(worker: Worker, returncode: int) -> None:
    """Tell the standard library that the process was waited for."""
    if worker.process is not None:
        worker.process.returncode = returncode


def exit_cause(status: int) -> ExitCause:
    """Return what a raw wait status says."""
    if os.WIFSIGNALED(status):
        return ExitCause(signal=os.WTERMSIG(status), core_dumped=os.WCOREDUMP(status))
    return ExitCause(code=os.WEXITSTATUS(status))


def spawn_reason(error: Exception) -> str:
    """Return why a process could not be started, in one sentence."""
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"cannot start a worker: {error.strerror}{where}"
    return f"cannot start a worker: {error}"
