"""What a person did that cannot work, in one sentence."""

from typing import Final

USAGE: Final = 2
"""Exit status of a wrong command line, file or setting."""
UNREACHABLE: Final = 3
"""Exit status when the coordinator cannot be asked."""
TIMED_OUT: Final = 4
"""Exit status of ``outrider wait`` when its time ran out."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells expect it."""
TERMINATED: Final = 143
"""Exit status after SIGTERM, where the work was not finished."""


class UserError(Exception):
    """An error that the person at the keyboard can mend; the text says how."""

    def __init__(self, text: str, exit_code: int = USAGE) -> None:
        super().__init__(text)
        self.exit_code = exit_code
