"""What a rule can say of a rank, and the evidence it says it with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from scout.clock import SECOND
from sidecar.api import FaultKind
from sidecar.logs.block import Block
from sidecar.logs.prefixes import without_prefix

LINE_CHARS_MAX: Final = 1000
"""How much of a line a finding carries; longer than any training framework's step line."""
BLOCK_LINES_MAX: Final = 60
"""Lines of a traceback that a finding carries: the last ones, which name the cause."""


class LogState(StrEnum):
    """One rule's view of a rank."""

    WAITING = "waiting"
    HEALTHY = "healthy"
    SLOW = "slow"
    HANGING = "hanging"
    FAULTED = "faulted"


SEVERITY: Final[Mapping[LogState, int]] = MappingProxyType(
    {state: place for place, state in enumerate(LogState)}
)
KINDS: Final[Mapping[LogState, FaultKind]] = MappingProxyType(
    {
        LogState.SLOW: FaultKind.LOG_SLOW,
        LogState.HANGING: FaultKind.LOG_HANG,
        LogState.FAULTED: FaultKind.LOG_RULE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogVerdict:
    """A rule turned bad.  ``age_ns`` is how long ago, when that was before it was looked at.

    ``rank`` is the one that the line itself names, when a launcher wrote it there.  ``block`` is
    the traceback that ends in the line.  ``position`` orders the verdicts of one block.
    """

    rule: str
    state: LogState
    kind: FaultKind
    message: str
    line: str
    step: int | None = None
    age_ns: int = 0
    rank: int | None = field(default=None, compare=False)
    block: tuple[str, ...] = field(default=(), compare=False)
    position: int = field(default=0, compare=False)


def worst(states: list[LogState]) -> LogState:
    """Return the worst state; WAITING when there is none."""
    return max(states, key=SEVERITY.__getitem__, default=LogState.WAITING)


def in_seconds(span: int) -> str:
    """Return a duration as messages write it."""
    return f"{span / SECOND:.3g} s"


def line_at(block: Block, position: int) -> str:
    """Return the line around ``position``, as a finding carries it."""
    start = block.data.rfind(b"\n", 0, position) + 1
    return without_prefix(block.text(start))[:LINE_CHARS_MAX]


_HEADER: Final = "Traceback (most recent call last)"


def traceback_to(block: Block, position: int) -> tuple[str, ...]:
    """Return the traceback that ends in the line around ``position``, or nothing."""
    end = block.data.find(b"\n", position)
    earlier = (block.before + block.data[:end]).decode(errors="replace")
    lines = [without_prefix(line) for line in earlier.split("\n")]
    found: list[str] = []
    for line in reversed(lines):
        found.append(line[:LINE_CHARS_MAX])
        if line.startswith(_HEADER):
            return tuple(reversed(found))
        # Between the header and its last line everything is indented.
        if len(found) > 1 and not line.startswith((" ", "\t")):
            return ()
        if len(found) > BLOCK_LINES_MAX:
            return tuple(reversed(found))
    return ()
