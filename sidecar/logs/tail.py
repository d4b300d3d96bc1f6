"""Reads every worker's output as it grows and tells what the rules find in it.

Decides nothing: `sidecar.logs.evaluator` does.  One asyncio task polls; all reading and searching
happens in one thread beside the loop, which RE2 leaves free to go on meanwhile.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scout.clock import Instant
from sidecar.events import LogFinding
from sidecar.logs.defaults import default_rules
from sidecar.logs.evaluator import LogEvaluator, LogState, LogVerdict, clean
from sidecar.logs.follow import FollowCounters, FollowedFile
from sidecar.logs.rules import usable_rules, with_defaults

POLL_S: Final = 0.05
"""A fault line is seen this soon; 64 files cost under a hundredth of a core when silent."""
TAIL_LINES_MAX: Final = 50
TAIL_LINE_CHARS_MAX: Final = 400
"""Tails travel to the coordinator and are read by people."""

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
    tail: tuple[str, ...] = ()

    def read(self, clock: Callable[[], Instant]) -> list[LogVerdict]:
        """Read a piece of each stream and judge it."""
        verdicts: list[LogVerdict] = []
        for stream in self.streams:
            lines = stream.read()
            if lines:
                verdicts += self.evaluator.lines(lines, clock())
                recent = [_shown(line) for line in lines[-TAIL_LINES_MAX:]]
                # Replaced whole, because the loop reads it while the thread runs.
                self.tail = (*self.tail, *recent)[-TAIL_LINES_MAX:]
        if not self.behind:  # what lies unread may hold the line that a rule waits for
            verdicts += self.evaluator.timer(clock())
        return verdicts

    @property
    def behind(self) -> bool:
        """True when something may lie unread."""
        return any(stream.behind for stream in self.streams)

    def last_lines(self) -> tuple[str, ...]:
        """Return the newest lines, and what stands after the last line end."""
        partial = [_shown(stream.splitter.partial) for stream in self.streams]
        return (*self.tail, *(text for text in partial if text.strip()))[-TAIL_LINES_MAX:]


class LogWatcher:
    """The output of one node's workers.  ``emit`` is called on the event loop."""

    def __init__(
        self,
        emit: Callable[[LogFinding], None],
        clock: Callable[[], Instant],
        poll_s: float = POLL_S,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._poll_s = poll_s
        self._ranks: tuple[_Rank, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="log-tail")
        self.counters = TailCounters()

    def watch(
        self,
        generation: int,
        rules: Sequence[Mapping[str, object]],
        files: Mapping[int, tuple[Path, Path]],
    ) -> None:
        """Judge the output of ``generation`` from now on, and no other.

        ``files`` maps a local rank to its standard output and standard error, which need not
        exist yet.  A rule that cannot be used is said and left out; the others hold.
        """
        self.stop()
        usable, refused = usable_rules(rules)
        for error in refused:
            _LOG.error("%s; the other rules hold", error)
        self.counters.rules_refused += len(refused)
        wanted = with_defaults(usable, default_rules())
        self.counters.rule_matches.update({rule.name: 0 for rule in wanted})
        began = self._clock()
        self._ranks = tuple(
            _Rank(
                local_rank,
                (FollowedFile(stdout, self.counters), FollowedFile(stderr, self.counters)),
                LogEvaluator(wanted, began, self.counters.rule_matches),
            )
            for local_rank, (stdout, stderr) in sorted(files.items())
        )
        self._task = asyncio.get_running_loop().create_task(
            self._follow(generation, self._ranks), name=f"log-tail-{generation}"
        )
        self._task.add_done_callback(_say_failure)

    def stop(self) -> None:
        """Judge nothing more.  Safe at any time, and twice."""
        if self._task is not None:
            self._task.cancel()
        if self._ranks:
            # In the same thread, after a read that may be under way.
            self._thread.submit(_close, self._ranks)
        self._ranks, self._task = (), None

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        self._thread.shutdown(wait=False)

    def tails(self) -> dict[int, tuple[str, ...]]:
        """Return each local rank's last lines, both streams, oldest first."""
        return {rank.local_rank: rank.last_lines() for rank in self._ranks}

    def states(self) -> dict[int, dict[str, LogState]]:
        """Return each local rank's rules and their states."""
        return {rank.local_rank: rank.evaluator.states() for rank in self._ranks}

    async def _follow(self, generation: int, ranks: tuple[_Rank, ...]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            found = await loop.run_in_executor(self._thread, _read, ranks, self._clock)
            for local_rank, verdict in found:
                self.counters.findings += 1
                self._emit(_finding(generation, local_rank, verdict))
            behind = any(rank.behind for rank in ranks)
            await asyncio.sleep(0 if behind else self._poll_s)


def _read(ranks: tuple[_Rank, ...], clock: Callable[[], Instant]) -> list[tuple[int, LogVerdict]]:
    return [(rank.local_rank, verdict) for rank in ranks for verdict in rank.read(clock)]


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
