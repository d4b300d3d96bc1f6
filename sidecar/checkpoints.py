"""Which checkpoints this node's ranks confirmed: a set of steps per prefix, never a maximum.

A confirmation is a fact and is kept until newer ones push it out; no later message can erase it.
Whether a step is complete *job-wide* is not known here; the coordinator intersects over nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sidecar.api import CheckpointConfirmation, CheckpointPointer
from worker_shim.messages import CheckpointAnswer

STEPS_KEPT_MAX: Final = 64
"""Steps remembered per prefix.  A job keeps far fewer checkpoints on disk than this."""
PREFIXES_MAX: Final = 16
"""Prefixes remembered per node; a job has one or two."""


@dataclass(slots=True)
class _Step:
    ranks: set[int] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)


@dataclass(slots=True)
class CheckpointRecord:
    """What the ranks of one node told so far, over all generations."""

    _steps: dict[str, dict[int, _Step]] = field(default_factory=dict)

    def saved(self, *, prefix: str, step: int, rank: int, path: str) -> str | None:
        """Note that ``rank`` (global) confirmed ``step``.  Returns why not when refused."""
        if prefix not in self._steps and len(self._steps) >= PREFIXES_MAX:
            return f"more than {PREFIXES_MAX} checkpoint prefixes on one node"
        steps = self._steps.setdefault(prefix, {})
        entry = steps.setdefault(step, _Step())
        entry.ranks.add(rank)
        entry.paths.add(path)
        while len(steps) > STEPS_KEPT_MAX:
            del steps[min(steps)]
        return None

    def rewind(self, chosen: Mapping[str, int]) -> None:
        """Forget what is newer than the ``chosen`` step of its prefix, or all where none was.

        A run that went back writes those steps again, and half of each run is no checkpoint.
        """
        for prefix, steps in self._steps.items():
            for newer in [step for step in steps if step > chosen.get(prefix, -1)]:
                del steps[newer]

    def confirmations(self) -> tuple[CheckpointConfirmation, ...]:
        """Return everything known, ordered by prefix and step."""
        return tuple(
            CheckpointConfirmation(
                prefix=prefix,
                step=step,
                ranks=tuple(sorted(entry.ranks)),
                paths=tuple(sorted(entry.paths)),
            )
            for prefix, steps in sorted(self._steps.items())
            for step, entry in sorted(steps.items())
        )


def checkpoint_answer(
    chosen: Sequence[CheckpointPointer], prefix: str, reply_to: int
) -> CheckpointAnswer:
    """Return which checkpoint of ``prefix`` a worker should load; nothing chosen is an answer."""
    pointer = next((item for item in chosen if item.prefix == prefix), None)
    return CheckpointAnswer(
        prefix=prefix,
        step=pointer.step if pointer else None,
        path=pointer.path if pointer else None,
        reply_to=reply_to,
    )
