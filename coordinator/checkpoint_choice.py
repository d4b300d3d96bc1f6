"""Which checkpoint the job may resume from: the newest step that every rank confirmed.

It collects what ranks say they saved and compares it.  It never looks at a file system, and it
does not know which nodes are alive: a checkpoint that was complete stays complete when the node
that confirmed it is gone.  A step is whole when each of its types (model, data) is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from coordinator.checkpoint_step import Step, told_apart
from coordinator.incidents import CheckpointChoice
from coordinator.wording import one_line
from sidecar.api import CheckpointPointer
from worker_shim.messages import BEGINNING, MODEL_CHECKPOINT

STEPS_KEPT_MAX: Final = 64
"""Steps remembered per prefix, complete and incomplete ones apart.

An incomplete step so far behind the newest is abandoned, and no rollback goes back that far.
Both have their own limit so that a rank which never confirms cannot push the last complete
checkpoint out.
"""

PREFIXES_MAX: Final = 16
"""Prefixes remembered; a job names a handful, and a worker that invents them must cost nothing."""

SKIPS_SHOWN_MAX: Final = 3
"""Newer steps whose refusal a reason spells out."""

Demoted = Mapping[tuple[str, int], str]
"""(prefix, step) -> why that checkpoint is not to be loaded again."""

NONE_DEMOTED: Final[Demoted] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckpoint:
    """A step that not every rank confirmed: whom it lacks.  ``why`` is one clause."""

    prefix: str
    step: int
    missing_ranks: tuple[int, ...]
    why: str


@dataclass(slots=True, kw_only=True)
class _Prefix:
    complete: dict[int, dict[str, str]] = field(default_factory=dict)
    """Step -> type -> path."""
    pending: dict[int, Step] = field(default_factory=dict)
    begun_from: int = -1
    """The step that the present generation began from.  Older ones that are not complete never
    will be: nobody saves them again, and half of one must not be added to."""
    types: set[str] = field(default_factory=set)
    """What a step consists of, as far as anybody declared or saved it."""
    needs: dict[str, dict[tuple[int, ...], int]] = field(default_factory=dict)
    complained: set[int] = field(default_factory=set)
    """Steps whose differing paths were told."""

    def refusal(self, step: int, world_size: int) -> str | None:
        """Say why the step cannot be used, or None when it can."""
        if step not in self.complete:
            # Where the job began is told by whoever asks, and it has no types.
            types = self.types if step != BEGINNING else set()
            return self.pending[step].refusal(world_size, types, self.needs)
        for path in self.complete[step].values():
            over = [
                at for at, paths in self.complete.items() if at > step and path in paths.values()
            ]
            over += [
                at
                for at, entry in self.pending.items()
                if at > step and any(path in part.paths for part in entry.parts.values())
            ]
            if path and over:  # whatever lies there now, it is not what every rank confirmed
                return f"step {min(over)} was written over it at {one_line(path)}"
        return None


@dataclass(slots=True)
class CheckpointLedger:
    """What every rank confirmed.  All methods may be called again with the same content."""

    _prefixes: dict[str, _Prefix] = field(default_factory=dict)
    _generation: int = 0

    @classmethod
    def restored(
        cls, complete: Iterable[CheckpointPointer], generation: int = 0
    ) -> "CheckpointLedger":
        """Return a ledger that knows the complete checkpoints of a `DurableState`."""
        ledger = cls(_generation=generation)
        for pointer in complete:
            kept = ledger._prefixes.setdefault(pointer.prefix, _Prefix())
            kept.complete[pointer.step] = {MODEL_CHECKPOINT: pointer.path, **dict(pointer.others)}
            kept.types |= kept.complete[pointer.step].keys()
        return ledger

    def declare(self, prefix: str, kind: str, ranks: tuple[int, ...], count: int) -> None:
        """Take in that ``count`` of a node's ``ranks`` report each ``kind`` of ``prefix``.

        Nothing that is complete is undone by it, however late it comes.
        """
        if prefix not in self._prefixes and len(self._prefixes) >= PREFIXES_MAX:
            return
        known = self._prefixes.setdefault(prefix, _Prefix())
        known.needs.setdefault(kind, {})[ranks] = count
        if count > 0:
            known.types.add(kind)

    def confirm(
        self,
        prefix: str,
        step: int,
        ranks: Iterable[int],
        paths: Iterable[str],
        *,
        generation: int | None = None,
        kind: str = MODEL_CHECKPOINT,
    ) -> str | None:
        """Take in that ``ranks`` saved ``step``; return why it was not taken, or None.

        ``generation`` is the run that the ranks belong to.  One older than the last `begin` is
        not taken: those ranks speak of a run whose later steps were given up.
        """
        if generation is not None and generation < self._generation:
            return f"step {step} was saved by generation {generation}, which was given up"
        if step < 0:
            return f"step {step} of {one_line(prefix)!r} is not a step"
        if prefix not in self._prefixes and len(self._prefixes) >= PREFIXES_MAX:
            return f"checkpoint prefix {one_line(prefix)!r} is beyond the limit of {PREFIXES_MAX}"
        known = self._prefixes.setdefault(prefix, _Prefix())
        if step != BEGINNING:
            known.types.add(kind)
        if step in known.complete:
            return None
        if step <= known.begun_from:
            return f"step {step} is not after step {known.begun_from}, which the run began from"
        known.pending.setdefault(step, Step()).confirm(kind, ranks, paths)
        _keep_newest(known.pending)
        if step not in known.pending:
            return f"step {step} of {one_line(prefix)!r} is older than the {STEPS_KEPT_MAX} kept"
        return None

    def complete(self, world_size: int) -> tuple[CheckpointPointer, ...]:
        """Return the checkpoints that became complete since the last call, oldest first."""
        fresh: list[CheckpointPointer] = []
        for prefix, known in sorted(self._prefixes.items()):
            whole = [
                step for step in sorted(known.pending) if known.refusal(step, world_size) is None
            ]
            for step in whole:
                known.complete[step] = known.pending.pop(step).paths()
                fresh.append(_pointer(prefix, step, known.complete[step]))
            _keep_newest(known.complete)
        return tuple(fresh)

    def pointers(self) -> tuple[CheckpointPointer, ...]:
        """Return every complete checkpoint, newest last, as a `DurableState` keeps them."""
        found = [
            _pointer(prefix, step, paths)
            for prefix, known in self._prefixes.items()
            for step, paths in known.complete.items()
        ]
        return tuple(sorted(found, key=lambda item: (item.step, item.prefix)))

    def pending(self, world_size: int) -> tuple[PendingCheckpoint, ...]:
        """Return the steps that are newer than the last complete one, and whom they lack."""
        found = []
        for prefix, known in sorted(self._prefixes.items()):
            newest = max(known.complete, default=-1)
            for step, entry in sorted(known.pending.items()):
                why = known.refusal(step, world_size)
                if step <= newest or why is None:
                    continue
                absent: set[int] = set()
                for kind in known.types | entry.parts.keys():
                    absent |= entry.missing(kind, world_size, known.needs)
                found.append(
                    PendingCheckpoint(
                        prefix=prefix, step=step, missing_ranks=tuple(sorted(absent)), why=why
                    )
                )
        return tuple(found)

    def conflicts(self) -> tuple[str, ...]:
        """Return a sentence for each step, once, whose ranks told different paths."""
        found = []
        for prefix, known in sorted(self._prefixes.items()):
            known.complained &= known.pending.keys()
            for step, entry in sorted(known.pending.items()):
                if entry.conflict() is None or step in known.complained:
                    continue
                known.complained.add(step)
                what = "began from" if step == BEGINNING else f"saved step {step} of"
                found.append(
                    f"ranks {what} checkpoint {one_line(prefix)!r} at different paths, so it "
                    f"cannot be used: {told_apart(entry)}; give all ranks one shared path"
                )
        return tuple(found)

    def choose(
        self,
        world_size: int,
        *,
        not_after: int | None = None,
        demoted: Demoted = NONE_DEMOTED,
    ) -> tuple[CheckpointChoice, ...]:
        """Choose per prefix the newest usable step, with the reason.

        ``not_after`` is the step at which the run was seen to be broken (a loss that is not
        finite): what was saved at that step or later may hold the damage and is passed over.
        So is what is ``demoted``.
        """
        return tuple(
            _choice(prefix, known, world_size, not_after, demoted)
            for prefix, known in sorted(self._prefixes.items())
            if known.complete or known.pending
        )

    def begin(self, generation: int, choices: Sequence[CheckpointChoice]) -> None:
        """Note that ``generation`` starts from ``choices``, and forget everything newer.

        Newer steps belong to a run that was given up: the new one will reach the same numbers
        again, and half a checkpoint of each must never add up to a whole one.
        """
        self._generation = max(self._generation, generation)
        chosen = {choice.prefix: choice for choice in choices}
        for prefix, known in self._prefixes.items():
            choice = chosen.get(prefix)
            newest = -1 if choice is None or choice.step is None else choice.step
            known.complete = {at: paths for at, paths in known.complete.items() if at <= newest}
            if choice is not None and choice.path is not None:
                known.complete[newest] = {MODEL_CHECKPOINT: choice.path, **dict(choice.others)}
            known.pending = {}
            known.begun_from = newest


def _choice(
    prefix: str, known: _Prefix, world_size: int, not_after: int | None, demoted: Demoted
) -> CheckpointChoice:
    skipped: list[str] = []
    for step in sorted(known.complete.keys() | known.pending.keys(), reverse=True):
        if not_after is not None and step >= not_after:
            skipped.append(f"step {step} skipped: the run was already broken at step {not_after}")
            continue
        why = demoted.get((prefix, step)) or known.refusal(step, world_size)
        if why is None:
            # An empty path is one too: the job began from nothing.
            paths = known.complete.get(step) or known.pending[step].paths()
            pointer = _pointer(prefix, step, paths)
            return CheckpointChoice(
                prefix=prefix,
                step=step,
                path=pointer.path,
                others=pointer.others,
                reason=_chosen(step) + _tail(skipped),
            )
        skipped.append(f"step {step} skipped: {why}")
    reason = "no step is confirmed by every rank, so the script's own choice stands"
    return CheckpointChoice(prefix=prefix, step=None, path=None, reason=reason + _tail(skipped))


def _pointer(prefix: str, step: int, paths: Mapping[str, str]) -> CheckpointPointer:
    """Return the pointer; what has no model is named by the type that it has."""
    main = MODEL_CHECKPOINT if MODEL_CHECKPOINT in paths else min(paths)
    others = tuple(sorted((kind, path) for kind, path in paths.items() if kind != main))
    return CheckpointPointer(prefix=prefix, step=step, path=paths[main], others=others)


def _chosen(step: int) -> str:
    if step == BEGINNING:
        return "no later step is confirmed by every rank, so the job starts where it first began"
    return f"step {step} is the newest usable one that every rank confirmed"


def _tail(skipped: Sequence[str]) -> str:
    more = len(skipped) - SKIPS_SHOWN_MAX
    shown = [*skipped[:SKIPS_SHOWN_MAX], *([f"{more} more skipped"] if more > 0 else [])]
    return "".join(f"; {item}" for item in shown)


def _keep_newest(steps: dict[int, dict[str, str]] | dict[int, Step]) -> None:
    for step in sorted(steps)[:-STEPS_KEPT_MAX]:
        del steps[step]
