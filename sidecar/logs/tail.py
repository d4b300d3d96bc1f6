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
from sidecar.logs.defaults import default_rules
from sidecar.logs.evaluator import LogEvaluator, LogState, LogVerdict, clean
from sidecar.logs.follow import FollowCounters, FollowedFile
from sidecar.logs.library.choice import Choice
from sidecar.logs.numbers import Extracted
from sidecar.logs.phases import Declared, declared
from sidecar.logs.positions import PositionFile
from sidecar.logs.rules import LogRule, usable_rules, with_defaults
from sidecar.logs.silence import NodeView, Place

POLL_S: Final = 0.05
"""A fault line is seen this soon; 64 files cost under a hundredth of a core when silent."""
READS_MAX: Final = 256
"""Silent files that are looked at in one poll; of more than that, each is looked at in turn."""
SILENT_READS: Final = 40
"""A file is silent after so many reads without news: two seconds."""
SAVE_PERIOD: Final = seconds(3.0)
"""How often places are kept; what a restarted sidecar reads twice is at most this much.

To replace a small file costs as much as a hundred looks at a quiet one.
"""
POSITIONS_NAME: Final = "log-positions.json"
TAIL_LINES_MAX: Final = 50
TAIL_LINE_CHARS_MAX: Final = 400
"""Tails travel to the coordinator and are read by people."""
TAIL_BYTES_MAX: Final = 64 << 10
"""What is kept for a tail: its lines may be longer than what is shown of them."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TailCounters(FollowCounters):
    """Counters over all ranks and generations."""

    rules_refused: int = 0
    findings: int = 0
    rule_matches: Counter[str] = field(default_factory=Counter)
    """Rule name -> lines that matched it."""


@dataclass(slots=True)
class _Rank:
    """One local rank: both of its streams, judged together."""

    local_rank: int
    streams: tuple[FollowedFile, FollowedFile]
    evaluator: LogEvaluator
    choice: Choice
    recent: bytes = b""
    declared: Declared | None = None
    """The phase that its worker says it is in."""

    def read(self, clock: Callable[[], Instant], *, everything: bool) -> list[LogVerdict]:
        """Read a piece of each stream and judge it; without ``everything``, not of silent ones."""
        verdicts: list[LogVerdict] = []
        wait = False
        for number, stream in enumerate(self.streams):
            if not everything and stream.idle_reads > SILENT_READS:
                wait = True
                continue
            block = stream.read_block()
            wait = wait or stream.behind
            if block.data:
                if self.choice.open:
                    self.evaluator.add(self.choice.show(block))
                verdicts += self.evaluator.judge(block, clock(), stream=number)
                # Replaced whole, because the loop reads it while the thread runs.
                self.recent = (self.recent + block.data)[-TAIL_BYTES_MAX:]
        if not wait:  # what lies unread may hold what a rule waits for
            verdicts += self.evaluator.timer(clock())
        return verdicts

    @property
    def behind(self) -> bool:
        """True when something may lie unread."""
        return any(stream.behind for stream in self.streams)

    def last_lines(self) -> tuple[str, ...]:
        """Return the newest lines, and what stands after the last line end."""
        lines = self.recent.decode(errors="replace").split("\n")[:-1]
        lines += [stream.splitter.partial for stream in self.streams]
        shown = (_shown(line) for line in lines[-TAIL_LINES_MAX - len(self.streams) :])
        return tuple(line for line in shown if line)[-TAIL_LINES_MAX:]


@dataclass(slots=True)
class _Watch:
    """One generation's output and where its reading stands."""

    generation: int
    ranks: tuple[_Rank, ...]
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
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._poll_s = poll_s
        self._positions = None if positions is None else PositionFile(positions)
        self._generation: int | None = None
        self._ranks: tuple[_Rank, ...] = ()
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

    def tails(self) -> dict[int, tuple[str, ...]]:
        """Return each local rank's last lines, both streams, oldest first."""
        return {rank.local_rank: rank.last_lines() for rank in self._ranks}

    def states(self) -> dict[int, dict[str, LogState]]:
        """Return each local rank's rules and their states."""
        return {rank.local_rank: rank.evaluator.states() for rank in self._ranks}

    def series(self) -> dict[int, dict[str, Extracted]]:
        """Return each rank's metrics, by its rank in the job, as its newest lines give them."""
        return {rank.evaluator.rank: dict(rank.evaluator.series) for rank in self._ranks}

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
    ) -> tuple[_Rank, ...]:
        """Compile the rules, which takes a while for large ones, and find where reading begins."""
        usable, refused = usable_rules(rules)
        for error in refused:
            _LOG.error("%s; the other rules hold", error)
        self.counters.rules_refused += len(refused)
        wanted: tuple[LogRule, ...] = with_defaults(usable, default_rules())
        matches = self.counters.rule_matches
        matches.update({rule.name: 0 for rule in wanted})
        known = {} if self._positions is None else self._positions.load(generation)
        node = NodeView()

        def follow(path: Path) -> FollowedFile:
            return FollowedFile(path, self.counters, position=known.get(str(path)))

        return tuple(
            _Rank(
                local_rank,
                (follow(stdout), follow(stderr)),
                LogEvaluator(wanted, began, matches, place=places[local_rank], node=node),
                Choice(usable),
            )
            for local_rank, (stdout, stderr) in files.items()
        )

    def _poll(self, watch: _Watch) -> list[tuple[int, LogVerdict]]:
        """Read until there is something to tell, or something else to do in this thread."""
        while True:
            found = self._read(watch.ranks, watch.turn, watch.open_max)
            watch.turn += 1
            now = self._clock()
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
        self, ranks: tuple[_Rank, ...], turn: int, open_max: int
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

    def _save(self, generation: int, ranks: tuple[_Rank, ...]) -> None:
        assert self._positions is not None
        places = {
            str(stream.path): place
            for rank in ranks
            for stream in rank.streams
            if (place := stream.place()) is not None
        }
        self._positions.save(generation, places)

    # --- on the loop ----------------------------------------------------------------------

    async def _follow(self, generation: int, prepare: Callable[[], tuple[_Rank, ...]]) -> None:
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


def _shown(line: str) -> str:
    return clean(line).rstrip()[:TAIL_LINE_CHARS_MAX]


def _close(ranks: tuple[_Rank, ...]) -> None:
    for rank in ranks:
        for stream in rank.streams:
            stream.close()


def _say_failure(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None:
            _LOG.critical("output is not watched any more", exc_info=error)
