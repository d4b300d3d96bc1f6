"""One rank's progress in shared memory: written by the training process, read by its node.

The sidecar creates a page (a small file, usually on tmpfs) per rank; the training thread
publishes into it for well under a microsecond and the sidecar looks at it on a tick.  Nothing
travels while the job is healthy, and after a SIGKILL the last words are still there.

Two writers share a page without a lock because each has its own region: the training thread
publishes progress, a background thread beats.  A region is a sequence lock over two slots that
are written in turn.  A slot carries its sequence number and a checksum, so a reader trusts
neither the order in which another processor's stores become visible nor that the writer lived
to finish: a half-written slot does not check, and the other one still holds the words before.

This module knows bytes and instants.  It judges nothing: an age is for `scout.hang`.
"""

import fcntl
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

from scout.hang import Phase

PAGE_BYTES: Final = 4096
"""One memory page.  A file of another size is not a progress page."""
READ_TRIES_MAX: Final = 16
"""A real writer steps a few times a second; sixteen collisions in a row mean a runaway one."""
LAYOUT_VERSION: Final = 1
TOKEN_MAX: Final = (1 << 64) - 1

_MAGIC: Final = b"OUTRIDER"
_HEADER: Final = struct.Struct("=8sQQQQ")
"""magic, layout version, token, owner's process id, owner's start time in clock ticks."""
_CLAIM: Final = struct.Struct("=QQ")
"""The writer's process id and start time; zeroes while nobody has opened the page to write."""
_CLAIM_AT: Final = 64

_PROGRESS: Final = struct.Struct("=QQQQQQQQ")
"""sequence, step, phase, phase started, collective + 1, fingerprint + 1, progress, limit."""
_BEAT: Final = struct.Struct("=QQQ")
"""sequence, beat, collective + 1.  A zero in a "+ 1" field means not known."""
_CHECK: Final = struct.Struct("=I")
_PROGRESS_SLOTS: Final = (128, 256)
_BEAT_SLOTS: Final = (384, 448)

_PROGRESS_CHECKED: Final = struct.Struct(f"={_PROGRESS.size}sI")
_BEAT_CHECKED: Final = struct.Struct(f"={_BEAT.size}sI")
_PHASES: Final = {int(phase): phase for phase in Phase}

_Path: TypeAlias = str | os.PathLike[str]


class ProgressPageError(Exception):
    """The page cannot be used.  The text is one sentence that says what to do."""


class PageHeldError(ProgressPageError):
    """A live process owns, or already writes, this page."""


class WrongTokenError(ProgressPageError):
    """The page was made for somebody else, usually another generation of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a page says.  Instants are nanoseconds of this machine's monotonic clock.

    ``step`` and the fields of the same publication are None until the first one; ``beat_ns`` is
    None until the first beat.  ``collective_seq`` is the later of what both writers said.
    ``stable`` is False when a region kept changing under the reader: its values are then the
    last ones that this reader saw whole.
    """

    step: int | None
    phase: Phase
    phase_started_ns: int | None
    collective_seq: int | None
    fingerprint: int | None
    progress_ns: int | None
    phase_limit_ns: int | None
    beat_ns: int | None
    stable: bool


def create_page(path: _Path, token: int) -> None:
    """Create the page at ``path`` (mode 0600) for whoever knows ``token``; we become its owner.

    The page appears whole or not at all.  A page whose owner is dead is replaced.  Raises
    `PageHeldError` when its owner lives, `ProgressPageError` when the file there is no progress
    page, and `OSError` when the folder cannot be written.
    """
    if not 0 <= token <= TOKEN_MAX:
        raise ProgressPageError(f"a page token is between 0 and {TOKEN_MAX}, not {token}")
    target = Path(path)
    page = bytearray(PAGE_BYTES)
    pid = os.getpid()
    _HEADER.pack_into(page, 0, _MAGIC, LAYOUT_VERSION, token, pid, _start_ticks(pid) or 0)
    with _exclusive(target.parent):
        _refuse_if_held(target)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(page)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class PageWriter:
    """The training process's end.  `publish` and `beat` belong to one thread each."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._published = _sequence(memory, _PROGRESS_SLOTS, _PROGRESS)
        self._beaten = _sequence(memory, _BEAT_SLOTS, _BEAT)

    @classmethod
    def open(cls, path: _Path, token: int) -> Self:
        """Open the page and claim its writer's end.

        Raises `WrongTokenError`, `PageHeldError` when another live process writes it,
        `ProgressPageError` when it is no page of this layout, `OSError` when it is not there.
        """
        memory = _map(path, token, writable=True)
        pid, ticks = _CLAIM.unpack_from(memory, _CLAIM_AT)
        if pid not in (0, os.getpid()) and _lives(pid, ticks):
            memory.close()
            raise PageHeldError(
                f"progress page {os.fspath(path)} is written by process {pid}; "
                "each rank needs a page of its own"
            )
        _CLAIM.pack_into(memory, _CLAIM_AT, os.getpid(), _start_ticks(os.getpid()) or 0)
        return cls(memory)

    def publish(
        self,
        step: int,
        phase: Phase = Phase.UNKNOWN,
        collective_seq: int | None = None,
        *,
        now_ns: int | None = None,
        phase_started_ns: int | None = None,
        fingerprint: int | None = None,
        phase_limit_ns: int | None = None,
    ) -> None:
        """Say that progress was made: ``step`` optimizer steps are complete.

        The phase starts now unless ``phase_started_ns`` says otherwise; ``phase_limit_ns`` is
        how long it may last without being called a stall.  ``fingerprint`` is a 63-bit digest of
        the collective.  Raises `struct.error` for a number outside its field and `ValueError`
        when the page is closed.
        """
        now = time.monotonic_ns() if now_ns is None else now_ns
        sequence = self._published + 1
        body = _PROGRESS.pack(
            sequence,
            step,
            phase,
            now if phase_started_ns is None else phase_started_ns,
            0 if collective_seq is None else collective_seq + 1,
            0 if fingerprint is None else fingerprint + 1,
            now,
            phase_limit_ns or 0,
        )
        slot = _PROGRESS_SLOTS[sequence & 1]
        _PROGRESS_CHECKED.pack_into(self._memory, slot, body, zlib.crc32(body))
        self._published = sequence

    def beat(self, now_ns: int, collective_seq: int | None) -> None:
        """Say that the process runs, whatever its training thread is doing."""
        sequence = self._beaten + 1
        body = _BEAT.pack(sequence, now_ns, 0 if collective_seq is None else collective_seq + 1)
        slot = _BEAT_SLOTS[sequence & 1]
        _BEAT_CHECKED.pack_into(self._memory, slot, body, zlib.crc32(body))
        self._beaten = sequence

    def close(self) -> None:
        """Let go of the page; what was published stays readable."""
        self._memory.close()


class PageReader:
    """The node's end."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._progress = _Region(_PROGRESS_SLOTS, _PROGRESS)
        self._beat = _Region(_BEAT_SLOTS, _BEAT)

    @classmethod
    def open(cls, path: _Path, token: int) -> Self:
        """Open the page to read it.  Raises as `PageWriter.open` does, except for the claim."""
        return cls(_map(path, token, writable=False))

    def read(self) -> Progress | None:
        """Return what the page says, or None when nothing was ever published."""
        said, said_stable = self._progress.read(self._memory)
        beat, beat_stable = self._beat.read(self._memory)
        stable = said_stable and beat_stable
        if said is None and beat is None and stable:
            return None
        beat_ns = None if beat is None else beat[1]
        beat_seq = None if beat is None else _known(beat[2])
        if said is None:
            return Progress(
                step=None,
                phase=Phase.UNKNOWN,
                phase_started_ns=None,
                collective_seq=beat_seq,
                fingerprint=None,
                progress_ns=None,
                phase_limit_ns=None,
                beat_ns=beat_ns,
                stable=stable,
            )
        _, step, phase, started, collective, fingerprint, progress_ns, limit = said
        said_seq = _known(collective)
        beat_is_later = said_seq is None or (beat_ns is not None and beat_ns >= progress_ns)
        return Progress(
            step=step,
            phase=_PHASES.get(phase, Phase.UNKNOWN),
            phase_started_ns=started,
            collective_seq=beat_seq if beat_is_later and beat_seq is not None else said_seq,
            fingerprint=_known(fingerprint),
            progress_ns=progress_ns,
            phase_limit_ns=limit or None,
            beat_ns=beat_ns,
            stable=stable,
        )

    def close(self) -> None:
        """Let go of the page."""
        self._memory.close()


class _Region:
    """One writer's two slots, and the last words that this reader saw whole."""

    def __init__(self, slots: tuple[int, int], layout: struct.Struct) -> None:
        self._slots = slots
        self._layout = layout
        self._last: tuple[int, ...] | None = None

    def read(self, memory: mmap.mmap) -> tuple[tuple[int, ...] | None, bool]:
        """Return the newest whole words, and whether they were there to be read just now."""
        for _ in range(READ_TRIES_MAX):
            newest = _newest(memory, self._slots, self._layout)
            if newest is not None:
                self._last = newest
                return newest, True
        return self._last, self._untouched(memory)

    def _untouched(self, memory: mmap.mmap) -> bool:
        return not any(any(memory[at : at + self._layout.size]) for at in self._slots)


def _newest(
    memory: mmap.mmap, slots: tuple[int, int], layout: struct.Struct
) -> tuple[int, ...] | None:
    """Return the slot with the highest sequence among those whose checksum holds."""
    whole: list[tuple[int, ...]] = []
    for at in slots:
        copy = memory[at : at + layout.size + _CHECK.size]
        body = copy[: layout.size]
        if _CHECK.unpack(copy[layout.size :])[0] == zlib.crc32(body):
            whole.append(layout.unpack(body))
    return max(whole, default=None)


def _sequence(memory: mmap.mmap, slots: tuple[int, int], layout: struct.Struct) -> int:
    newest = _newest(memory, slots, layout)
    return 0 if newest is None else newest[0]


def _known(plus_one: int) -> int | None:
    return plus_one - 1 if plus_one else None


def _map(path: _Path, token: int, *, writable: bool) -> mmap.mmap:
    name = os.fspath(path)
    with Path(path).open("r+b" if writable else "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = file.read(_HEADER.size)
        if size != PAGE_BYTES or header[: len(_MAGIC)] != _MAGIC:
            raise ProgressPageError(f"{name} is not a progress page")
        _, version, page_token, _, _ = _HEADER.unpack(header)
        if version != LAYOUT_VERSION:
            raise ProgressPageError(
                f"progress page {name} has layout {version}, this program speaks "
                f"{LAYOUT_VERSION}; run the same version beside and inside the job"
            )
        if page_token != token:
            raise WrongTokenError(
                f"the token does not open progress page {name}; it belongs to another run"
            )
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(file.fileno(), PAGE_BYTES, access=access)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time create or replace pages in ``folder``."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _refuse_if_held(target: Path) -> None:
    try:
        found = target.read_bytes()
    except FileNotFoundError:
        return
    if len(found) != PAGE_BYTES or not found.startswith(_MAGIC):
        raise ProgressPageError(f"{target} exists and is not a progress page; remove it")
    _, _, _, pid, ticks = _HEADER.unpack_from(found)
    if _lives(pid, ticks):
        raise PageHeldError(
            f"progress page {target} belongs to process {pid}, which is running; "
            "stop it or use another folder"
        )


def _lives(pid: int, ticks: int) -> bool:
    """Tell a live process from a dead one whose number was given to another."""
    now = _start_ticks(pid)
    return now is not None and now == ticks


def _start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since boot; None when it runs no more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
