"""Opening a log that a person names: a file, or standard input."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from coordinator.cli.errors import UserError
from sidecar.given_files import GivenFileError, open_given, system_reason
from sidecar.logs.pieces import Piece, pieces

STANDARD_INPUT: Final = "-"


@contextmanager
def open_log(name: str) -> Iterator[Iterator[Piece]]:
    """Give a log's pieces.  Raises `UserError` when it cannot be read."""
    try:
        if name == STANDARD_INPUT:
            if sys.stdin is None:
                raise UserError("standard input is closed; give the log's file instead of -")
            yield pieces(sys.stdin.buffer)
            return
        with open_given(Path(name)) as stream:
            yield pieces(stream)
    except GivenFileError as error:
        raise UserError(f"{name} cannot be read: {error}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):  # of our own output, not of the log
            raise
        raise UserError(f"{name} cannot be read: {system_reason(error)}") from error
