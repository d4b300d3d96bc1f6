"""How often a process went to sleep: by this, one long sleep in the kernel is told from many.

Reads ``/proc`` and, to tell a process that was frozen with its control group, that group's own
files; decides nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FROZEN: Final = re.compile(r"^(?:FROZEN|FREEZING|frozen 1)$", re.MULTILINE)
"""What ``freezer.state`` of a group of version 1 and ``cgroup.events`` of version 2 say."""
_SLEEPS: Final = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)


def sleeps(pid: int) -> int | None:
    """Return how often the main thread of ``pid`` went to sleep by itself.

    None when that cannot be read, and for a process that is frozen with its control group: such a
    sleep was ordered.
    """
    try:
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    count = _SLEEPS.search(status)
    return None if count is None or is_frozen(pid) else int(count[1])


def is_frozen(pid: int) -> bool:
    """Return whether a control group of ``pid``, or one around it, says that it is frozen.

    False where that cannot be read.  The function in which the kernel lets a process wait does not
    tell: since Linux 6.1 one that slept already is frozen where it sleeps.
    """
    try:
        return any(_FROZEN.search(file.read_text(encoding="ascii")) for file in _freezers(pid))
    except (OSError, ValueError):
        return False


def _freezers(pid: int) -> Iterator[Path]:
    """Yield the files that tell whether the groups of a process are frozen."""
    groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace")
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            version, name = "cgroup2", "cgroup.events"
        elif "freezer" in controllers.split(","):
            version, name = "cgroup", "freezer.state"
        else:
            continue
        for root, folder in _mounted(mounts, version):
            if group == root or group.startswith(f"{root.rstrip('/')}/"):
                file = folder / group.removeprefix(root).lstrip("/") / name
                if file.exists():  # a root group has none: it cannot be frozen
                    yield file


def _mounted(mounts: str, version: str) -> Iterator[tuple[str, Path]]:
    """Yield which group is mounted where, for every mount of a version that can freeze."""
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        kind, *_, options = source.split(" ")
        if kind == version and (version == "cgroup2" or "freezer" in options.split(",")):
            _, _, _, root, folder, *_ = fields.split(" ")
            yield root, Path(folder)
