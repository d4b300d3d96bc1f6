"""Reads a journal that nobody serves any more, or that somebody else serves: never writes it."""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from coordinator.audit import AuditRecord, decode_record
from coordinator.incidents import Incident
from coordinator.journal import APPLICATION_ID, DAMAGE, JOURNAL_NAME, SCHEMA_VERSION
from coordinator.journal_format import JournalError, decode_incident

_INCIDENTS: Final = "SELECT json FROM incidents ORDER BY opened_at, rowid"
_ORDERS: Final = "SELECT json FROM audit ORDER BY number"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptJournal:
    """The incidents in one state directory, oldest first."""

    incidents: tuple[Incident, ...]

    @classmethod
    def read(cls, state_dir: Path) -> Self:
        """Read the journal in ``state_dir``.  Raises `JournalError`."""
        return cls(incidents=tuple(map(decode_incident, _rows(state_dir, _INCIDENTS))))


def kept_orders(state_dir: Path) -> tuple[AuditRecord, ...]:
    """Return the orders in ``state_dir``'s journal, oldest first.  Raises `JournalError`."""
    return tuple(map(decode_record, _rows(state_dir, _ORDERS, table="audit")))


def _rows(state_dir: Path, query: str, *, table: str = "incidents") -> list[bytes]:
    """Return the JSON of every row of a ``table``, none where an older journal lacks it."""
    path = state_dir / JOURNAL_NAME
    if not path.is_file():
        raise JournalError(
            f"there is no journal in {state_dir}; give the --state-dir of a coordinator, or"
            " RUN/state of a run that stood alone"
        )
    try:
        return _read(path, query, table)
    except DAMAGE as error:
        raise JournalError(f"the journal {path} cannot be read ({error})") from error


def _read(path: Path, query: str, table: str) -> list[bytes]:
    """Read without writing.  A closed journal is read without touching its folder."""
    closed = not path.with_name(f"{path.name}-wal").exists()
    mode = "immutable=1" if closed else "mode=ro"
    connection = sqlite3.connect(f"file:{quote(os.fsencode(path.absolute()))}?{mode}", uri=True)
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
            raise JournalError(
                f"{path} is no journal of this version of outrider; use the one that wrote it"
            )
        known = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,))
        if known.fetchone() is None:
            return []
        return [row[0] for row in connection.execute(query)]
    finally:
        connection.close()
