"""How far each file was read, kept over the end of the process that read it.

Decides nothing: a place is only gone back to if the file's identity and its first bytes are the
same.  Whatever stands in the state file, reading goes on; at worst it begins at the start.
"""

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

STATE_BYTES_MAX: Final = 16 << 20
"""A larger state file is not ours."""

_LOG = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True):
    """A place in a file, behind a whole line.  ``head`` are the file's first bytes."""

    device: int
    inode: int
    offset: int
    head: bytes


class _State(msgspec.Struct):
    generation: int
    files: dict[str, Position]


class PositionFile:
    """The state file.  A failure to write is said once and ends nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: _State | None = None
        self._trouble = False

    def load(self, generation: int) -> Mapping[str, Position]:
        """Return the places of ``generation``'s files, by path; empty when none are known."""
        try:
            with self._path.open("rb") as file:
                data = file.read(STATE_BYTES_MAX)
            state = msgspec.json.decode(data, type=_State)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            _LOG.warning("%s cannot be used, output is read from its start: %s", self._path, error)
            return {}
        return state.files if state.generation == generation else {}

    def save(self, generation: int, files: Mapping[str, Position]) -> None:
        """Write the places, whole or not at all, if one has changed."""
        state = _State(generation, dict(files))
        if self._written is not None and self._written == state:
            return
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            fresh.write_bytes(msgspec.json.encode(state))
            fresh.replace(self._path)
        except OSError as error:
            if not self._trouble:
                _LOG.warning("the place in output cannot be kept in %s: %s", self._path, error)
            self._trouble = True
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            return
        self._written, self._trouble = state, False


def position_of(fd: int, offset: int, head: bytes) -> Position:
    """Return the place of an open file."""
    seen = os.fstat(fd)
    return Position(device=seen.st_dev, inode=seen.st_ino, offset=offset, head=head)
