"""What is known of saved checkpoints, in files that survive a crash at any moment.

One record for each checkpoint, and two pointers: to the one that is verified, and to the one that
waits.  Every write is a new file, made durable, then named; a reader sees the old or the new.
The writer rank writes; the folder must be as durable as the checkpoints themselves.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

SCHEMA_VERSION: Final = 1
VERIFIED: Final = "VERIFIED"
PENDING: Final = "PENDING"


class RecordStatus(StrEnum):
    """From ``writing`` to ``candidate``, then ``recovery_verified`` or ``rejected``."""

    WRITING = "writing"
    CANDIDATE = "candidate"
    RECOVERY_VERIFIED = "recovery_verified"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One checkpoint.  ``environment_id`` names software and hardware that it is valid for."""

    checkpoint_id: str
    step: int
    environment_id: str
    topology: str
    status: RecordStatus
    time_ns: int
    reason: str
    schema_version: int = SCHEMA_VERSION


class ManifestError(Exception):
    """The manifest cannot be read or written; the text says which file and why."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest in ``folder``, which is made when something is first written."""

    folder: Path

    def verified(self) -> Record | None:
        """Return the newest checkpoint that may be trusted.  Raises `ManifestError`."""
        return self._pointed(VERIFIED)

    def pending(self) -> Record | None:
        """Return the checkpoint that was being written or waits for its next cycle."""
        return self._pointed(PENDING)

    def record(self, checkpoint_id: str) -> Record | None:
        """Return one checkpoint's record."""
        return _read_record(self.folder / "records" / f"{_name(checkpoint_id)}.json")

    def put(self, record: Record) -> None:
        """Write a record and the pointers that follow from its status."""
        path = self.folder / "records" / f"{_name(record.checkpoint_id)}.json"
        _write(path, asdict(record))
        pending = self.pending()
        is_pending = pending is not None and pending.checkpoint_id == record.checkpoint_id
        match record.status:
            case RecordStatus.WRITING | RecordStatus.CANDIDATE:
                _write(self.folder / PENDING, {"checkpoint_id": record.checkpoint_id})
            case RecordStatus.RECOVERY_VERIFIED:
                _write(self.folder / VERIFIED, {"checkpoint_id": record.checkpoint_id})
                if is_pending:
                    _remove(self.folder / PENDING)
            case RecordStatus.REJECTED:
                if is_pending:
                    _remove(self.folder / PENDING)

    def _pointed(self, pointer: str) -> Record | None:
        document = _read(self.folder / pointer)
        if document is None:
            return None
        checkpoint_id = document.get("checkpoint_id")
        if not isinstance(checkpoint_id, str):
            raise ManifestError(f"{self.folder / pointer} names no checkpoint")
        found = self.record(checkpoint_id)
        if found is None:
            raise ManifestError(
                f"{self.folder / pointer} names {checkpoint_id}, which has no record"
            )
        return found


def _name(checkpoint_id: str) -> str:
    if not checkpoint_id or "/" in checkpoint_id or checkpoint_id.startswith("."):
        raise ManifestError(f"{checkpoint_id!r} is no name for a checkpoint")
    return checkpoint_id


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ManifestError(f"{path} is no JSON object")
    return document


def _read_record(path: Path) -> Record | None:
    document = _read(path)
    if document is None:
        return None
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ManifestError(f"{path} has schema {document.get('schema_version')!r}, not 1")
    try:
        return Record(**{**document, "status": RecordStatus(document["status"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{path} is no checkpoint record: {error}") from error


def _write(path: Path, document: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ManifestError(f"{path} cannot be written: {error}") from error


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
