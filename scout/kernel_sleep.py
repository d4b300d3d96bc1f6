"""How often a process went to sleep: by this, one long sleep in the kernel is told from many.

Reads ``/proc`` and decides nothing.
"""

import re
from pathlib import Path
from typing import Final

_FREEZERS: Final = frozenset({"__refrigerator", "do_freezer_trap"})
"""Functions of the kernel in which the members of a frozen control group wait."""
_SLEEPS: Final = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)


def sleeps(pid: int) -> int | None:
    """Return how often the main thread of ``pid`` went to sleep by itself.

    None when that cannot be read, and for a process that is frozen with its control group: such a
    sleep was ordered.
    """
    try:
        place = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    count = _SLEEPS.search(status)
    return None if place in _FREEZERS or count is None else int(count[1])
