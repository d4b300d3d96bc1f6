"""When a rule has been silent for too long, on a rank or on a whole node.

Decides whose silence counts: most frameworks print on one rank only, and a rank that never prints
is no hang.  It knows no line; what was matched and when stands in the watches.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from scout.clock import Duration, Instant, after, seconds, since
from sidecar.logs.phases import Phases
from sidecar.logs.rules import RankScope
from sidecar.logs.verdicts import LogState, LogVerdict, in_seconds
from sidecar.logs.watch import Watch

SILENT_START_MAX: Final = seconds(1800.0)
"""With a recurrence and no start cut-off, a first match may take this long.

Start-up (imports, a large checkpoint, compilation) is far slower than a step, so the recurrence
itself would restart healthy jobs for ever; but a job that never begins must be found too.
"""
REMEMBERED_MAX: Final = 256
"""Lines of a node-wide rule that are remembered, to know them when other ranks print them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank this is.  ``lead`` is one rank of each node, which speaks for all of them."""

    rank: int = 0
    world_size: int = 1
    lead: bool = True
    whole_job: bool = True
    """Every rank of the job runs on this node."""

    def concerns(self, scope: RankScope | None) -> bool:
        """Return whether a rule of this scope is judged on this rank at all."""
        if scope is RankScope.FIRST:
            return self.rank == 0
        if scope is RankScope.LAST:
            return self.rank == self.world_size - 1
        return True


@dataclass(slots=True)
class NodeView:
    """What the ranks of a node know of one another.  ``changes`` grows with every match."""

    progress: dict[str, Instant] = field(default_factory=dict)
    phases: list[Phases] = field(default_factory=list)
    shared: dict[str, Watch] = field(default_factory=dict)
    """Rules of the scope ``any``: one for all ranks."""
    changes: int = 0
    repeats: int = 0
    """Lines of such rules that another rank had printed already."""
    _said: dict[str, dict[bytes, int]] = field(default_factory=dict)

    def fork(self, phases: list[Phases], watches: Mapping[int, Watch]) -> "NodeView":
        """Return a copy that goes on by itself, with copies of the watches by their `id`."""
        return replace(
            self,
            progress=dict(self.progress),
            phases=phases,
            shared={name: watches[id(watch)] for name, watch in self.shared.items()},
            _said={name: dict(said) for name, said in self._said.items()},
        )

    def forget(self, rules: Iterable[str]) -> None:
        """Know nothing of rules any more: they were taken back, or written anew."""
        for name in rules:
            for known in (self.progress, self.shared, self._said):
                known.pop(name, None)
        self.changes += 1

    def is_repeat(self, rule: str, line: bytes, rank: int) -> bool:
        """Return whether another rank printed this line, or named this step, before."""
        said = self._said.setdefault(rule, {})
        if said.setdefault(line, rank) != rank:
            self.repeats += 1
            return True
        if len(said) > REMEMBERED_MAX:
            del said[next(iter(said))]
        return False


@dataclass(slots=True)
class Silence:
    """The silences of one rank's rules, counted from ``began``."""

    began: Instant
    place: Place
    node: NodeView
    phases: Phases

    def deadline(self, watch: Watch) -> Instant | None:
        """Return when the rule hangs unless a line matches, or None while it cannot."""
        if watch.over or watch.state is LogState.HANGING:
            return None
        rule, progress, phases = watch.rule, watch.progress_at, [self.phases]
        if rule.rank_scope is RankScope.ANY:
            if not self.place.lead or (progress is None and not self.place.whole_job):
                return None
            phases = self.node.phases
        elif rule.rank_scope is None and progress is None and self._others_speak(rule.name):
            return None
        if progress is not None:
            if rule.recurring is None:
                return None
            return max(one.deadline(progress, rule.recurring) for one in phases)
        began = self.began if watch.began is None else watch.began
        if rule.start_cut_off is not None:
            return after(began, rule.start_cut_off)
        if rule.recurring is not None:
            return after(began, Duration(max(rule.recurring, SILENT_START_MAX)))
        return None

    def _others_speak(self, rule: str) -> bool:
        """Return whether a rank that printed nothing waits for nothing: most frameworks' ranks."""
        return rule in self.node.progress or not self.place.lead

    def recover(self, watch: Watch) -> None:
        """End the hang of a rank that spoke for the node, once another rank has begun."""
        waits = watch.state is LogState.HANGING and watch.progress_at is None
        if waits and watch.rule.rank_scope is None and watch.rule.name in self.node.progress:
            watch.state = LogState.WAITING

    def hang(self, watch: Watch, deadline: Instant, now: Instant, position: int = 0) -> LogVerdict:
        """Turn a rule to HANGING and say why."""
        watch.state = LogState.HANGING
        progress = watch.progress_at
        if progress is None:
            began, of = (
                (watch.began, "the rule's edit") if watch.began else (self.began, "the start")
            )
            message = f"no line matched within {in_seconds(since(began, deadline))} of {of}"
        else:
            silent, allowed = in_seconds(since(progress, now)), since(progress, deadline)
            message = f"no line has matched for {silent}"
            if watch.step is not None:
                message = f"no step after {watch.step} has come for {silent}"
            message += f"; one is expected every {in_seconds(allowed)}"
            phase = self.phases.running(deadline)
            if phase is not None:
                message += f", and the limit of phase {phase} ran out"
        return watch.verdict(message, age=since(deadline, now), position=position)
