"""Lines that belong together because all but the first are indented.

Decides where such a record ends: at the next line that is not indented, or after a short silence.
It changes no byte but the line ends between them, so every place in the text stays where it was.
"""

import re
from typing import Final

from scout.clock import Instant, after, seconds
from sidecar.logs.block import Block

RECORD_BYTES_MAX: Final = 64 << 10
"""A longer record is judged as far as it goes."""
SILENCE: Final = seconds(1.0)
"""A record is over when nothing was added to it for so long."""

_CONTINUED: Final = re.compile(rb"\n(?=  |\t)")
"""One blank is no indentation: some frameworks begin every line with it."""


class IndentedRecords:
    """The records of one stream.  The last one is kept until it is known to be over."""

    def __init__(self) -> None:
        self._pending = b""
        self._since = Instant(0)

    def feed(self, block: Block, now: Instant) -> Block | None:
        """Return the records that ``block`` completes, each as one line."""
        joined = _CONTINUED.sub(b" ", self._pending + block.data)
        last = joined.rfind(b"\n", 0, len(joined) - 1) + 1
        done, self._pending = joined[:last], joined[last:]
        self._since = now
        if len(self._pending) > RECORD_BYTES_MAX:
            done, self._pending = done + self._pending, b""
        return Block(done, before=block.before) if done else None

    def overdue(self, now: Instant) -> Block | None:
        """Return the pending record if nothing was added to it for long enough."""
        if not self._pending or now < after(self._since, SILENCE):
            return None
        done, self._pending = self._pending, b""
        return Block(done)
