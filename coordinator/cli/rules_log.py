"""Opening a log that a person names: a file, or standard input."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from coordinator.cli.errors import UserError
from sidecar.logs.pieces import Piece, pieces

STANDARD_INPUT: Final = "-"


@contextmanager
def open_log(name: str) -> Iterator[Iterator[Piece]]:
    """Give a log's pieces.  Raises `UserError` when it cannot be read."""
    try:
        if name == STANDARD_INPUT:
            yield pieces(sys.stdin.buffer)
            return
        with Path(name).open("rb") as stream:
            yield pieces(stream)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # of our own output, not of the log
            raise
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from error
