"""Progress pages as files: who may make, replace or open one.

A page belongs to whoever made it for as long as that process lives, and opens for whoever knows
its token.  A process is known by its number and its start, because numbers are given again.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from scout.page_layout import HEADER, LAYOUT_VERSION, MAGIC, PAGE_BYTES

TOKEN_MAX: Final = (1 << 64) - 1

AnyPath: TypeAlias = str | os.PathLike[str]


class ProgressPageError(Exception):
    """The page cannot be used.  The text is one sentence that says what to do."""


class PageHeldError(ProgressPageError):
    """A live process owns, or already writes, this page."""


class WrongTokenError(ProgressPageError):
    """The page was made for somebody else, usually another generation of the job."""


def map_page(path: AnyPath, token: int, *, writable: bool) -> mmap.mmap:
    """Map the page at ``path``.

    Raises `WrongTokenError`, `ProgressPageError` when it is no page of this layout, `OSError`.
    """
    name = os.fspath(path)
    with Path(path).open("r+b" if writable else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(HEADER.size)
        if size != PAGE_BYTES or header[: len(MAGIC)] != MAGIC:
            raise ProgressPageError(f"{name} is not a progress page")
        _, version, page_token, _, _ = HEADER.unpack(header)
        if version != LAYOUT_VERSION:
            raise ProgressPageError(
                f"progress page {name} has layout {version}, this program speaks "
                f"{LAYOUT_VERSION}; run the same version beside and inside the job"
            )
        if page_token != token:
            raise WrongTokenError(
                f"the token does not open progress page {name}; it belongs to another run"
            )
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(file.fileno(), PAGE_BYTES, access=access)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time create or replace pages in ``folder``."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def refuse_if_held(target: Path) -> None:
    """Raise `PageHeldError` when the page's owner lives, `ProgressPageError` for another file."""
    try:
        found = target.read_bytes()
    except FileNotFoundError:
        return
    if len(found) != PAGE_BYTES or not found.startswith(MAGIC):
        raise ProgressPageError(f"{target} exists and is not a progress page; remove it")
    _, _, _, pid, ticks = HEADER.unpack_from(found)
    if lives(pid, ticks):
        raise PageHeldError(
            f"progress page {target} belongs to process {pid}, which is running; "
            "stop it or use another folder"
        )


def lives(pid: int, ticks: int) -> bool:
    """Tell a live process from a dead one whose number was given to another."""
    now = start_ticks(pid)
    return now is not None and now == ticks


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot; None when it runs no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
