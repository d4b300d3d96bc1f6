"""A file of log rules that belongs to a node, read again whenever somebody edits it.

Decides that a file is taken as a whole: with one rule that cannot be used, the rules that held
before go on, and what is wrong is said.  Folder events make it quick and a slow poll makes it
certain, because some file systems tell of nothing.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from sidecar.folder_watch import EDITS, FolderWatch
from sidecar.given_files import GivenFileError, read_given_text
from sidecar.logs.rule_files import problems, rules_in
from sidecar.strict_yaml import YamlError, load_yaml

RULES_BYTES_MAX: Final = 1 << 20
"""Largest file of rules; no job has as many as would fill it."""
POLL_S: Final = 2.0
"""How soon an edit is seen where no event tells of it."""

WrittenRules: TypeAlias = tuple[Mapping[str, Any], ...]
_Identity: TypeAlias = tuple[int, int, int, int]

_LOG = logging.getLogger(__name__)


class RulesFileError(ValueError):
    """The file holds no rules that can be used; the text is one line and names the file."""


def read_rules_file(path: Path) -> WrittenRules:
    """Return the rules in ``path``, each as it is written.  Raises `RulesFileError`."""
    if path.is_fifo():
        raise RulesFileError(f"{path} is a pipe; give a file, for it is read again after an edit")
    try:
        rules = rules_in(load_yaml(read_given_text(path, RULES_BYTES_MAX)))
    except GivenFileError as error:
        raise RulesFileError(f"{path} cannot be read: {error}") from None
    except YamlError as error:
        raise RulesFileError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if rules is None:
        raise RulesFileError(f"{path} holds no rules; it must be a list of them")
    found = problems(rules)
    if found:
        first, more = found[0], f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise RulesFileError(f"{path}: rule {first.rule}: {first.field}: {first.reason}{more}")
    return tuple(rules)


class RulesFile:
    """The rules in ``path``.  ``changed`` is called with them on the event loop."""

    def __init__(self, path: Path, changed: Callable[[WrittenRules], None]) -> None:
        self._path = path
        self._changed = changed
        self._seen = _identity(path)

    async def run(self) -> None:
        """Read the file after every edit, until cancelled."""
        loop, edited = asyncio.get_running_loop(), asyncio.Event()

        def heard(_entry: Path) -> None:
            loop.call_soon_threadsafe(edited.set)

        folders = FolderWatch(heard, EDITS)
        # A mounted configuration changes behind a link in the folder of the name.
        folders.watch({self._path.absolute().parent, self._path.resolve().parent})
        try:
            while True:
                try:
                    async with asyncio.timeout(POLL_S):
                        await edited.wait()
                except TimeoutError:
                    pass
                edited.clear()
                await self._look()
        finally:
            folders.close()

    async def _look(self) -> None:
        identity = _identity(self._path)
        if identity == self._seen:
            return
        self._seen = identity
        try:
            rules = await asyncio.to_thread(read_rules_file, self._path)
        except RulesFileError as error:
            _LOG.warning("%s; the rules that held before go on", error)
            return
        _LOG.info("%s was edited: %d rules", self._path, len(rules))
        self._changed(rules)


def _identity(path: Path) -> _Identity | None:
    """Return what tells one content of a file from another, None while there is no file."""
    try:
        seen = os.stat(path)  # noqa: PTH116 - the folder's events come in bursts
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size
