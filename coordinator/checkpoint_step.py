"""One step of one checkpoint prefix: which rank confirmed which type of it, and what is missing.

Pure bookkeeping for `coordinator.checkpoint_choice`, which compares steps.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from coordinator.wording import have, one_line, rank_list
from worker_shim.messages import MODEL_CHECKPOINT

PATHS_KEPT_MAX: Final = 4
"""Different paths remembered of one type: the second already makes the step unusable."""

Needs: TypeAlias = Mapping[str, Mapping[tuple[int, ...], int]]
"""Type -> a node's ranks -> how many of them report it.  Other ranks all report."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """What is known of one type."""

    ranks: set[int] = field(default_factory=set)
    paths: dict[str, set[int]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Step:
    """A step that is not complete yet."""

    parts: dict[str, _Part] = field(default_factory=dict)

    def confirm(self, kind: str, ranks: Iterable[int], paths: Iterable[str]) -> None:
        """Take in that ``ranks`` saved the ``kind`` of this step."""
        part = self.parts.setdefault(kind, _Part())
        told = {rank for rank in ranks if rank >= 0}
        part.ranks |= told
        for path in sorted(set(paths)):
            if path in part.paths or len(part.paths) < PATHS_KEPT_MAX:
                part.paths.setdefault(path, set()).update(told)

    def refusal(self, world_size: int, types: AbstractSet[str], needs: Needs) -> str | None:
        """Say why the step cannot be used, or None when every rank confirmed all of it."""
        if not any(part.paths for part in self.parts.values()):
            return "no rank told its path"
        if (why := self.conflict()) is not None:
            return why
        for kind in sorted({*types, *self.parts}, key=_model_first):
            absent = self.missing(kind, world_size, needs)
            if absent:
                what = "it" if kind == MODEL_CHECKPOINT else f"its {kind}"
                return f"{rank_list(absent)} {have(absent)} not confirmed {what}"
        return None

    def missing(self, kind: str, world_size: int, needs: Needs) -> frozenset[int]:
        """Return the ranks of which the ``kind`` of this step is still awaited."""
        part = self.parts.get(kind, _Part())
        absent = set(range(world_size)) - part.ranks
        for group, count in needs.get(kind, {}).items():
            if len(part.ranks & set(group)) >= count:
                absent -= set(group)
        return frozenset(absent)

    def conflict(self) -> str | None:
        """Say which ranks saved one type to different paths, or None."""
        for kind, part in sorted(self.parts.items()):
            if len(part.paths) > 1:
                shown = ", ".join(one_line(path) for path in sorted(part.paths))
                what = "it" if kind == MODEL_CHECKPOINT else f"its {kind}"
                return f"its ranks saved {what} to different paths ({shown})"
        return None

    def paths(self) -> dict[str, str]:
        """Return the one path of each type; only after `refusal` found nothing."""
        return {kind: min(part.paths) for kind, part in self.parts.items() if part.paths}


def told_apart(step: Step) -> str:
    """Return which rank told which path, for the person who must mend it."""
    clauses = [
        f"{rank_list(ranks)} to {one_line(path) or 'nothing'}"
        for part in step.parts.values()
        if len(part.paths) > 1
        for path, ranks in sorted(part.paths.items())
    ]
    return "; ".join(clauses)


def _model_first(kind: str) -> tuple[bool, str]:
    return kind != MODEL_CHECKPOINT, kind
