"""The file of strikes that all jobs of a machine share: one SQLite table.

A job's recovery never waits for it: what cannot be read or written is said in the log, and the
job goes on without a memory of nodes.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from coordinator.journal import DAMAGE
from coordinator.offenders import STRIKES_READ_MAX, Strike

STORE_NAME: Final = "offenders.sqlite"
BUSY_TIMEOUT_S: Final = 5.0
"""How long a write waits for another job's coordinator."""
APPLICATION_ID: Final = 0x4F555246
"""``OURF``: tells the file from a journal and from anybody else's."""
SCHEMA_VERSION: Final = 1

_SCHEMA: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS strikes (
    job TEXT NOT NULL,
    incident TEXT NOT NULL,
    node TEXT NOT NULL,
    cause TEXT NOT NULL,
    at_ns INTEGER NOT NULL,
    weight REAL NOT NULL,
    PRIMARY KEY (job, incident, node, at_ns)
) STRICT;
CREATE INDEX IF NOT EXISTS strikes_by_time ON strikes (at_ns);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_PUT: Final = """
INSERT OR IGNORE INTO strikes (job, incident, node, cause, at_ns, weight)
VALUES (?, ?, ?, ?, ?, ?)
"""
_GET: Final = """
SELECT job, incident, node, cause, at_ns, weight FROM strikes ORDER BY at_ns DESC LIMIT ?
"""

log = logging.getLogger("outrider.offenders")


class OffenderStore:
    """Strikes on disk.  Several coordinators may use one file at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing: set[asyncio.Task[None]] = set()

    async def read(self) -> tuple[Strike, ...]:
        """Return the newest strikes, oldest first; none when the file cannot be read."""
        return await asyncio.to_thread(self._read)

    async def add(self, strikes: Iterable[Strike]) -> None:
        """Remember strikes; one that is known already changes nothing."""
        given = tuple(strikes)
        if given:
            await asyncio.to_thread(self._add, given)

    def remember(self, strikes: Iterable[Strike]) -> None:
        """Begin to `add` strikes; nothing waits for it but `flush`."""
        task = asyncio.create_task(self.add(strikes), name="offenders")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def flush(self) -> None:
        """Wait until all that is to be remembered is on disk."""
        await asyncio.gather(*self._writing)

    def _read(self) -> tuple[Strike, ...]:
        if not self.path.exists():  # looking leaves nothing behind
            return ()
        try:
            with self._open() as connection:
                rows = connection.execute(_GET, (STRIKES_READ_MAX,)).fetchall()
        except (*DAMAGE, OSError) as error:
            self._complain(error)
            return ()
        names = ("job", "incident", "node", "cause", "at_ns", "weight")
        return tuple(Strike(**dict(zip(names, row, strict=True))) for row in reversed(rows))

    def _add(self, strikes: tuple[Strike, ...]) -> None:
        rows = [(it.job, it.incident, it.node, it.cause, it.at_ns, it.weight) for it in strikes]
        try:
            with self._open() as connection:
                connection.executemany(_PUT, rows)
                connection.commit()
        except (*DAMAGE, OSError) as error:
            self._complain(error)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)) as connection:
            tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if tables and (owner, version) != (APPLICATION_ID, SCHEMA_VERSION):
                raise sqlite3.DatabaseError("it is a database of another program or version")
            if not tables:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(_SCHEMA)
            yield connection

    def _complain(self, error: Exception) -> None:
        log.error(
            "what is remembered of nodes in %s cannot be used (%s); move the file away, or give "
            "another --offenders FILE. The job goes on without it",
            self.path,
            str(error).rstrip("."),
        )
