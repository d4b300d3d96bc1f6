"""Reads a journal that nobody serves any more, or that somebody else serves: never writes it."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote

from coordinator.incidents import Incident
from coordinator.journal import APPLICATION_ID, JOURNAL_NAME, SCHEMA_VERSION
from coordinator.journal_format import JournalError, decode_incident


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptJournal:
    """The incidents in one state directory, oldest first."""

    incidents: tuple[Incident, ...]

    @classmethod
    def read(cls, state_dir: Path) -> Self:
        """Read the journal in ``state_dir``.  Raises `JournalError`."""
        path = state_dir / JOURNAL_NAME
        if not path.is_file():
            raise JournalError(
                f"there is no journal in {state_dir}; give the --state-dir of a coordinator, or"
                " RUN/state of a run that stood alone"
            )
        try:
            rows = _rows(path)
        except sqlite3.Error as error:
            raise JournalError(f"the journal {path} cannot be read ({error})") from error
        return cls(incidents=tuple(decode_incident(row) for row in rows))


def _rows(path: Path) -> list[bytes]:
    """Return every incident's JSON.  A closed journal is read without touching its folder."""
    closed = not path.with_name(f"{path.name}-wal").exists()
    mode = "immutable=1" if closed else "mode=ro"
    connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?{mode}", uri=True)
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
            raise JournalError(
                f"{path} is no journal of this version of outrider; use the one that wrote it"
            )
        found = connection.execute("SELECT json FROM incidents ORDER BY opened_at, rowid")
        return [row[0] for row in found]
    finally:
        connection.close()
