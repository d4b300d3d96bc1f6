"""One rank's output: both of its streams, read and judged together, and the end of it kept.

Decides nothing: what a line means is `sidecar.logs.evaluator`'s.  Belongs to the thread that reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from scout.clock import Instant
from sidecar.logs.evaluator import LogEvaluator, LogVerdict, clean
from sidecar.logs.follow import FollowedFile
from sidecar.logs.library.choice import Choice
from sidecar.logs.phases import Declared

SILENT_READS: Final = 40
"""A file is silent after so many reads without news: two seconds."""
TAIL_LINES_MAX: Final = 50
TAIL_LINE_CHARS_MAX: Final = 400
"""Tails travel to the coordinator and are read by people."""
TAIL_BYTES_MAX: Final = 64 << 10
"""What is kept for a tail: its lines may be longer than what is shown of them."""


@dataclass(slots=True)
class RankOutput:
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


def _shown(line: str) -> str:
    return clean(line).rstrip()[:TAIL_LINE_CHARS_MAX]
