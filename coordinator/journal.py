"""The coordinator's journal: one SQLite file, one writer thread, one transaction a commit.

A commit is acknowledged only after it is on disk (write-ahead log, ``synchronous=FULL``), so that
a coordinator killed at any moment comes back with everything it ever acted upon.  What the rows
mean is known to `coordinator.journal_format`, never here.
"""

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, TypeVar

from coordinator.audit import RECORDS_KEPT_MAX, AuditRecord, decode_record, encode_record
from coordinator.incidents import Incident, Outcome
from coordinator.journal_format import (
    DurableState,
    JournalError,
    decode_incident,
    decode_ledger,
    decode_state,
    encode_incident,
    encode_ledger,
    encode_state,
)
from coordinator.ledger import Ledger

T = TypeVar("T")

log = logging.getLogger("outrider.journal")

JOURNAL_NAME: Final = "journal.sqlite"
"""The file in a state directory."""
APPLICATION_ID: Final = 0x4F555452
"""``OUTR`` in the SQLite header: tells our files from anybody else's."""
SCHEMA_VERSION: Final = 1
"""Version of the tables (``user_version``); the JSON inside carries its own."""
HEADER_BYTES: Final = 100
"""Size of SQLite's file header: no database is shorter, but for one that was never begun."""
BUSY_TIMEOUT_S: Final = 5.0
"""How long a commit waits for somebody who reads the file with the sqlite3 shell."""
INCIDENTS_KEPT_MAX: Final = 1_000
"""Incidents kept per job; a job that stops this often has other troubles than a lost page."""

_SCHEMA: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE state (
    job TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    json BLOB NOT NULL,
    at INTEGER NOT NULL
) STRICT;
CREATE TABLE incidents (
    id TEXT NOT NULL,
    job TEXT NOT NULL,
    json BLOB NOT NULL,
    opened_at INTEGER NOT NULL,
    open INTEGER NOT NULL,
    PRIMARY KEY (job, id)
) STRICT;
CREATE INDEX incidents_by_time ON incidents (job, opened_at);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_PUT_STATE: Final = """
INSERT INTO state (job, revision, json, at) VALUES (?, 1, ?, ?)
ON CONFLICT (job) DO UPDATE SET revision = revision + 1, json = excluded.json, at = excluded.at
"""
_PUT_INCIDENT: Final = """
INSERT INTO incidents (id, job, json, opened_at, open) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (job, id) DO UPDATE
SET json = excluded.json, opened_at = excluded.opened_at, open = excluded.open
"""
_DROP_UNFOUNDED: Final = "DELETE FROM incidents WHERE job = ? AND open AND id IS NOT ?"
"""An incident that was opened, is not open any more and was never closed: the core dropped it."""
_DROP_OLD: Final = """
DELETE FROM incidents WHERE job = ?1 AND id IN (
    SELECT id FROM incidents WHERE job = ?1 ORDER BY opened_at DESC, rowid DESC LIMIT -1 OFFSET ?2
)
"""


_LEDGER: Final = """
CREATE TABLE IF NOT EXISTS ledger (job TEXT PRIMARY KEY, json BLOB NOT NULL) STRICT
"""
"""Beside the state: it changes with every second, and losing the last few loses no decision."""
_PUT_LEDGER: Final = """
INSERT INTO ledger (job, json) VALUES (?, ?) ON CONFLICT (job) DO UPDATE SET json = excluded.json
"""
_AUDIT: Final = """
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL,
    accepted INTEGER NOT NULL,
    json BLOB NOT NULL
) STRICT
"""
"""Orders and who gave them, obeyed or not; only ever added to, and the oldest go."""
_PUT_ORDER: Final = "INSERT INTO audit (job, accepted, json) VALUES (?, ?, ?)"
_DROP_OLD_ORDERS: Final = """
DELETE FROM audit WHERE job = ?1 AND accepted = ?2 AND number <= (
    SELECT number FROM audit WHERE job = ?1 AND accepted = ?2 ORDER BY number DESC
    LIMIT 1 OFFSET ?3
)
"""


DAMAGE: Final = (sqlite3.Error, UnicodeDecodeError)
"""What reading a file raises that is no database any more; its own messages may be broken text."""


class Journal:
    """An open journal.  Every method with ``await`` runs on the one writer thread, in order."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int) -> None:
        self._path = path
        self._connection = connection
        self._lock = lock
        self._file = path.stat()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the journal at ``path``.  Raises `JournalError`."""
        lock = _lock(path)
        try:
            _refuse_emptied(path, lock)
            connection = _connect(path)
            _note_begun(lock)
        except BaseException:
            os.close(lock)
            raise
        return cls(path, connection, lock)

    def load(self, job: str) -> DurableState | None:
        """Return the last committed state of ``job``, or None.  Raises `JournalError`."""
        with _readable(self._path):
            row = self._connection.execute(
                "SELECT json FROM state WHERE job = ?", (job,)
            ).fetchone()
        return None if row is None else decode_state(row[0])

    def load_ledger(self, job: str) -> Ledger | None:
        """Return the accounts of ``job`` as last kept, or None.  Raises `JournalError`."""
        with _readable(self._path):
            row = self._connection.execute(
                "SELECT json FROM ledger WHERE job = ?", (job,)
            ).fetchone()
        return None if row is None else decode_ledger(row[0])

    async def keep_ledger(self, job: str, ledger: Ledger) -> None:
        """Write the accounts of ``job`` down.  Raises `JournalError`."""
        data = encode_ledger(ledger)
        await self._in_thread(lambda: self._connection.execute(_PUT_LEDGER, (job, data)))

    async def note_order(self, job: str, record: AuditRecord) -> None:
        """Write down an order for ``job``.  Raises `JournalError`."""
        data = encode_record(record)

        def write() -> None:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute(_PUT_ORDER, (job, record.accepted, data))
                dropped = (job, record.accepted, RECORDS_KEPT_MAX)
                self._connection.execute(_DROP_OLD_ORDERS, dropped)

        await self._in_thread(write)

    async def orders(self, job: str, limit: int) -> list[AuditRecord]:
        """Return the newest ``limit`` orders for ``job``, oldest first.  Raises `JournalError`."""
        rows = await self._in_thread(
            lambda: self._connection.execute(
                "SELECT json FROM audit WHERE job = ? ORDER BY number DESC LIMIT ?", (job, limit)
            ).fetchall()
        )
        return [decode_record(row[0]) for row in reversed(rows)]

    async def commit(self, state: DurableState, *incidents: Incident | None) -> None:
        """Make the state and the incidents durable in one transaction.  Raises `JournalError`."""
        given = [incident for incident in incidents if incident is not None]
        await self._in_thread(lambda: self._write(state, given))

    async def incidents(self, job: str, limit: int = INCIDENTS_KEPT_MAX) -> list[Incident]:
        """Return the newest ``limit`` incidents of ``job``, oldest first."""

        def newest() -> list[Incident]:
            rows = self._connection.execute(
                "SELECT json FROM incidents WHERE job = ? ORDER BY opened_at DESC, rowid DESC"
                " LIMIT ?",
                (job, limit),
            ).fetchall()
            return [decode_incident(row[0]) for row in reversed(rows)]

        return await self._in_thread(newest)

    async def incident(self, job: str, incident_id: str) -> Incident | None:
        """Return one incident of ``job``, or None."""
        row = await self._in_thread(
            lambda: self._connection.execute(
                "SELECT json FROM incidents WHERE job = ? AND id = ?", (job, incident_id)
            ).fetchone()
        )
        return None if row is None else decode_incident(row[0])

    async def incident_ids(self, job: str) -> list[str]:
        """Return the ids of every incident of ``job``, oldest first."""
        rows = await self._in_thread(
            lambda: self._connection.execute(
                "SELECT id FROM incidents WHERE job = ? ORDER BY opened_at, rowid", (job,)
            ).fetchall()
        )
        return [row[0] for row in rows]

    async def close(self) -> None:
        """Finish what was asked for, fold the log back into the file and let go of it."""
        with suppress(JournalError):
            await self._in_thread(self._connection.close)
        self._thread.shutdown(wait=True)
        os.close(self._lock)

    def _write(self, state: DurableState, incidents: list[Incident]) -> None:
        self._see_that_it_stands()
        now = time.time_ns()
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for item in incidents:
                opened_at = min((stone.at_ns for stone in item.milestones), default=now)
                is_open = item.outcome is Outcome.OPEN
                row = (item.id, item.job, encode_incident(item), opened_at, is_open)
                self._connection.execute(_PUT_INCIDENT, row)
                self._connection.execute(_DROP_OLD, (item.job, INCIDENTS_KEPT_MAX))
            still_open = None if state.open_incident is None else state.open_incident.id
            self._connection.execute(_DROP_UNFOUNDED, (state.job, still_open))
            self._connection.execute(_PUT_STATE, (state.job, encode_state(state), now))

    def _see_that_it_stands(self) -> None:
        """Let what is written next be found at our path.  Raises `JournalError`."""
        try:
            stands = os.path.samestat(self._path.stat(), self._file)
        except FileNotFoundError:
            self._put_back()
            return
        if not stands:
            raise JournalError(
                f"another file was put in place of the journal {self._path} while it was in use;"
                " give each coordinator a --state-dir of its own and start this one again"
            )

    def _put_back(self) -> None:
        """Write the whole journal anew where its file was deleted; the open one still has it all.

        Raises `JournalError` where that cannot be done, or another coordinator has come meanwhile.
        """
        self._lock = _lock_again(self._path, self._lock)
        draft = Path(f"{self._path}.new")
        draft.unlink(missing_ok=True)
        place = os.fsencode(draft)  # SQLite wants text, and a path may be none
        self._connection.execute("VACUUM INTO CAST(? AS TEXT)", (place,))
        self._connection.close()  # before the new one is opened: it removes its log by name
        draft.replace(self._path)
        self._connection = _connect(self._path)
        _note_begun(self._lock)
        self._file = self._path.stat()
        log.warning("the journal %s had been deleted while in use; it is written anew", self._path)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def guarded() -> T:
            with _readable(self._path):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)


class _readable:  # noqa: N801 - reads as a statement
    """Turn what SQLite raises into one sentence with a way out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, DAMAGE):
            return
        text = str(error).rstrip(".")
        if isinstance(error, sqlite3.OperationalError):
            raise JournalError(
                f"the journal {self._path} cannot be used ({text}); free the disk or fix its"
                " permissions and start the coordinator again, or give another --state-dir"
            ) from error
        raise JournalError(
            f"the journal {self._path} is damaged or not ours ({text}); move it away to start"
            " afresh, or give another --state-dir"
        ) from error


def _lock(path: Path) -> int:
    """Hold ``path``.lock for this process: two writers of one job would both give out ranks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(
            f"the state directory {path.parent} cannot be written ({error.strerror}); give"
            " another --state-dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise JournalError(
            f"the journal {path} is in use by another coordinator; stop that one or give another"
            " --state-dir"
        ) from error
    return descriptor


def _note_begun(lock: int) -> None:
    """Note in the lock file that a whole journal stands beside it, on disk."""
    if os.pwrite(lock, b"1", 0):
        os.fsync(lock)


def _refuse_emptied(path: Path, lock: int) -> None:
    """Refuse a file too short for a header where a whole journal once stood.

    SQLite takes such a file for a new database and deletes the log beside it.
    """
    if not path.exists() or path.stat().st_size >= HEADER_BYTES or not os.fstat(lock).st_size:
        return
    raise JournalError(
        f"the journal {path} is damaged (it was cut to nothing, and held decisions before); move"
        " it away to start afresh, or restore it"
    )


def _lock_again(path: Path, held: int) -> int:
    """Return a lock on ``path`` as it stands now, in place of the one ``held``."""
    try:
        if os.path.samestat(os.stat(f"{path}.lock"), os.fstat(held)):  # noqa: PTH116 - both alike
            return held
    except FileNotFoundError:
        pass
    lock = _lock(path)
    os.close(held)
    return lock


def _connect(path: Path) -> sqlite3.Connection:
    with _readable(path):
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(path, connection)
        except BaseException:
            connection.close()
            raise
        return connection


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    """Refuse what is not ours *before* anything is written into it."""
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise JournalError(
            f"{path} is a database of another program; move it away or give another --state-dir"
        )
    if tables and version != SCHEMA_VERSION:
        raise JournalError(
            f"the journal {path} has schema {version}, this version reads {SCHEMA_VERSION};"
            " use the matching outrider, or move it away"
        )
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        what = " ".join(found.split())
        raise JournalError(
            f"the journal {path} is damaged ({what}); move it away to start afresh, or restore it"
        )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if not tables:
        connection.executescript(_SCHEMA)
    connection.execute(_LEDGER)
    connection.execute(_AUDIT)
