"""Which checkpoints this node's ranks confirmed: a set of steps per prefix and type.

Never a maximum: whether a step is complete *job-wide* is not known here; the coordinator
intersects over nodes.  A confirmation is a fact and is kept until newer ones push it out; no later
message can erase it, a late declaration of a prefix least of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sidecar.api import CheckpointConfirmation, CheckpointDeclaration, CheckpointPointer
from worker_shim.messages import CHECKPOINT_TYPES, MODEL_CHECKPOINT, CheckpointAnswer

STEPS_KEPT_MAX: Final = 64
"""Steps remembered per prefix.  A job keeps far fewer checkpoints on disk than this."""
PREFIXES_MAX: Final = 16
"""Prefixes remembered per node; a job has one or two."""
RANKS_MAX: Final = 1024
"""Ranks of a node that may be declared; more is a slip."""

STEP_MAX: Final = (1 << 63) - 1
PATH_CHARS_MAX: Final = 4096
"""As long as Linux lets a path be."""
PREFIX_CHARS_MAX: Final = 256


@dataclass(slots=True)
class _Part:
    """What is known of one type of one step."""

    ranks: set[int] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)


@dataclass(slots=True)
class CheckpointRecord:
    """What the ranks of one node told so far, over all generations."""

    _steps: dict[str, dict[int, dict[str, _Part]]] = field(default_factory=dict)
    _declared: dict[str, dict[str, int]] = field(default_factory=dict)

    def declare(self, prefix: str, types: Mapping[str, int]) -> str | None:
        """Note how many local ranks will report each type.  Returns why not when refused."""
        for kind, ranks in types.items():
            if kind not in CHECKPOINT_TYPES:
                return _unknown(kind)
            if not 0 <= ranks <= RANKS_MAX:
                return f"{ranks} is no number of ranks that report {kind}"
        if types and (refusal := self._room(prefix)) is not None:
            return refusal
        if types:
            self._declared.setdefault(prefix, {}).update(types)
        return None

    def saved(
        self, *, prefix: str, step: int, rank: int, path: str, kind: str = MODEL_CHECKPOINT
    ) -> str | None:
        """Note that ``rank`` (global) confirmed ``step``.  Returns why not when refused."""
        if kind not in CHECKPOINT_TYPES:
            return _unknown(kind)
        if not 0 <= step <= STEP_MAX:
            return f"step {step} of {prefix[:PREFIX_CHARS_MAX]} is no number of completed steps"
        if len(path) > PATH_CHARS_MAX or "\0" in path:
            return f"the path of step {step} is none: it is too long, or holds a zero byte"
        if (refusal := self._room(prefix)) is not None:
            return refusal
        steps = self._steps.setdefault(prefix, {})
        part = steps.setdefault(step, {}).setdefault(kind, _Part())
        part.ranks.add(rank)
        part.paths.add(path)
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
        """Return everything known, ordered by prefix, step and type."""
        return tuple(
            CheckpointConfirmation(
                prefix=prefix,
                step=step,
                ranks=tuple(sorted(part.ranks)),
                paths=tuple(sorted(part.paths)),
                checkpoint_type=kind,
            )
            for prefix, steps in sorted(self._steps.items())
            for step, parts in sorted(steps.items())
            for kind, part in sorted(parts.items())
        )

    def declarations(self) -> tuple[CheckpointDeclaration, ...]:
        """Return what was declared, ordered by prefix and type."""
        return tuple(
            CheckpointDeclaration(prefix=prefix, checkpoint_type=kind, ranks=ranks)
            for prefix, types in sorted(self._declared.items())
            for kind, ranks in sorted(types.items())
        )

    def _room(self, prefix: str) -> str | None:
        if len(prefix) > PREFIX_CHARS_MAX:
            return f"a checkpoint prefix has at most {PREFIX_CHARS_MAX} characters"
        known = self._steps.keys() | self._declared.keys()
        if prefix not in known and len(known) >= PREFIXES_MAX:
            return f"more than {PREFIXES_MAX} checkpoint prefixes on one node"
        return None


def checkpoint_answer(
    chosen: Sequence[CheckpointPointer],
    prefix: str,
    reply_to: int,
    kind: str = MODEL_CHECKPOINT,
) -> CheckpointAnswer:
    """Return which checkpoint of ``prefix`` a worker should load; nothing chosen is an answer."""
    pointer = next((item for item in chosen if item.prefix == prefix), None)
    return CheckpointAnswer(
        prefix=prefix,
        step=pointer.step if pointer else None,
        path=pointer.path_of(kind) if pointer else None,
        reply_to=reply_to,
    )


def _unknown(kind: str) -> str:
    return f"checkpoint type {kind!r} is none of {', '.join(CHECKPOINT_TYPES)}"
