"""Where the ``outrider`` command begins: Ctrl-C while it is still being loaded is no bug.

Nothing has been started by then, so there is nothing to take away and nothing to say.
"""

import sys
from typing import Final, NoReturn

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as in `coordinator.cli.errors`, which is not loaded yet."""


def entry() -> NoReturn:
    """Load the command and run it."""
    try:
        from coordinator.cli.main import entry as run  # noqa: PLC0415 - this is what takes long
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    run()
