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


def map_page(path: AnyPath, token: int) -> mmap.mmap:
    """Map the page at ``path`` to write it.

    Raises `WrongTokenError`, `ProgressPageError` when it is no page of this layout, `OSError`.
    """
    with Path(path).open("r+b") as file:
        _check(file.fileno(), path, token)
        return mmap.mmap(file.fileno(), PAGE_BYTES, access=mmap.ACCESS_WRITE)


class PageCopy:
    """A page to read from: a copy that is made anew for each look.

    It is not mapped: a file that another process cuts short under a mapping ends its reader with
    SIGBUS, and a sidecar that dies takes its workers along.  Reading it is one system call.
    """

    def __init__(self, path: AnyPath, token: int) -> None:
        """Open the page.  Raises as `map_page` does."""
        self._name = os.fspath(path)
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.bytes = bytearray(PAGE_BYTES)
        """The page as it was at the last `refresh`."""
        try:
            _check(self._handle, path, token)
            self.refresh()
        except BaseException:
            self.close()
            raise

    def refresh(self) -> None:
        """Copy the page as it stands.

        Raises `ProgressPageError` for one that was cut short, `OSError`, and `ValueError` when it
        is closed.
        """
        if self._handle < 0:
            raise ValueError("the progress page is closed")
        if os.preadv(self._handle, [self.bytes], 0) != PAGE_BYTES:
            raise ProgressPageError(f"progress page {self._name} was cut short")

    def close(self) -> None:
        """Let go of the page."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


def _check(handle: int, path: AnyPath, token: int) -> None:
    """Check that the open page is ours to use; raises as `map_page` does."""
    name = os.fspath(path)
    size = os.fstat(handle).st_size
    header = os.pread(handle, HEADER.size, 0)
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
