"""Which frameworks' step lines a job's output is read by, from what it looks like.

Decides by the shipped rules themselves: a framework is recognized by its own step line, because
banners and versions change faster.  Faults are always watched for and are no matter of choice.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from sidecar.logs.block import Block
from sidecar.logs.library.catalogue import Topic, frameworks
from sidecar.logs.rules import LogRule

STEP_CLASS: Final = "step"
LINES_MAX: Final = 100_000
"""Lines that are looked through; a job that printed no step line until then prints none."""
LINES_AFTER_FIRST: Final = 500
"""How long others are looked for once one was found: two may speak in turn."""
FALLBACK_HITS: Final = 20
"""Plain step lines, with no framework's among them, that are taken for what they look like."""


def sightings(block: Block) -> Counter[str]:
    """Return how many lines of ``block`` are step lines, by the key of the framework."""
    found = {
        topic.key: sum(
            len(entry.rule.pattern.hits(block))
            for entry in topic.entries
            if entry.fault_class == STEP_CLASS
        )
        for topic in frameworks()
    }
    return Counter({key: count for key, count in found.items() if count})


def chosen(seen: Counter[str], fallback_hits: int = FALLBACK_HITS) -> tuple[Topic, ...]:
    """Return the frameworks that output with these sightings is read by."""
    by_name = tuple(topic for topic in frameworks() if seen[topic.key] and not topic.fallback)
    if by_name:
        return by_name
    return tuple(
        topic for topic in frameworks() if topic.fallback and seen[topic.key] >= fallback_hits
    )


def rules_of(topics: Iterable[Topic]) -> tuple[LogRule, ...]:
    """Return the rules of ``topics``."""
    return tuple(entry.rule for topic in topics for entry in topic.entries)


class Choice:
    """The choice for one rank, made while its first lines come."""

    def __init__(self, own: Iterable[LogRule] = ()) -> None:
        """Begin; where a rule of the job's own reads a metric, nothing is added to it."""
        own = tuple(own)
        self._taken = {rule.name for rule in own}
        self.open = not any(rule.metrics for rule in own)
        self._seen: Counter[str] = Counter()
        self._lines_left = LINES_MAX
        self._topics: tuple[Topic, ...] = ()

    @property
    def topics(self) -> tuple[Topic, ...]:
        """The frameworks recognized so far."""
        return self._topics

    def show(self, block: Block) -> tuple[LogRule, ...]:
        """Return the rules that these lines add, to be applied from these very lines on."""
        if not self.open:
            return ()
        self._seen.update(sightings(block))
        found = chosen(self._seen)
        new = tuple(topic for topic in found if topic not in self._topics)
        if new and not self._topics:
            self._lines_left = LINES_AFTER_FIRST
        self._topics += new
        self._lines_left -= block.lines
        self.open = self._lines_left > 0
        return tuple(rule for rule in rules_of(new) if rule.name not in self._taken)
