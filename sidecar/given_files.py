"""Reads a small file that a person names, whatever stands at that path.

Decides what may be read: a file, or a pipe such as a shell's ``<(...)``, up to a size and within
a time.  A device has no end and a folder has no text, so both are refused.  What the bytes mean
is not known here.
"""

import os
import queue
import select
import stat
import threading
import time
from pathlib import Path
from typing import BinaryIO, Final

PIPE_WAIT_S_MAX: Final = 10.0
"""Longest wait for a pipe's writer: a program that fills in a template is done in a moment."""
_KINDS: Final = (
    (stat.S_ISDIR, "it is a directory"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a device, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
)


class GivenFileError(Exception):
    """The file cannot be read; the text says why, without the file's name."""


def read_given(path: Path, bytes_max: int) -> bytes:
    """Return what is in the file or pipe at ``path``.  Raises `GivenFileError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            return _read(descriptor, bytes_max)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise GivenFileError(system_reason(error)) from error


def read_given_text(path: Path, bytes_max: int) -> str:
    """Return the text in the file or pipe at ``path``.  Raises `GivenFileError`."""
    try:
        return read_given(path, bytes_max).decode()
    except UnicodeDecodeError as error:
        raise GivenFileError(f"byte {error.start} is not UTF-8; is it text?") from error


def open_given(path: Path) -> BinaryIO:
    """Open the file or pipe at ``path``, of any length.  Raises `GivenFileError`."""
    reason = endless_kind(path)
    if reason is not None:
        raise GivenFileError(reason)
    opened: queue.SimpleQueue[BinaryIO | OSError | ValueError] = queue.SimpleQueue()

    def open_it() -> None:  # a pipe's opening waits for its writer, perhaps for good
        try:
            opened.put(path.open("rb"))
        except (OSError, ValueError) as error:
            opened.put(error)

    threading.Thread(target=open_it, daemon=True).start()
    try:
        stream = opened.get(timeout=PIPE_WAIT_S_MAX)
    except queue.Empty:
        raise GivenFileError(
            f"nobody opened this pipe to write into it for {PIPE_WAIT_S_MAX:g} s"
        ) from None
    if isinstance(stream, OSError | ValueError):
        raise GivenFileError(system_reason(stream)) from stream
    return stream


def endless_kind(path: Path) -> str | None:
    """Return why what stands at ``path`` cannot be read to its end, None where it can."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None  # opening it says why
    return next((reason for is_kind, reason in _KINDS if is_kind(mode)), None)


def system_reason(error: OSError | ValueError) -> str:
    """Return what the system said, without number and file name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _read(descriptor: int, bytes_max: int) -> bytes:
    mode = os.fstat(descriptor).st_mode
    for is_kind, reason in _KINDS:
        if is_kind(mode):
            raise GivenFileError(reason)
    deadline = time.monotonic() + PIPE_WAIT_S_MAX
    data = bytearray()
    while len(data) <= bytes_max:
        if stat.S_ISFIFO(mode):
            _await(descriptor, deadline)
        try:
            part = os.read(descriptor, bytes_max + 1 - len(data))
        except BlockingIOError:  # a pipe that was readable is read by somebody else too
            continue
        if not part:
            return bytes(data)
        data += part
    raise GivenFileError(f"it is larger than {bytes_max} bytes")


def _await(descriptor: int, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if left_s <= 0 or not poll.poll(left_s * 1000):
        raise GivenFileError(f"nothing came through this pipe for {PIPE_WAIT_S_MAX:g} s")
