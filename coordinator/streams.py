"""Standard input, output and error as they really are: closed, full, or with nobody reading.

Decides which of it is an error.  A reader that has seen enough is none; an output that cannot
hold what was asked for is, and the exit status says so.
"""

import errno
import os
import sys
from contextlib import suppress
from typing import Final, TextIO

NO_FILES: Final = (errno.EMFILE, errno.ENFILE)
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What writing answers with; opening a file fails with the file's name beside it."""
_SUBSTITUTES: Final = (
    ("stdin", "r", os.O_WRONLY),
    ("stdout", "w", os.O_RDONLY),
    ("stderr", "w", os.O_WRONLY),  # there is nobody to be told of an error in telling errors
)


def open_missing_streams() -> None:
    """Put something harmless where a stream was closed before we were started.

    The next file that is opened would get its number, and a journal would be printed into.
    Writing to the substitute fails as writing to the closed stream would.
    """
    for number, (name, mode, flags) in enumerate(_SUBSTITUTES):
        if getattr(sys, name) is not None:
            continue
        with suppress(OSError):
            os.fstat(number)
            continue  # open, and somebody took our stream away on purpose
        opened = os.open(os.devnull, flags)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)
        setattr(sys, name, os.fdopen(number, mode, closefd=False))


def print_error(text: str) -> None:
    """Print one line on standard error, after what can still be printed on standard output."""
    for stream, line in ((sys.stdout, ""), (sys.stderr, text)):
        try:
            stream.write(line)
            stream.flush()
        except OSError:  # nowhere to say it: the exit status is what is left
            drop(stream)


def drop(stream: TextIO) -> None:
    """Let go what was not printed on ``stream``, so that Python does not try again at its end."""
    try:
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
    except (OSError, ValueError):  # a test's own stream
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def refused_by_the_system(error: OSError | MemoryError) -> str:
    """Return what the system denied, and what to do about it, as a sentence."""
    if isinstance(error, MemoryError):
        return "there is not enough memory; raise this process's limit (`ulimit -v`)"
    if error.errno in NO_FILES:
        return "no more files can be opened; raise this process's limit (`ulimit -n`)"
    if error.filename is None and error.errno in NO_ROOM:
        return (
            f"the output cannot be written ({error.strerror}); give standard output a place that"
            " takes it"
        )
    where = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, str | bytes) else ""
    return f"the system says: {error.strerror or error}{where}"
