"""The script's two words about checkpoints: "this one is saved" and "which one do I load?".

Decides what is said to the sidecar and when the job's step is known.  It refuses to know what a
checkpoint contains; the path is a name that the script will get back.
"""

import operator
import os
from typing import Final, SupportsIndex, TypeAlias

from worker_shim.client import Client
from worker_shim.messages import BEGINNING, CheckpointAnswer, CheckpointQuery, CheckpointSaved
from worker_shim.session import Outbox, StepCounter

ANSWER_S_MAX: Final = 10.0
"""Wait for "which checkpoint?".  The sidecar answers from memory; it is asked once per start."""

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class CheckpointTracker:
    """Tells the sidecar what is saved, and keeps the step counter in the script's numbering."""

    def __init__(self, client: Client, steps: StepCounter, local_rank: int) -> None:
        self._client = client
        self._steps = steps
        self._local_rank = local_rank

    def saved(self, step: SupportsIndex, path: AnyPath, prefix: str) -> None:
        """Owe the sidecar the report that ``step`` is durable at ``path``; return at once.

        Raises `TypeError` or `ValueError` for a step that is no whole number from zero up.
        """
        number = operator.index(step)
        if number < 0:
            raise ValueError(f"a checkpoint's step is zero or more, not {number}")
        report = CheckpointSaved(
            local_rank=self._local_rank,
            prefix=prefix,
            step=number,
            path=_absolute(path),
        )
        self._steps.anchor(number)
        self._owe(report)

    def latest(self, prefix: str, default: str | None) -> str | None:
        """Return the path of the job-wide choice, ``default`` when nothing was chosen.

        A default that is taken is told to the sidecar as the job's beginning: should a fault come
        before the first checkpoint, every rank goes back there and not to what lies on the disk.
        """
        self._client.update(lambda outbox: outbox.use_prefix(prefix))
        query = CheckpointQuery(local_rank=self._local_rank, prefix=prefix)
        answer = self._client.ask(query, ANSWER_S_MAX)
        if not isinstance(answer, CheckpointAnswer):
            return default
        if answer.path is None:
            beginning = "" if default is None else _absolute(default)
            self._owe(
                CheckpointSaved(
                    local_rank=self._local_rank, prefix=prefix, step=BEGINNING, path=beginning
                )
            )
            return default
        if answer.step is not None:
            self._steps.anchor(answer.step)
        return answer.path or None

    def _owe(self, report: CheckpointSaved) -> None:
        def owe(outbox: Outbox) -> None:
            outbox.use_prefix(report.prefix)
            outbox.owe(report)

        self._client.update(owe)


def _absolute(path: AnyPath) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - no link is resolved
