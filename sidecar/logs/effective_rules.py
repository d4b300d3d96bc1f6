"""Which rules hold on a node: its own, the job's, and the shipped ones that tell of faults.

Decides what changes when the node's own rules do: a rule that reads as before goes on with all that
it has seen.  It opens no file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sidecar.logs.defaults import default_rules
from sidecar.logs.rules import LogRule, RuleError, usable_rules, with_defaults


class Rules:
    """The rules of one node.  Where the node and the job use a name, the node's rule holds."""

    def __init__(self, own: Sequence[Mapping[str, Any]]) -> None:
        self._own = tuple(own)
        self._job: tuple[Mapping[str, object], ...] = ()
        self._written: dict[str, Mapping[str, object] | None] = {}

    def begin(
        self, job: Sequence[Mapping[str, object]]
    ) -> tuple[tuple[LogRule, ...], tuple[LogRule, ...], tuple[RuleError, ...]]:
        """Begin a generation with the rules of its job.

        Returns all rules that hold, those of them that somebody wrote, and what cannot be used.
        """
        self._job = tuple(job)
        return self._taken()

    def swap(self, own: Sequence[Mapping[str, Any]]) -> tuple[frozenset[str], tuple[LogRule, ...]]:
        """Take other rules of the node's own; return the names that are over, and new rules."""
        before = self._written
        self._own = tuple(own)
        wanted, _, _ = self._taken()
        after = self._written
        gone = frozenset(
            name for name in before if name not in after or after[name] != before[name]
        )
        fresh = (rule for rule in wanted if rule.name in gone or rule.name not in before)
        return gone, tuple(fresh)

    def _taken(
        self,
    ) -> tuple[tuple[LogRule, ...], tuple[LogRule, ...], tuple[RuleError, ...]]:
        names = {rule["name"] for rule in self._own}
        # What is no mapping is refused below, with its reason.
        others = (
            one for one in self._job if not isinstance(one, Mapping) or _name(one) not in names
        )
        together = (*self._own, *others)
        usable, refused = usable_rules(together)
        wanted = with_defaults(usable, default_rules())
        told = {_name(one): one for one in together if isinstance(one, Mapping)}
        by_people = {rule.name for rule in usable}
        self._written = {
            rule.name: told.get(rule.name) if rule.name in by_people else None for rule in wanted
        }
        return wanted, usable, refused


def _name(fields: Mapping[str, object]) -> str:
    return str(fields.get("name"))
