"""What a rank's output says about it: every rule's state, line by line and by the clock.

Decides when a rule turns bad and says so once, until it is well again.  A rule's trouble is its
own: no value, however odd, keeps another rule from seeing the same line.  It knows neither files
nor clocks: lines and instants come in.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from scout.clock import Duration, Instant, after, seconds, since
from sidecar.logs.block import Block, block_of
from sidecar.logs.numbers import Extracted, number
from sidecar.logs.patterns import Hit
from sidecar.logs.phases import Phases
from sidecar.logs.prefixes import without_prefix
from sidecar.logs.records import IndentedRecords
from sidecar.logs.rules import LogRule, RankScope
from sidecar.logs.verdicts import LogState, LogVerdict, in_seconds, worst
from sidecar.logs.watch import Watch, line_step, metric_values

__all__ = [
    "SILENT_START_MAX",
    "Extracted",
    "LogEvaluator",
    "LogState",
    "LogVerdict",
    "NodeView",
    "Place",
    "clean",
    "number",
]

SILENT_START_MAX: Final = seconds(1800.0)
"""With a recurrence and no start cut-off, a first match may take this long.

Start-up (imports, a large checkpoint, compilation) is far slower than a step, so the recurrence
itself would restart healthy jobs for ever; but a job that never begins must be found too.
"""

_Steps = list[tuple[int, Watch, Hit]]

When = Callable[[Block, int], Instant]
"""When a line was written, by its place in a block: for output of the past."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank this is.  ``lead`` is one rank of each node, which speaks for all of them."""

    rank: int = 0
    world_size: int = 1
    lead: bool = True
    whole_job: bool = True
    """Every rank of the job runs on this node."""


@dataclass(slots=True)
class NodeView:
    """What the ranks of a node know of one another.  ``changes`` grows with every match."""

    progress: dict[str, Instant] = field(default_factory=dict)
    phases: list[Phases] = field(default_factory=list)
    changes: int = 0


class LogEvaluator:
    """All rules over the output of one rank, which began at ``now``."""

    def __init__(
        self,
        rules: Sequence[LogRule],
        now: Instant,
        matches: Counter[str] | None = None,
        *,
        place: Place | None = None,
        node: NodeView | None = None,
        on_extracted: Callable[[str, Extracted, int], None] | None = None,
    ) -> None:
        """``matches`` and ``node`` may be shared by several evaluators.

        ``on_extracted`` is told every metric with its rule and its place in the block; without
        it only the last one is kept.
        """
        self._began = now
        self._place = place or Place()
        self._node = node or NodeView()
        self._watches = [
            Watch(rule=rule)
            for rule in rules
            if rule.phase is None and _concerns(rule.rank_scope, self._place)
        ]
        self._phase_rules = [rule for rule in rules if rule.phase is not None]
        self.phases = Phases()
        self._node.phases.append(self.phases)
        self._joins = any(watch.rule.join_indented for watch in self._watches)
        self._records: dict[int, IndentedRecords] = {}
        self._on_extracted = on_extracted
        self._last_step: int | None = None
        self._looked_at = -1
        self._due: Instant | None = None
        self.matches: Counter[str] = Counter() if matches is None else matches
        """Lines that matched each rule."""
        self.series: dict[str, Extracted] = {}
        """The newest value of each metric that a rule's named groups hold."""

    # --- lines ------------------------------------------------------------------------------

    def line(self, text: str, now: Instant) -> list[LogVerdict]:
        """Show one line to every rule; returns what turned bad by it."""
        return self.judge(block_of((text,)), now)

    def lines(self, texts: Sequence[str], now: Instant) -> list[LogVerdict]:
        """Show lines in order; the same as `line` for each, and faster for many."""
        return self.judge(block_of(texts), now)

    def judge(
        self, block: Block, now: Instant, *, stream: int = 0, when: When | None = None
    ) -> list[LogVerdict]:
        """Show a block to every rule; ``stream`` tells the files of one rank apart.

        With ``when`` it is judged as if each line came at its own time, silences included.
        """
        verdicts: list[LogVerdict] = []
        for part, begins in self._parts(block):
            at = now if when is None else when(part, 0)
            for rule in begins:
                self._turn_phase(rule, part, at)
            verdicts += self._judge_part(part, now, stream, when)
        return verdicts

    def timer(self, now: Instant) -> list[LogVerdict]:
        """Return what turned bad because nothing came."""
        verdicts: list[LogVerdict] = []
        for records in self._records.values():
            pending = records.overdue(now)
            if pending is not None:
                verdicts += self._judge_joined(pending, now)
        if self._looked_at == self._node.changes and (self._due is None or now < self._due):
            return verdicts
        for watch in self._watches:
            self._recover(watch)
            deadline = self._deadline(watch)
            if deadline is not None and now >= deadline:
                verdicts.append(self._hang(watch, deadline, now))
        self._looked_at, self._due = self._node.changes, self._next_deadline()
        return verdicts

    def next_deadline(self) -> Instant | None:
        """Return when `timer` may find something, or None while only lines can."""
        return self._next_deadline()

    def begin_phase(self, name: str, limit: Duration, now: Instant) -> None:
        """Allow silence for ``limit``: the worker itself says that it evaluates, or compiles."""
        self.phases.begin(name, limit, now)
        self._node.changes += 1

    def end_phase(self, name: str, now: Instant) -> None:
        """The worker says that it is done."""
        self.phases.end(name, now)
        self._node.changes += 1

    # --- what it knows ------------------------------------------------------------------------

    def states(self) -> dict[str, LogState]:
        """Return each rule's state."""
        return {watch.rule.name: watch.state for watch in self._watches}

    def never_matched(self) -> tuple[str, ...]:
        """Return the rules that no line has matched: not a hang, but perhaps a slip in them."""
        return tuple(w.rule.name for w in self._watches if w.progress_at is None)

    @property
    def state(self) -> LogState:
        """The worst state of all rules; WAITING when there are none."""
        return worst([watch.state for watch in self._watches])

    # --- a block ------------------------------------------------------------------------------

    def _parts(self, block: Block) -> list[tuple[Block, list[LogRule]]]:
        """Cut a block where phases begin or end, so that what follows sees them."""
        turns: dict[int, list[LogRule]] = {}
        for rule in self._phase_rules:
            assert rule.phase is not None
            ends = rule.phase.end.hits(block) if rule.phase.end is not None else []
            for place, _ in (*rule.pattern.hits(block), *ends):
                start = block.data.rfind(b"\n", 0, place) + 1
                if rule not in turns.setdefault(start, []):
                    turns[start].append(rule)
        if not turns:
            return [(block, [])]
        cuts = sorted({0, *turns, len(block.data)})
        return [
            (Block(block.data[a:b], before=block.before + block.data[:a]), turns.get(a, []))
            for a, b in pairwise(cuts)
        ]

    def _turn_phase(self, rule: LogRule, block: Block, now: Instant) -> None:
        assert rule.phase is not None
        line = Block(block.data[: block.data.find(b"\n") + 1])
        self._node.changes += 1
        if rule.phase.end is not None and rule.phase.end.hits(line):
            self.phases.end(rule.name, now)
        else:
            self.phases.begin(rule.name, rule.phase.limit, now)

    def _judge_part(
        self, block: Block, now: Instant, stream: int, when: When | None
    ) -> list[LogVerdict]:
        verdicts: list[LogVerdict] = []
        found = [
            (watch, watch.rule.pattern.hits(block))
            for watch in self._watches
            if not watch.over and not watch.rule.join_indented
        ]
        steps = _step_places(found)
        for watch, hits in found:
            verdicts += self._show(watch, block, hits, now, when)
            if hits and watch.rule.metrics:
                self._extract(watch.rule, block, hits, steps)
        if steps:
            self._last_step = _newest_step(block, steps, len(block.data), self._last_step)
        if self._joins:
            records = self._records.setdefault(stream, IndentedRecords())
            joined = records.feed(block, now)
            if joined is not None:
                verdicts += self._judge_joined(joined, now, when)
        verdicts.sort(key=lambda verdict: verdict.position)  # stable: rules keep their order
        return verdicts

    def _judge_joined(
        self, block: Block, now: Instant, when: When | None = None
    ) -> list[LogVerdict]:
        verdicts: list[LogVerdict] = []
        for watch in self._watches:
            if watch.rule.join_indented and not watch.over:
                hits = watch.rule.pattern.hits(block)
                verdicts += self._show(watch, block, hits, now, when)
                if hits and watch.rule.metrics:
                    self._extract(watch.rule, block, hits, _step_places([(watch, hits)]))
        return verdicts

    def _show(
        self, watch: Watch, block: Block, hits: list[Hit], now: Instant, when: When | None
    ) -> list[LogVerdict]:
        stops = [] if watch.rule.stop is None else watch.rule.stop.hits(block)
        if stops:
            line_end = block.data.find(b"\n", stops[0][0])
            hits = [hit for hit in hits if hit[0] < line_end]
        verdicts: list[LogVerdict] = []
        if hits:
            if when is None:
                verdicts = watch.take(block, hits, now, self.matches)
            else:
                verdicts = self._replay(watch, block, hits, when)
            self._progressed(watch, now if when is None else when(block, hits[-1][0]))
        if stops and watch.state is not LogState.FAULTED:
            watch.off, watch.state = True, LogState.HEALTHY
            self._node.changes += 1
        return verdicts

    def _progressed(self, watch: Watch, now: Instant) -> None:
        self._node.changes += 1
        if watch.progress_at is not None:
            known = self._node.progress.get(watch.rule.name, watch.progress_at)
            self._node.progress[watch.rule.name] = max(known, watch.progress_at)
        if watch.rule.recurring is not None:
            self.phases.progressed(now)

    def _replay(self, watch: Watch, block: Block, hits: list[Hit], when: When) -> list[LogVerdict]:
        """Take lines at their own times; the silence before one may have been too long."""
        verdicts: list[LogVerdict] = []
        for hit in hits:
            if watch.over:
                break
            now = when(block, hit[0])
            deadline = self._deadline(watch)
            if deadline is not None and now >= deadline:
                verdicts.append(self._hang(watch, deadline, now, hit[0]))
            verdicts += watch.take(block, [hit], now, self.matches)
            self._progressed(watch, now)
        return verdicts

    def _extract(self, rule: LogRule, block: Block, hits: list[Hit], steps: _Steps) -> None:
        wanted = hits if self._on_extracted is not None else hits[-1:]
        for hit in wanted:
            step = line_step(rule, block, hit)
            if step is None:
                line_end = block.data.find(b"\n", hit[0])
                step = _newest_step(block, steps, line_end, self._last_step)
            for metric, value in metric_values(rule, block, hit):
                extracted = Extracted(metric=metric, value=value, step=step)
                self.series[metric] = extracted
                if self._on_extracted is not None:
                    self._on_extracted(rule.name, extracted, hit[0])

    # --- silence ------------------------------------------------------------------------------

    def _next_deadline(self) -> Instant | None:
        deadlines = (self._deadline(watch) for watch in self._watches)
        return min((at for at in deadlines if at is not None), default=None)

    def _deadline(self, watch: Watch) -> Instant | None:
        if watch.over or watch.state is LogState.HANGING:
            return None
        rule, anyone = watch.rule, self._node.progress.get(watch.rule.name)
        if rule.rank_scope is RankScope.ANY:
            if not self._place.lead or (anyone is None and not self._place.whole_job):
                return None
            progress, phases = anyone, self._node.phases
        else:
            progress, phases = watch.progress_at, [self.phases]
            silent = rule.rank_scope is None and progress is None
            # Most frameworks print on one rank: the others wait for nothing.
            if silent and (anyone is not None or not self._place.lead):
                return None
        if progress is not None:
            if rule.recurring is None:
                return None
            return max(one.deadline(progress, rule.recurring) for one in phases)
        if rule.start_cut_off is not None:
            return after(self._began, rule.start_cut_off)
        if rule.recurring is not None:
            return after(self._began, Duration(max(rule.recurring, SILENT_START_MAX)))
        return None

    def _recover(self, watch: Watch) -> None:
        """End a hang that another rank's line has ended."""
        if watch.state is LogState.HANGING and watch.rule.rank_scope in (None, RankScope.ANY):
            anyone = self._node.progress.get(watch.rule.name)
            began_hang = watch.hung_at
            if anyone is not None and began_hang is not None and anyone > began_hang:
                own = watch.progress_at is not None
                if not own or watch.rule.rank_scope is RankScope.ANY:
                    watch.state = LogState.HEALTHY if own else LogState.WAITING

    def _hang(self, watch: Watch, deadline: Instant, now: Instant, position: int = 0) -> LogVerdict:
        watch.state, watch.hung_at = LogState.HANGING, deadline
        late = since(deadline, now)
        progress = watch.progress_at
        if watch.rule.rank_scope is RankScope.ANY:
            progress = self._node.progress.get(watch.rule.name)
        if progress is None:
            waited = since(self._began, deadline)
            message = f"no line matched within {in_seconds(waited)} of the start"
        else:
            silent, allowed = since(progress, now), since(progress, deadline)
            message = (
                f"no line has matched for {in_seconds(silent)}; one is expected every "
                f"{in_seconds(allowed)}"
            )
            if watch.step is not None:
                message = (
                    f"no line with a new step has come for {in_seconds(silent)}, the last was "
                    f"{watch.step}; one is expected every {in_seconds(allowed)}"
                )
        phase = self.phases.running(deadline)
        if phase is not None and progress is not None:
            message += f" in phase {phase}, whose limit ran out"
        return watch.verdict(message, age=late, position=position)


def clean(text: str) -> str:
    """Return a line without colours and without the prefixes of launchers (``[rank0]:``)."""
    return without_prefix(block_of((text,)).data.decode()[:-1])


def _concerns(scope: RankScope | None, place: Place) -> bool:
    if scope is RankScope.FIRST:
        return place.rank == 0
    if scope is RankScope.LAST:
        return place.rank == place.world_size - 1
    return True


def _step_places(found: Sequence[tuple[Watch, list[Hit]]]) -> _Steps:
    """Return every line that names a step, in order."""
    named = [(watch, hits) for watch, hits in found if watch.rule.step_group is not None and hits]
    steps = [(hit[0], watch, hit) for watch, hits in named for hit in hits]
    if len(named) > 1:
        steps.sort(key=lambda one: one[0])
    return steps


def _newest_step(block: Block, steps: _Steps, before: int, otherwise: int | None) -> int | None:
    place = bisect_left(steps, before, key=lambda one: one[0]) - 1
    if place < 0:
        return otherwise
    _, watch, hit = steps[place]
    step = line_step(watch.rule, block, hit)
    return otherwise if step is None else step
