"""How many files and connections this process may hold open, set before anything is opened."""

import logging
import resource
from contextlib import suppress
from typing import Final

OWN_FILES: Final = 64
"""What a daemon itself holds open: standard streams, libraries, sockets, logs, the loop's own."""

log = logging.getLogger("outrider.files")


def allow_files(needed: int, *, all_there_are: bool = False) -> str | None:
    """Raise the limit to ``needed`` files beyond our own, or as far as the system lets us.

    Returns why that is not possible.  A limit that is reached later shows up as anything: a
    checkpoint that is not seen, a worker that cannot be started, a node that is called lost.
    """
    least = OWN_FILES + needed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if all_there_are else max(soft, min(least, hard))
    with suppress(ValueError, OSError):  # a container may refuse; the old limit then stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    log.debug("file descriptors: limit %d, was %d", now, soft)
    if now >= least:
        return None
    return f"this process may open {now} files and needs {least}; raise the limit (`ulimit -n`)"
