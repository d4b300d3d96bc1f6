"""Which checkpoint the job may resume from: the newest step that every rank confirmed.

It collects what ranks say they saved and compares it.  It never looks at a file system, and it
does not know which nodes are alive: a checkpoint that was complete stays complete when the node
that confirmed it is gone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.incidents import CheckpointChoice
from coordinator.wording import have, one_line, rank_list
from sidecar.api import CheckpointPointer
from worker_shim.messages import BEGINNING

STEPS_KEPT_MAX: Final = 64
"""Steps remembered per prefix, complete and incomplete ones apart.

An incomplete step so far behind the newest is abandoned, and no rollback goes back that far.
Both have their own limit so that a rank which never confirms cannot push the last complete
checkpoint out.
"""

PREFIXES_MAX: Final = 16
"""Prefixes remembered; a job names a handful, and a worker that invents them must cost nothing."""

PATHS_KEPT_MAX: Final = 4
"""Different paths remembered of one step: the second already makes the step unusable."""

SKIPS_SHOWN_MAX: Final = 3
"""Newer steps whose refusal a reason spells out."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """An incomplete step."""

    ranks: set[int] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)

    def refusal(self, world_size: int) -> str | None:
        """Say why the step cannot be used, or None when every rank confirmed one path."""
        if not self.paths:
            return "no rank told its path"
        if len(self.paths) > 1:
            shown = ", ".join(one_line(path) for path in sorted(self.paths))
            return f"its ranks saved it to different paths ({shown})"
        missing = set(range(world_size)) - self.ranks
        if missing:
            return f"{rank_list(missing)} {have(missing)} not confirmed it"
        return None


@dataclass(slots=True, kw_only=True)
class _Prefix:
    complete: dict[int, str] = field(default_factory=dict)
    pending: dict[int, _Step] = field(default_factory=dict)
    begun_from: int = -1
    """The step that the present generation began from.  Older ones that are not complete never
    will be: nobody saves them again, and half of one must not be added to."""

    def refusal(self, step: int, world_size: int) -> str | None:
        """Say why the step cannot be used, or None when it can."""
        if step not in self.complete:
            return self.pending[step].refusal(world_size)
        path = self.complete[step]
        over = [at for at, other in self.complete.items() if at > step and other == path]
        over += [at for at, entry in self.pending.items() if at > step and path in entry.paths]
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
            kept.complete[pointer.step] = pointer.path
        return ledger

    def confirm(
        self,
        prefix: str,
        step: int,
        ranks: Iterable[int],
        paths: Iterable[str],
        *,
        generation: int | None = None,
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
        if step in known.complete:
            return None
        if step <= known.begun_from:
            return f"step {step} is not after step {known.begun_from}, which the run began from"
        entry = known.pending.setdefault(step, _Step())
        entry.ranks.update(rank for rank in ranks if rank >= 0)
        entry.paths.update(sorted(set(paths) - entry.paths)[: PATHS_KEPT_MAX - len(entry.paths)])
        _keep_newest(known.pending)
        if step not in known.pending:
            return f"step {step} of {one_line(prefix)!r} is older than the {STEPS_KEPT_MAX} kept"
        return None

    def complete(self, world_size: int) -> tuple[CheckpointPointer, ...]:
        """Return the checkpoints that became complete since the last call, oldest first."""
        fresh: list[CheckpointPointer] = []
        for prefix, known in sorted(self._prefixes.items()):
            for step, entry in sorted(known.pending.items()):
                if entry.refusal(world_size) is None:
                    (path,) = entry.paths
                    known.complete[step] = path
                    fresh.append(CheckpointPointer(prefix=prefix, step=step, path=path))
            for pointer in fresh:
                if pointer.prefix == prefix:
                    del known.pending[pointer.step]
            _keep_newest(known.complete)
        return tuple(fresh)

    def pointers(self) -> tuple[CheckpointPointer, ...]:
        """Return every complete checkpoint, newest last, as a `DurableState` keeps them."""
        found = [
            CheckpointPointer(prefix=prefix, step=step, path=path)
            for prefix, known in self._prefixes.items()
            for step, path in known.complete.items()
        ]
        return tuple(sorted(found, key=lambda item: (item.step, item.prefix)))

    def choose(
        self, world_size: int, *, not_after: int | None = None
    ) -> tuple[CheckpointChoice, ...]:
        """Choose per prefix the newest usable step, with the reason.

        ``not_after`` is the step at which the run was seen to be broken (a loss that is not
        finite): what was saved at that step or later may hold the damage and is passed over.
        """
        return tuple(
            _choice(prefix, known, world_size, not_after)
            for prefix, known in sorted(self._prefixes.items())
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
            known.complete = {at: path for at, path in known.complete.items() if at <= newest}
            if choice is not None and choice.path is not None:
                known.complete[newest] = choice.path
            known.pending = {}
            known.begun_from = newest


def _choice(
    prefix: str, known: _Prefix, world_size: int, not_after: int | None
) -> CheckpointChoice:
    skipped: list[str] = []
    for step in sorted(known.complete.keys() | known.pending.keys(), reverse=True):
        if not_after is not None and step >= not_after:
            skipped.append(f"step {step} skipped: the run was already broken at step {not_after}")
            continue
        why = known.refusal(step, world_size)
        if why is None:
            # An empty path is one too: the job began from nothing.
            whole = step in known.complete
            path = known.complete[step] if whole else next(iter(known.pending[step].paths))
            reason = _chosen(step) + _tail(skipped)
            return CheckpointChoice(prefix=prefix, step=step, path=path, reason=reason)
        skipped.append(f"step {step} skipped: {why}")
    reason = "no step is confirmed by every rank, so the script's own choice stands"
    return CheckpointChoice(prefix=prefix, step=None, path=None, reason=reason + _tail(skipped))


def _chosen(step: int) -> str:
    if step == BEGINNING:
        return "no later step is confirmed by every rank, so the job starts where it first began"
    return f"step {step} is the newest usable one that every rank confirmed"


def _tail(skipped: Sequence[str]) -> str:
    more = len(skipped) - SKIPS_SHOWN_MAX
    shown = [*skipped[:SKIPS_SHOWN_MAX], *([f"{more} more skipped"] if more > 0 else [])]
    return "".join(f"; {item}" for item in shown)


def _keep_newest(steps: dict[int, str] | dict[int, _Step]) -> None:
    for step in sorted(steps)[:-STEPS_KEPT_MAX]:
        del steps[step]
