"""Checkpoints that are saved only when a check found them healthy, and loaded only when trusted.

The framework's callbacks move the bytes; this module decides when they are called, on which
ranks, and what the manifest says of it.  ``save_candidate`` and ``load_checkpoint`` run on every
rank and may use collectives; ``commit_candidate`` and ``quarantine_candidate`` run on the writer
alone and may not.  Source: the SCOUT guide, "Checkpoint Certification and Recovery".
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch.distributed as dist

from scout.manifest import Manifest, ManifestError, Record, RecordStatus
from scout.replay import exchange
from scout.trust import Boundary, Certified, Rejected, TrustState

_log: Final = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableCheckpointConfig:
    """How the framework's checkpoints are written, read and dealt with.

    ``save_candidate(checkpoint_id, step)`` returns once this rank's part is durable.
    ``load_checkpoint(checkpoint_id, step)`` returns the step that it restored.  The other two are
    told the id: the checkpoint may be kept for good, or must not be found by anybody again.
    ``every_steps`` is the distance between checkpoints; each such step is checked first.
    """

    manifest_dir: Path
    environment_id: str
    save_candidate: Callable[[str, int], None]
    load_checkpoint: Callable[[str, int], int]
    commit_candidate: Callable[[str], None]
    quarantine_candidate: Callable[[str], None]
    every_steps: int
    writer_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Every rank restored this step."""

    checkpoint_id: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingLoaded:
    """No rank restored anything, and why."""

    why: str


Restored: TypeAlias = Loaded | NothingLoaded


class DurableCheckpoints:
    """Carries out what a `Certifier` decided.  Every rank of the job calls it alike."""

    def __init__(self, config: DurableCheckpointConfig, *, topology: str, world: Any) -> None:
        self._config = config
        self._manifest = Manifest(Path(config.manifest_dir))
        self._topology = topology
        self._world = world
        self._is_writer = dist.get_rank() == config.writer_rank
        self._notes: set[str] = set()

    def settle(self, boundary: Boundary) -> bool:
        """Save, promote or reject as ``boundary`` says.  Returns False if saving failed."""
        if isinstance(boundary, Rejected):
            self._quarantine_pending(boundary.reason)
            return True
        if not isinstance(boundary, Certified) or boundary.step % self._config.every_steps:
            return True
        if boundary.promoted:
            self._promote(boundary.reason)
        if boundary.state is TrustState.LATEST:
            return True
        return self._save(boundary)

    def load(self) -> Restored:
        """Restore the newest verified checkpoint on every rank, or say why not."""
        told = exchange.gather_texts(self._choose() if self._is_writer else {}, self._world)
        chosen = told[self._config.writer_rank]
        if chosen["why"]:
            return NothingLoaded(why=chosen["why"])
        why = ""
        try:
            step = self._config.load_checkpoint(chosen["id"], chosen["step"])
            if step != chosen["step"]:
                why = f"{chosen['id']} holds step {step}, the manifest says {chosen['step']}"
        except Exception as error:  # noqa: BLE001 - the framework's code
            why = f"{type(error).__name__}: {error}"
        failed = [
            f"rank {rank}: {it}"
            for rank, it in enumerate(exchange.gather_texts(why, self._world))
            if it
        ]
        if failed:
            return NothingLoaded(why=f"{chosen['id']} was not loaded: {'; '.join(failed[:4])}")
        return Loaded(checkpoint_id=chosen["id"], step=chosen["step"])

    # --- saving ---------------------------------------------------------------------------

    def _save(self, boundary: Certified) -> bool:
        record = Record(
            checkpoint_id=f"step-{boundary.step:010d}",
            step=boundary.step,
            environment_id=self._config.environment_id,
            topology=self._topology,
            status=RecordStatus.WRITING,
            time_ns=time.time_ns(),
            reason=boundary.reason,
        )
        why = self._written(record)
        if not why:
            try:
                self._config.save_candidate(record.checkpoint_id, record.step)
            except Exception as error:  # noqa: BLE001 - the framework's code
                why = f"{type(error).__name__}: {error}"
        told = exchange.gather_texts(why, self._world)
        failed = [f"rank {rank}: {it}" for rank, it in enumerate(told) if it]
        if failed:
            reason = f"saving failed: {'; '.join(failed[:4])}"
            self._note(f"checkpoint {record.checkpoint_id} is rejected, {reason}")
            self._reject(replace(record, reason=reason))
            return False
        verified = boundary.state is TrustState.RECOVERY_VERIFIED
        status = RecordStatus.RECOVERY_VERIFIED if verified else RecordStatus.CANDIDATE
        self._written(replace(record, status=status))
        if verified:
            self._call(self._config.commit_candidate, record.checkpoint_id)
        return True

    def _promote(self, reason: str) -> None:
        pending = self._pending()
        if pending is not None and pending.status is RecordStatus.CANDIDATE:
            promoted = replace(pending, status=RecordStatus.RECOVERY_VERIFIED, reason=reason)
            if not self._written(promoted):
                self._call(self._config.commit_candidate, pending.checkpoint_id)

    def _quarantine_pending(self, reason: str) -> None:
        pending = self._pending()
        if pending is not None:
            self._reject(replace(pending, reason=reason))

    def _reject(self, record: Record) -> None:
        self._written(replace(record, status=RecordStatus.REJECTED))
        self._call(self._config.quarantine_candidate, record.checkpoint_id)

    def _pending(self) -> Record | None:
        """Return what waits, on the writer; nothing waits on the others."""
        if not self._is_writer:
            return None
        try:
            return self._manifest.pending()
        except ManifestError as error:
            self._note(str(error))
            return None

    def _written(self, record: Record) -> str:
        """Write ``record`` on the writer; return why that failed, or an empty text."""
        if not self._is_writer:
            return ""
        try:
            self._manifest.put(record)
        except (ManifestError, OSError) as error:
            self._note(str(error))
            return str(error)
        return ""

    def _call(self, callback: Callable[[str], None], checkpoint_id: str) -> None:
        if not self._is_writer:
            return
        try:
            callback(checkpoint_id)
        except Exception as error:  # noqa: BLE001 - the framework's code
            name = getattr(callback, "__name__", "a checkpoint callback")
            self._note(f"{name} raised {type(error).__name__}: {error}")

    def _choose(self) -> dict[str, Any]:
        """Return what to load, on the writer; what the last run left unfinished is rejected."""
        try:
            verified, pending = self._manifest.verified(), self._manifest.pending()
        except ManifestError as error:
            return {"why": str(error)}
        if pending is not None:
            self._reject(replace(pending, reason="the run ended before it was verified"))
        if verified is None:
            return {"why": "no checkpoint is verified"}
        if verified.environment_id != self._config.environment_id:
            return {
                "why": f"{verified.checkpoint_id} was saved in environment "
                f"{verified.environment_id!r}, this is {self._config.environment_id!r}"
            }
        return {"why": "", "id": verified.checkpoint_id, "step": verified.step}

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            _log.warning("outrider: scout: %s", text)
