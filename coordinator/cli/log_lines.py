"""Where a daemon's own log lines go: coloured for a person, plain for a file.

What draws for a person is loaded only where there is one: a daemon on a node has no use for it.
"""

import logging
import sys
from typing import Final

from coordinator.wording import one_line

LINE_CHARS_MAX: Final = 2_000


def start_logging(*, verbose: bool) -> None:
    """Send log lines to standard error."""
    handler = _for_a_person() if sys.stderr.isatty() else _for_a_file()
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True
    )
    logging.getLogger("asyncio").setLevel(logging.INFO)


def _for_a_person() -> logging.Handler:
    from rich.console import Console  # noqa: PLC0415 - see the top of this module
    from rich.logging import RichHandler  # noqa: PLC0415

    handler = RichHandler(
        console=Console(stderr=True, highlight=False, emoji=False),
        show_path=False,
        markup=False,
        log_time_format="%H:%M:%S",
    )
    handler.setFormatter(_OneLine("%(message)s"))
    return handler


def _for_a_file() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


class _OneLine(logging.Formatter):
    """A record is one line, except for the traceback of a bug."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = one_line(record.message, LINE_CHARS_MAX)
        return super().formatMessage(record)
