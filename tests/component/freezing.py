"""Control groups that freeze a process, where this machine lets us make them."""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

WITHIN_S = 30.0
VERSIONS = {
    "version 1": ("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED"),
    "version 2": ("/sys/fs/cgroup", "cgroup.freeze", "1", "0"),
    "version 2 beside version 1": ("/sys/fs/cgroup/unified", "cgroup.freeze", "1", "0"),
}
"""Where groups stand, which file freezes one, and what is written into it."""


class FreezingGroup:
    """A control group of our own."""

    def __init__(self, version: str) -> None:
        """Make it.  Raises `OSError` where the machine has no such groups or does not let us."""
        root, file, self._freeze, self._thaw = VERSIONS[version]
        self.folder = Path(root) / f"outrider-test-{os.getpid()}-{secrets.token_hex(4)}"
        if not (Path(root) / "cgroup.procs").exists():
            raise FileNotFoundError(root)
        self.folder.mkdir()
        self._file = self.folder / file
        if not os.access(self._file, os.W_OK):
            self.folder.rmdir()
            raise PermissionError(self._file)

    def freeze(self, pid: int) -> None:
        """Let a process do nothing more."""
        (self.folder / "cgroup.procs").write_text(str(pid))
        self._file.write_text(self._freeze)

    def is_frozen(self) -> bool:
        """Return whether every member stands still."""
        events = self.folder / "cgroup.events"
        return "frozen 1" in events.read_text() if events.exists() else self._says("FROZEN")

    def thaw(self) -> None:
        """Let it go on; a frozen process of version 1 cannot even be killed."""
        self._file.write_text(self._thaw)

    def remove(self) -> None:
        """Remove the group once its members are gone."""
        deadline = time.monotonic() + WITHIN_S
        while self.folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                self.folder.rmdir()
            time.sleep(0.01)
        assert not self.folder.exists(), f"{self.folder} has members still"

    def _says(self, state: str) -> bool:
        return self._file.read_text().strip() == state


def any_freezing_group() -> FreezingGroup | None:
    """Return a group of whichever version this machine has, None where it has none."""
    for version in VERSIONS:
        with suppress(OSError):
            return FreezingGroup(version)
    return None
