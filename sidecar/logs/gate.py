"""Which of many rules may match in a block at all, found in one pass over it.

Most rules tell of faults and match in no block of a healthy job, yet each would be looked for in
all of them.  Here one expression is made of the literals that their matches must contain, and only
where it finds something is asked which.  Rules whose literals stand in every block anyway are
learned and left out of it.  It never says "no" where a rule would match.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import re2

from sidecar.logs.block import Block
from sidecar.logs.literals import shape_of
from sidecar.logs.patterns import Pattern, compile_re2

GATED_MIN: Final = 12
"""For fewer rules a pass of its own costs more than it saves: finding one literal is cheap."""
LEARNED_BLOCKS: Final = 8
"""After so many blocks that it found something in, the gate leaves out what is found most."""
FREQUENT: Final = 0.5
"""A rule is left out when its literals stand in more than this part of those blocks."""


@dataclass(frozen=True, slots=True)
class _Built:
    """``which`` finds literals by their place, ``owners`` tells whose they are."""

    always: frozenset[int]
    any: Any
    which: Any
    owners: tuple[int, ...]


class Gate:
    """The patterns of one set of rules, by their place in it.  Threads may share it.

    With fewer than ``least`` that it could rule out, everything passes.
    """

    def __init__(self, patterns: Sequence[Pattern], least: int = 1) -> None:
        self._patterns = tuple(patterns)
        self._least = least
        self._blocks = 0
        self._found = [0] * len(self._patterns)
        self._built = self._build(
            frozenset(
                index
                for index, pattern in enumerate(patterns)
                if not pattern.literals or not all(_writable(one) for one in pattern.literals[0])
            )
        )

    def __deepcopy__(self, memo: object) -> "Gate":
        """What it learned is about the output, and the same for a copy."""
        return self

    def passing(self, block: Block) -> frozenset[int]:
        """Return the places of the patterns that may match in ``block``."""
        built = self._built
        if built.any is None or built.any.search(block.data) is None:
            return built.always
        named = built.which.Match(block.data) or ()
        found = frozenset(built.owners[place] for place in named)
        self._learn(found, built)
        return found | built.always

    def _learn(self, found: frozenset[int], built: _Built) -> None:
        self._blocks += 1
        for index in found:
            self._found[index] += 1
        if self._blocks < LEARNED_BLOCKS:
            return
        often = FREQUENT * self._blocks
        frequent = {index for index, count in enumerate(self._found) if count > often}
        self._blocks, self._found = 0, [0] * len(self._patterns)
        if frequent - built.always:
            self._built = self._build(built.always | frequent)

    def _build(self, always: frozenset[int]) -> _Built:
        gated = [index for index in range(len(self._patterns)) if index not in always]
        if len(gated) < self._least:
            return _Built(frozenset(range(len(self._patterns))), None, None, ())
        which = re2.Set.SearchSet()
        texts: list[str] = []
        owners: list[int] = []
        for index in gated:
            pattern = self._patterns[index]
            folds_case = shape_of(pattern.text).fold_case
            for literal in pattern.literals[0]:
                text = re2.escape(literal.decode())
                texts.append(f"(?i:{text})" if folds_case else text)
                owners.append(index)
                which.Add(texts[-1])
        which.Compile()
        return _Built(always, compile_re2("|".join(texts)), which, tuple(owners))


@functools.lru_cache(maxsize=32)
def gate_of(patterns: tuple[Pattern, ...]) -> Gate:
    """Return the gate of these very patterns: the ranks of a node share one."""
    return Gate(patterns, GATED_MIN)


def _writable(literal: bytes) -> bool:
    """Return whether a literal can be written into an expression: it may be cut in a letter."""
    try:
        literal.decode()
    except UnicodeDecodeError:
        return False
    return True
