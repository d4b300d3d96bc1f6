"""The script's two words about checkpoints: "this one is saved" and "which one do I load?".

Decides what is said to the sidecar and when the job's step is known.  It refuses to know what a
checkpoint contains; the path is a name that the script will get back.
"""

import json
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, SupportsIndex, TypeAlias

from worker_shim.client import Client
from worker_shim.messages import (
    BEGINNING,
    CHECKPOINTS_ENV,
    DATA_CHECKPOINT,
    MODEL_CHECKPOINT,
    CheckpointAnswer,
    CheckpointQuery,
    CheckpointSaved,
    JobFault,
)
from worker_shim.session import Outbox, StepCounter

ANSWER_S_MAX: Final = 10.0
"""Wait for "which checkpoint?".  The sidecar answers from memory; it is asked once per start."""

UNUSABLE_REASON: Final = "CheckpointUnusable"
"""Reason of the fault that a rank reports when the chosen checkpoint is empty."""
FAULT_S_MAX: Final = 1.0
"""Wait for that report's answer."""
FILES_LOOKED_AT_MAX: Final = 4096
"""Files of a checkpoint folder that are looked at: a look, not a verification."""

CheckpointKind: TypeAlias = Literal["model", "data"]
_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {"model": MODEL_CHECKPOINT, "data": DATA_CHECKPOINT}
)

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class CheckpointTracker:
    """Tells the sidecar what is saved, and keeps the step counter in the script's numbering."""

    def __init__(self, client: Client, steps: StepCounter, local_rank: int) -> None:
        self._client = client
        self._steps = steps
        self._local_rank = local_rank

    def saved(self, step: SupportsIndex, path: AnyPath, prefix: str, kind: str) -> None:
        """Owe the sidecar the report that ``step`` is durable at ``path``; return at once.

        Raises `TypeError` or `ValueError` for a step that is no whole number from zero up, for
        a kind that is neither ``model`` nor ``data``, and for a path that is not UTF-8.
        """
        number = operator.index(step)
        if number < 0:
            raise ValueError(f"a checkpoint's step is zero or more, not {number}")
        report = CheckpointSaved(
            local_rank=self._local_rank,
            prefix=prefix,
            step=number,
            path=_absolute(path),
            checkpoint_type=_type(kind),
        )
        self._steps.anchor(number)
        self._owe(report)

    def latest(self, prefix: str, default: str | None, kind: str) -> str | None:
        """Return the path of the job-wide choice, ``default`` when nothing was chosen.

        The sidecar is asked; should it be too busy to answer, what it put into the environment at
        the start holds, so that no rank ever loads another checkpoint than its peers.  A choice
        that is plainly empty is reported, which makes the job go back one step further.

        A default that is taken is told to the sidecar as the job's beginning: should a fault come
        before the first checkpoint, every rank goes back there and not to what lies on the disk.
        """
        self._client.update(lambda outbox: outbox.use_prefix(prefix))
        query = CheckpointQuery(
            local_rank=self._local_rank, prefix=prefix, checkpoint_type=_type(kind)
        )
        answer = self._client.ask(query, ANSWER_S_MAX)
        if isinstance(answer, CheckpointAnswer):
            step, path = answer.step, answer.path
        elif (told := told_at_start(os.environ, prefix, _type(kind))) is not None:
            step, path = told
        else:
            return default
        if path is None:
            if kind == "model":
                self._begin(prefix, default)
            return default
        if step is not None:
            self._steps.anchor(step)
        if path and (why := unusable(path)) is not None:
            fault = JobFault(local_rank=self._local_rank, reason=UNUSABLE_REASON, message=why)
            self._client.ask(fault, FAULT_S_MAX)
        return path or None

    def _begin(self, prefix: str, default: str | None) -> None:
        beginning = "" if default is None else _absolute(default)
        self._owe(
            CheckpointSaved(
                local_rank=self._local_rank, prefix=prefix, step=BEGINNING, path=beginning
            )
        )

    def _owe(self, report: CheckpointSaved) -> None:
        def owe(outbox: Outbox) -> None:
            outbox.use_prefix(report.prefix)
            outbox.owe(report)

        self._client.update(owe)


def told_at_start(
    environment: Mapping[str, str], prefix: str, checkpoint_type: str
) -> tuple[int, str] | None:
    """Return step and path of ``prefix`` that this process was started with, or None."""
    try:
        chosen: Any = json.loads(environment.get(CHECKPOINTS_ENV, "{}"))[prefix]
        return int(chosen["step"]), str(chosen.get(checkpoint_type, chosen[MODEL_CHECKPOINT]))
    except (ValueError, KeyError, TypeError):
        return None


def unusable(path: str) -> str | None:
    """Say why ``path`` cannot be a whole checkpoint, or None when a glance finds nothing.

    A look at names and sizes: a file or a shard of no bytes was never finished.  What is not there
    may be a name that only the script understands, and so is what is named by a URL.
    """
    if "://" in path:
        return None
    try:
        where = Path(path)
        if not where.exists():
            return None
        if where.is_file():
            return None if where.stat().st_size else f"the chosen checkpoint {path} has no bytes"
        with os.scandir(path) as entries:
            found = [entry for entry, _ in zip(entries, range(FILES_LOOKED_AT_MAX), strict=False)]
        empty = sorted(it.name for it in found if it.is_file() and not it.stat().st_size)
    except OSError as error:
        return f"the chosen checkpoint {path} cannot be read: {error.strerror}"
    if not found:
        return f"the chosen checkpoint {path} is an empty folder"
    shards = [name for name in empty if not name.startswith((".", "_")) and "." in name]
    return f"{shards[0]} of the chosen checkpoint {path} has no bytes" if shards else None


def _type(kind: str) -> str:
    try:
        return _TYPES[kind]
    except KeyError:
        raise ValueError(f"a checkpoint's kind is model or data, not {kind!r}") from None


def _absolute(path: AnyPath) -> str:
    """Return ``path`` as every rank can be told it.  Raises `ValueError` where it is no text."""
    name = os.fsdecode(path)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the path {name!r} is not UTF-8, so no other rank can be told of it; save to a path"
            " that is"
        ) from error
    return name if "://" in name else os.path.abspath(name)  # noqa: PTH100 - no link is resolved
