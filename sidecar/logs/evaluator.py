"""What a rank's output says about it: every rule's state, line by line and by the clock.

Decides when a rule turns bad and says so once, until it is well again.  A rule's trouble is its
own: no value, however odd, keeps another rule from seeing the same line.  It knows neither files
nor clocks: lines and instants come in.
"""

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from scout.clock import Instant, since
from sidecar.logs.block import Block, block_of
from sidecar.logs.gate import gate_of
from sidecar.logs.numbers import Extracted, number
from sidecar.logs.patterns import Hits
from sidecar.logs.phases import Declared, Phases
from sidecar.logs.prefixes import without_prefix
from sidecar.logs.records import IndentedRecords
from sidecar.logs.rules import LogRule, RankScope
from sidecar.logs.silence import SILENT_START_MAX, NodeView, Place, Silence
from sidecar.logs.verdicts import LogState, LogVerdict, line_at, worst
from sidecar.logs.watch import NamedSteps, Watch, line_step, metric_values

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

When = Callable[[Block, int], Instant]
"""When a line was written, by its place in a block: for output of the past."""


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
        on_hits: Callable[[LogRule, Block, Hits], None] | None = None,
    ) -> None:
        """``matches`` and ``node`` may be shared by several evaluators.

        ``on_extracted`` is told every metric with its rule and its place in the block; without
        it only the last one is kept.  ``on_hits`` is told the matches of rules that name metrics.
        """
        self._place = place or Place()
        self._node = node or NodeView()
        self._watches: list[Watch] = []
        self._phase_rules: list[LogRule] = []
        self.phases = Phases()
        self._node.phases.append(self.phases)
        self._silence = Silence(now, self._place, self._node, self.phases)
        self._records: dict[int, IndentedRecords] = {}
        self._on_extracted = on_extracted
        self._on_hits = on_hits
        self._last_step: int | None = None
        self._due: Instant | None = None
        self.matches: Counter[str] = Counter() if matches is None else matches
        """Lines that matched each rule."""
        self.series: dict[str, Extracted] = {}
        """The newest value of each metric that a rule's named groups hold."""
        self._arrange(frozenset(), rules, None)

    def add(self, rules: Sequence[LogRule]) -> None:
        """Judge by further rules from the next line on."""
        if rules:
            self._arrange(frozenset(), rules, None)

    def swap(self, gone: frozenset[str], fresh: Sequence[LogRule], now: Instant) -> None:
        """Judge by other rules from the next line on; the ``fresh`` ones count from ``now``.

        What the node as a whole knows of those that are ``gone`` is for it to forget first.
        """
        for rule in self._phase_rules:
            if rule.name in gone:
                self.phases.end(rule.name, now)
        self._arrange(gone, fresh, now)

    def _arrange(
        self, gone: frozenset[str], fresh: Iterable[LogRule], began: Instant | None
    ) -> None:
        ours = [rule for rule in fresh if self._place.concerns(rule.rank_scope)]
        kept = [watch for watch in self._watches if watch.rule.name not in gone]
        # In one assignment: the loop may ask for the states meanwhile.
        self._watches = [*kept, *(self._watch(rule, began) for rule in ours if rule.phase is None)]
        phases = [rule for rule in self._phase_rules if rule.name not in gone]
        self._phase_rules = [*phases, *(rule for rule in ours if rule.phase is not None)]
        self._joins = any(watch.rule.join_indented for watch in self._watches)
        self._gate = gate_of(tuple(watch.rule.pattern for watch in self._watches))
        self._timed = tuple(watch for watch in self._watches if watch.rule.is_timed)
        self._looked_at = -1

    def fork(self) -> "LogEvaluator":
        """Return a copy that goes on by itself, of a rank that shares its node with no other."""
        other = copy.copy(self)
        other.detach()
        return other

    def detach(self) -> None:
        """Share nothing any more with the evaluator that this one is a copy of."""
        copies = {id(watch): watch.fork() for watch in self._watches}
        self._watches = list(copies.values())
        self._timed = tuple(copies[id(watch)] for watch in self._timed)
        self.phases = self.phases.fork()
        self._node = self._node.fork([self.phases], copies)
        self._silence = replace(self._silence, node=self._node, phases=self.phases)
        self._records = {stream: copy.copy(kept) for stream, kept in self._records.items()}
        self.matches, self.series = Counter(self.matches), dict(self.series)

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
        for watch in self._timed:
            self._silence.recover(watch)
            deadline = self._silence.deadline(watch)
            if deadline is not None and now >= deadline:
                verdicts.append(self._silence.hang(watch, deadline, now))
        self._looked_at, self._due = self._node.changes, self._next_deadline()
        return verdicts

    def next_deadline(self) -> Instant | None:
        """Return when `timer` may find something, or None while only lines can."""
        return self._next_deadline()

    def turn_phase(self, before: Declared | None, phase: Declared | None, now: Instant) -> None:
        """Leave the phase that the worker declared ``before``, and enter the one it is in now."""
        if before is not None:
            self.phases.end(before.name, now)
        if phase is not None:
            self.phases.begin(phase.name, phase.limit, phase.since)
        self._node.changes += 1

    @property
    def node(self) -> NodeView:
        """What all ranks of the node share."""
        return self._node

    @property
    def rank(self) -> int:
        """The rank in the job whose output this is."""
        return self._place.rank

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

    def _watch(self, rule: LogRule, began: Instant | None = None) -> Watch:
        watch = Watch(rule=rule, began=began)
        if rule.rank_scope is RankScope.ANY:
            return self._node.shared.setdefault(rule.name, watch)
        return watch

    # --- a block ------------------------------------------------------------------------------

    def _parts(self, block: Block) -> list[tuple[Block, list[LogRule]]]:
        """Cut a block where phases begin or end, so that what follows sees them."""
        turns: dict[int, list[LogRule]] = {}
        for rule in self._phase_rules:
            assert rule.phase is not None
            ends = () if rule.phase.end is None else rule.phase.end.hits(block)
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
        found = self._found(block)
        steps = NamedSteps(block, found)
        for watch, hits in found:
            verdicts += self._show(watch, block, hits, now, when)
            if hits and watch.rule.metrics:
                self._extract(watch.rule, block, hits, steps)
        self._last_step = steps.newest(len(block.data), self._last_step)
        if self._joins:
            records = self._records.setdefault(stream, IndentedRecords())
            joined = records.feed(block, now)
            if joined is not None:
                verdicts += self._judge_joined(joined, now, when)
        verdicts.sort(key=lambda verdict: verdict.position)  # stable: rules keep their order
        return verdicts

    def _found(self, block: Block) -> list[tuple[Watch, Hits]]:
        """Return what each rule finds; those that a look at the block rules out are left out."""
        passing = self._gate.passing(block)
        found: list[tuple[Watch, Hits]] = []
        for index, watch in enumerate(self._watches):
            if watch.over or watch.rule.join_indented:
                continue
            pattern = watch.rule.pattern
            if index in passing:
                found.append((watch, pattern.hits(block)))
            elif watch.rule.stop is not None:
                found.append((watch, Hits(block.data, pattern.compiled.groups + 1)))
        return found

    def _judge_joined(
        self, block: Block, now: Instant, when: When | None = None
    ) -> list[LogVerdict]:
        verdicts: list[LogVerdict] = []
        for watch in self._watches:
            if watch.rule.join_indented and not watch.over:
                hits = watch.rule.pattern.hits(block)
                verdicts += self._show(watch, block, hits, now, when)
                if hits and watch.rule.metrics:
                    self._extract(watch.rule, block, hits, NamedSteps(block, [(watch, hits)]))
        return verdicts

    def _show(
        self, watch: Watch, block: Block, hits: Hits, now: Instant, when: When | None
    ) -> list[LogVerdict]:
        stops = None if watch.rule.stop is None else watch.rule.stop.hits(block)
        if stops:
            line_end = block.data.find(b"\n", stops[0][0])
            hits = hits[: bisect_left(hits.places(), line_end)]
        if hits and watch.rule.rank_scope is RankScope.ANY:
            hits = self._without_repeats(watch.rule, block, hits)
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

    def _without_repeats(self, rule: LogRule, block: Block, hits: Hits) -> Hits:
        """Drop lines that another rank printed before: eight copies are one data point."""
        fresh = Hits(block.data, hits.width // 2)
        for hit in hits:
            step = line_step(rule, block, hit)
            said = f"step {step}" if step is not None else line_at(block, hit[0])
            if not self._node.is_repeat(rule.name, said.encode(), self._place.rank):
                fresh.add(hit[1])
        return fresh

    def _progressed(self, watch: Watch, now: Instant) -> None:
        self._node.changes += 1
        self._node.progress[watch.rule.name] = now
        if watch.rule.recurring is not None:
            self.phases.progressed(now)

    def _replay(self, watch: Watch, block: Block, hits: Hits, when: When) -> list[LogVerdict]:
        """Take lines at their own times; the silence before one may have been too long."""
        verdicts: list[LogVerdict] = []
        if not watch.rule.is_timed:  # when its lines came is nothing to it
            return watch.take(block, hits, when(block, hits[-1][0]), self.matches)
        while hits and not watch.over:
            now, deadline = when(block, hits[0][0]), self._silence.deadline(watch)
            if deadline is not None and now >= deadline:
                verdicts.append(self._silence.hang(watch, deadline, now, hits[0][0]))
            count = self._without_pause(watch, block, hits, when)
            now = when(block, hits[count - 1][0])
            verdicts += watch.take(block, hits[:count], now, self.matches)
            self._progressed(watch, now)
            hits = hits[count:]
        return verdicts

    def _without_pause(self, watch: Watch, block: Block, hits: Hits, when: When) -> int:
        """Return how many lines, from the first on, came too soon after one another for a hang."""
        recurring, group = watch.rule.recurring, watch.rule.step_group
        if watch.state is LogState.HANGING or self.phases.are_open:
            return 1
        if recurring is None:
            return len(hits)
        if group is not None:  # a step that comes again is no progress
            said = hits.texts(group)
            known = {str(step).encode() for step in watch.steps}
            if len(set(said)) < len(said) or not known.isdisjoint(said):
                return 1
        began, count = when(block, hits[0][0]), len(hits)
        while count > 1 and since(began, when(block, hits[count - 1][0])) >= recurring:
            count //= 2
        return max(1, count)

    def _extract(self, rule: LogRule, block: Block, hits: Hits, steps: NamedSteps) -> None:
        if self._on_hits is not None:
            self._on_hits(rule, block, hits)
        wanted = hits if self._on_extracted is not None else hits[-1:]
        for hit in wanted:
            step = line_step(rule, block, hit)
            if step is None:
                line_end = block.data.find(b"\n", hit[0])
                step = steps.newest(line_end, self._last_step)
            for metric, value in metric_values(rule, block, hit):
                extracted = Extracted(metric=metric, value=value, step=step)
                self.series[metric] = extracted
                if self._on_extracted is not None:
                    self._on_extracted(rule.name, extracted, hit[0])

    # --- silence ------------------------------------------------------------------------------

    def _next_deadline(self) -> Instant | None:
        deadlines = (self._silence.deadline(watch) for watch in self._timed)
        return min((at for at in deadlines if at is not None), default=None)


def clean(text: str) -> str:
    """Return a line without colours and without the prefixes of launchers (``[rank0]:``)."""
    return without_prefix(block_of((text,)).data.decode()[:-1])
