"""A rank's output files: where they are, how they are opened, and their last lines."""

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

TAIL_BYTES_MAX: Final = 16 << 10
"""How far from its end a file is read for its last lines."""
LATEST: Final = "latest"
RUNS_PER_SECOND_MAX: Final = 1000
"""Runs of one node that may begin in the same second."""
LINE_CHARS_MAX: Final = 400
"""A last line is shown to a person; longer ones are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFiles:
    """One rank's files.  ``error`` is where ``torch.distributed.elastic`` writes a traceback."""

    stdout: Path
    stderr: Path
    error: Path


def new_run_folder(parent: Path) -> Path:
    """Make and return a new folder in ``parent`` for the output of one run, named by its UTC time.

    ``parent/latest`` leads to it from then on.  Raises `OSError`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    name = time.strftime("run_%Y%m%d-%H%M%S", time.gmtime())
    for number in range(1, RUNS_PER_SECOND_MAX + 1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        _point_to(parent / LATEST, folder)
        return folder
    raise FileExistsError(errno.EEXIST, "too many runs in one second", str(parent))


def _point_to(link: Path, folder: Path) -> None:
    """Let ``link`` lead to ``folder``; what stands there and is no link stays."""
    if link.exists() and not link.is_symlink():
        return
    draft = link.with_name(f".{folder.name}.latest")
    draft.symlink_to(folder.name)
    draft.replace(link)


@contextlib.contextmanager
def open_rank_files(folder: Path) -> Iterator[tuple[LogFiles, BinaryIO, BinaryIO]]:
    """Create the files of one rank; those of an earlier start of its number step aside."""
    folder.mkdir(parents=True, exist_ok=True)
    files = LogFiles(
        stdout=folder / "stdout.log", stderr=folder / "stderr.log", error=folder / "error.json"
    )
    for path in (files.stdout, files.stderr, files.error):
        if path.exists():
            earlier = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
            path.rename(next(other for other in earlier if not other.exists()))
    with files.stdout.open("ab") as stdout, files.stderr.open("ab") as stderr:
        yield files, stdout, stderr


def last_lines(files: LogFiles, count: int) -> tuple[str, ...]:
    """Return the last ``count`` lines of standard error, or of standard output if it is empty."""
    return _tail(files.stderr, count) or _tail(files.stdout, count)


def _tail(path: Path, count: int) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES_MAX))
            text = file.read(TAIL_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ()
    lines = [line.rstrip()[:LINE_CHARS_MAX] for line in text.splitlines() if line.strip()]
    return tuple(lines[-count:])
