"""Hears when entries of folders appear, vanish or change name.

Decides nothing, and promises nothing: network and overlay file systems tell of no change by others,
and a machine may have no watches left.  So whoever listens polls as well, and is only sooner here.
What is written into a file that stays is not heard: an event for every line of a log would cost
half a core.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

ENTRIES: Final[tuple[type[FileSystemEvent], ...]] = (
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    DirCreatedEvent,
    DirMovedEvent,
)
EDITS: Final[tuple[type[FileSystemEvent], ...]] = (*ENTRIES, FileClosedEvent)
"""And when whoever wrote into a file closes it: for folders in which little is written."""

_LOG = logging.getLogger(__name__)


class FolderWatch(FileSystemEventHandler):
    """Calls ``changed`` with the path of an entry, on a thread of its own."""

    def __init__(
        self,
        changed: Callable[[Path], None],
        events: Iterable[type[FileSystemEvent]] = ENTRIES,
    ) -> None:
        self._changed = changed
        self._events = list(events)
        self._observer: BaseObserver | None = None
        self._folders: frozenset[Path] = frozenset()

    def watch(self, folders: Iterable[Path]) -> None:
        """Listen to ``folders`` and to no other; one that is not there is left out."""
        wanted = frozenset(folders)
        if wanted == self._folders and self._observer is not None:
            return
        self.close()
        self._folders = wanted
        observer = Observer()
        try:
            for folder, recursive in _roots(wanted):
                observer.schedule(self, folder, recursive=recursive, event_filter=self._events)
            observer.start()
        except OSError as error:  # no watches left, or no file descriptors
            observer.unschedule_all()
            _LOG.warning("folders are not watched, polling alone: %s", error.strerror or error)
            return
        self._observer = observer

    def close(self) -> None:
        """Hear nothing more."""
        if self._observer is not None:
            self._observer.stop()
        self._observer = None

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Pass on which entry it was; of one that changed its name, both."""
        for path in (event.src_path, event.dest_path):
            if path:
                self._changed(Path(str(path)))


def _roots(folders: Iterable[Path]) -> list[tuple[Path, bool]]:
    """Return what to listen to, and whether to all below it: each costs two threads.

    The folders of one node's ranks stand side by side, and one watch over them is enough.
    """
    there = sorted(folder for folder in folders if folder.is_dir())
    parents = {folder.parent for folder in there}
    if len(there) > 1 and len(parents) == 1:
        return [(parents.pop(), True)]
    return [(folder, False) for folder in there]
