"""Reads every worker's output as it grows and tells what the rules find in it.

Decides nothing: `sidecar.logs.evaluator` does.  All polling, reading and searching happens in one
thread beside the loop, which RE2 leaves free to go on meanwhile and which is woken for news only.
"""

import asyncio
import contextlib
import logging
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from scout.clock import Instant, after, seconds
from scout.snapshot import RankSnapshot
from sidecar.events import LogFinding
from sidecar.folder_watch import FolderWatch
from sidecar.logs.effective_rules import Rules
from sidecar.logs.evaluator import LogEvaluator, LogState, LogVerdict
from sidecar.logs.follow import FollowCounters, FollowedFile
from sidecar.logs.library.choice import Choice
from sidecar.logs.numbers import Extracted
from sidecar.logs.phases import declared
from sidecar.logs.positions import PositionFile
from sidecar.logs.rank_output import SILENT_READS, RankOutput
from sidecar.logs.rules_file import WrittenRules
from sidecar.logs.silence import NodeView, Place

POLL_S: Final = 0.05
"""A fault line is seen this soon; 64 files cost under a hundredth of a core when silent."""
READS_MAX: Final = 256
"""Silent files that are looked at in one poll; of more than that, each is looked at in turn."""
SAVE_PERIOD: Final = seconds(3.0)
"""How often places are kept; what a restarted sidecar reads twice is at most this much.

To replace a small file costs as much as a hundred looks at a quiet one.
"""
POSITIONS_NAME: Final = "log-positions.json"

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TailCounters(FollowCounters):
    """Counters over all ranks and generations."""

    rules_refused: int = 0
    findings: int = 0
    rule_matches: Counter[str] = field(default_factory=Counter)
    """Rule name -> lines that matched it."""
    matched_at: dict[str, Instant] = field(default_factory=dict)
    """Rule name -> the look at the output that found its last match."""
    _noted: Counter[str] = field(default_factory=Counter)
    _noted_lines: int = 0

    def looked(self, now: Instant) -> None:
        """Note which rules matched since the last look."""
        if self.lines == self._noted_lines:
            return
        self._noted_lines = self.lines
        for rule, count in self.rule_matches.items():
            if count != self._noted[rule]:
                self._noted[rule] = count
                self.matched_at[rule] = now


@dataclass(slots=True)
class _Watch:
    """One generation's output and where its reading stands."""

    generation: int
    ranks: tuple[RankOutput, ...]
    open_max: int
    saved_at: Instant
    turn: int = 0


class LogWatcher:
    """The output of one node's workers.  ``emit`` is called on the event loop.

    ``positions`` is a file in which the places reached are kept, for a sidecar that is restarted
    while its workers run on.
    """

    def __init__(
        self,
        emit: Callable[[LogFinding], None],
        clock: Callable[[], Instant],
        positions: Path | None = None,
        poll_s: float = POLL_S,
        node_rules: WrittenRules = (),
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._poll_s = poll_s
        self._positions = None if positions is None else PositionFile(positions)
        self._folders = FolderWatch(self._entry_changed)
        self._rules = Rules(node_rules)
        self._generation: int | None = None
        self._ranks: tuple[RankOutput, ...] = ()
        self._prepared: tuple[RankOutput, ...] = ()
        """The same, for the thread."""
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-tail")
        self._wanted = threading.Event()
        """Set when something else is to be done in the thread."""
        self.counters = TailCounters()

    def watch(
        self,
        generation: int,
        rules: Sequence[Mapping[str, object]],
        files: Mapping[int, tuple[Path, Path]],
        *,
        ranks: Mapping[int, int] | None = None,
        world_size: int | None = None,
    ) -> None:
        """Judge the output of ``generation`` from now on, and no other.

        ``files`` maps a local rank to its standard output and standard error, which need not
        exist yet; ``ranks`` maps it to its rank in the job of ``world_size`` ranks, which is
        taken for this node's alone when nothing is said.  A rule that cannot be used is said and
        left out; the others hold.
        """
        self.stop()
        self._generation = generation
        prepare = partial(
            self._prepare,
            generation,
            rules,
            dict(sorted(files.items())),
            _places(sorted(files), ranks or {}, world_size),
            self._clock(),
        )
        self._task = asyncio.get_running_loop().create_task(
            self._follow(generation, prepare), name=f"log-tail-{generation}"
        )
        self._task.add_done_callback(_say_failure)

    def stop(self) -> None:
        """Judge nothing more.  Safe at any time, and twice."""
        if self._task is not None:
            self._task.cancel()
        if self._ranks:
            # In the same thread, after a read that may be under way.
            self._submit(_close, self._ranks)
        self._ranks, self._task, self._generation = (), None, None

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        self._folders.close()
        self._thread.shutdown(wait=False)

    def saw_progress(self, generation: int, seen: Iterable[RankSnapshot]) -> None:
        """Take a look at the workers' pages: a phase declared there allows its rank silence."""
        if generation != self._generation:
            return
        now, pages = self._clock(), {page.local_rank: page for page in seen}
        for rank in self._ranks:
            page = pages.get(rank.local_rank)
            if page is None or page.progress_age_ns is None:
                continue  # not known: a phase that was open runs on to its limit
            phase, before = declared(page, now), rank.declared
            if phase is None and before is None:
                continue
            if phase is None or not phase.is_same_as(before):
                rank.declared = phase
                self._submit(rank.evaluator.turn_phase, before, phase, now)

    def set_node_rules(self, rules: WrittenRules) -> None:
        """Judge by other rules of the node's own from now on; those that did not change go on."""
        self._submit(self._swap, rules, self._clock())

    def tails(self) -> dict[int, tuple[str, ...]]:
        """Return each local rank's last lines, both streams, oldest first."""
        return {rank.local_rank: rank.last_lines() for rank in self._ranks}

    def states(self) -> dict[int, dict[str, LogState]]:
        """Return each local rank's rules and their states."""
        return {rank.local_rank: rank.evaluator.states() for rank in self._ranks}

    def series(self) -> dict[int, dict[str, Extracted]]:
        """Return each rank's metrics, by its rank in the job, as its newest lines give them."""
        return {rank.evaluator.rank: dict(rank.evaluator.series) for rank in self._ranks}

    def _entry_changed(self, path: Path) -> None:
        """Look at a file at once that came, went or changed its name, however silent it was."""
        for rank in self._ranks:
            for stream in rank.streams:
                if stream.path == path:
                    stream.idle_reads = 0
                    self._wanted.set()

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        self._thread.submit(work, *arguments)
        self._wanted.set()

    # --- in the thread --------------------------------------------------------------------

    def _prepare(
        self,
        generation: int,
        rules: Sequence[Mapping[str, object]],
        files: Mapping[int, tuple[Path, Path]],
        places: Mapping[int, Place],
        began: Instant,
    ) -> tuple[RankOutput, ...]:
        """Compile the rules, which takes a while for large ones, and find where reading begins."""
        wanted, usable, refused = self._rules.begin(rules)
        for error in refused:
            _LOG.error("%s; the other rules hold", error)
        self.counters.rules_refused += len(refused)
        matches = self.counters.rule_matches
        matches.update({rule.name: 0 for rule in wanted})
        self._folders.watch({path.parent for streams in files.values() for path in streams})
        known = {} if self._positions is None else self._positions.load(generation)
        node = NodeView()

        def follow(path: Path) -> FollowedFile:
            return FollowedFile(path, self.counters, position=known.get(str(path)))

        self._prepared = tuple(
            RankOutput(
                local_rank,
                (follow(stdout), follow(stderr)),
                LogEvaluator(wanted, began, matches, place=places[local_rank], node=node),
                Choice(usable),
            )
            for local_rank, (stdout, stderr) in files.items()
        )
        return self._prepared

    def _swap(self, rules: WrittenRules, now: Instant) -> None:
        """Take other rules of the node's own, in the middle of a generation or between two."""
        gone, fresh = self._rules.swap(rules)
        self.counters.rule_matches.update({rule.name: 0 for rule in fresh})
        if self._prepared:
            self._prepared[0].evaluator.node.forget(gone)
        for rank in self._prepared:
            rank.evaluator.swap(gone, fresh, now)

    def _poll(self, watch: _Watch) -> list[tuple[int, LogVerdict]]:
        """Read until there is something to tell, or something else to do in this thread."""
        while True:
            found = self._read(watch.ranks, watch.turn, watch.open_max)
            watch.turn += 1
            now = self._clock()
            self.counters.looked(now)
            if self._positions is not None and now >= after(watch.saved_at, SAVE_PERIOD):
                watch.saved_at = now
                self._save(watch.generation, watch.ranks)
            behind = any(rank.behind for rank in watch.ranks)
            if self._wanted.wait(0 if behind or found else self._poll_s):
                self._wanted.clear()
                return found
            if found:
                return found

    def _read(
        self, ranks: tuple[RankOutput, ...], turn: int, open_max: int
    ) -> list[tuple[int, LogVerdict]]:
        """Read every rank once; of a great many files, the silent ones by turns."""
        stride = -(-len(ranks) * 2 // READS_MAX)
        found: list[tuple[int, LogVerdict]] = []
        for index, rank in enumerate(ranks):
            everything = stride <= 1 or (turn + index) % stride == 0
            verdicts = rank.read(self._clock, everything=everything)
            found += [(rank.local_rank, verdict) for verdict in verdicts]
            if len(ranks) * 2 > open_max:
                for stream in rank.streams:
                    if stream.idle_reads > SILENT_READS:
                        stream.close()  # it is opened again where it was
        return found

    def _save(self, generation: int, ranks: tuple[RankOutput, ...]) -> None:
        assert self._positions is not None
        places = {
            str(stream.path): place
            for rank in ranks
            for stream in rank.streams
            if (place := stream.place()) is not None
        }
        self._positions.save(generation, places)

    # --- on the loop ----------------------------------------------------------------------

    async def _follow(self, generation: int, prepare: Callable[[], tuple[RankOutput, ...]]) -> None:
        loop = asyncio.get_running_loop()
        ranks = self._ranks = await loop.run_in_executor(self._thread, prepare)
        open_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        watch = _Watch(generation, ranks, open_max, self._clock())
        try:
            while True:
                for local_rank, verdict in await loop.run_in_executor(
                    self._thread, self._poll, watch
                ):
                    self.counters.findings += 1
                    self._emit(_finding(generation, local_rank, verdict))
        finally:
            self._wanted.set()  # the thread must not poll on for nobody


def _places(
    local_ranks: Sequence[int], ranks: Mapping[int, int], world_size: int | None
) -> dict[int, Place]:
    size = len(local_ranks) if world_size is None else world_size
    return {
        local_rank: Place(
            rank=ranks.get(local_rank, place),
            world_size=size,
            lead=place == 0,
            whole_job=size == len(local_ranks),
        )
        for place, local_rank in enumerate(local_ranks)
    }


def _finding(generation: int, local_rank: int, verdict: LogVerdict) -> LogFinding:
    return LogFinding(
        generation=generation,
        local_rank=local_rank,
        kind=verdict.kind,
        rule=verdict.rule,
        message=verdict.message,
        line=verdict.line,
        age_ns=verdict.age_ns,
        step=verdict.step,
        block=verdict.block,
    )


def _close(ranks: tuple[RankOutput, ...]) -> None:
    for rank in ranks:
        for stream in rank.streams:
            stream.close()


def _say_failure(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None:
            _LOG.critical("output is not watched any more", exc_info=error)
