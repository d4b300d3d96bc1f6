"""The file in a state directory that tells where its coordinator listens.

Scripts learn the port from it, so it is there, whole, as long as the coordinator serves: it is
written anew where somebody deleted it, and what another coordinator wrote there is left alone.
"""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from coordinator.listening import CoordinatorError

URL_NAME: Final = "coordinator.url"

log = logging.getLogger("outrider.coordinator")


class UrlFile:
    """The file of one coordinator; between `write` and `withdraw` it is its own."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / URL_NAME
        self._text: str | None = None
        self._warned = False

    def clear(self) -> None:
        """Remove the file of one that was killed.  Raises `CoordinatorError` if it cannot."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise _in_the_way(self._path, error) from error

    def write(self, url: str) -> None:
        """Tell ``url``.  Raises `CoordinatorError` where the file cannot be written."""
        self._text = f"{url}\n"
        try:
            self._put(self._text)
        except OSError as error:
            raise _in_the_way(self._path, error) from error

    def keep(self) -> None:
        """Write the file anew if it is gone but its folder is there.  Warns once if it cannot."""
        if self._text is None or self._path.exists() or not self._path.parent.is_dir():
            return
        try:
            self._put(self._text)
        except OSError as error:
            if not self._warned:
                log.warning("%s", _in_the_way(self._path, error))
            self._warned = True
            return
        self._warned = False
        log.warning("the file %s had been deleted while in use; it is written anew", self._path)

    def withdraw(self) -> None:
        """Remove the file, unless another coordinator tells its own address there by now."""
        text, self._text = self._text, None
        with suppress(OSError, UnicodeDecodeError):
            if text is not None and self._path.read_text(encoding="utf-8") == text:
                self._path.unlink()

    def _put(self, text: str) -> None:
        """Write so that nobody ever sees the file half written.  Raises `OSError`."""
        draft = self._path.with_suffix(".new")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(self._path)
        except OSError as error:
            error.filename = str(draft)
            raise


def _in_the_way(path: Path, error: OSError) -> CoordinatorError:
    return CoordinatorError(
        f"the coordinator's own file {error.filename or path} cannot be written"
        f" ({error.strerror}); remove what stands there, or give another --state-dir"
    )
