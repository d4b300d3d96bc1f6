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

import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from scout.hang import GroupPosition, Phase
from scout.page_files import (
    TOKEN_MAX,
    AnyPath,
    PageCopy,
    PageHeldError,
    ProgressPageError,
    WrongTokenError,
    exclusive,
    lives,
    map_page,
    refuse_if_held,
    start_ticks,
)
from scout.page_layout import (
    BEAT,
    BEAT_CHECKED,
    BEAT_SLOTS,
    CLAIM,
    CLAIM_AT,
    HEADER,
    LAYOUT_VERSION,
    MAGIC,
    PAGE_BYTES,
    PROGRESS,
    PROGRESS_CHECKED,
    PROGRESS_SLOTS,
    STEP_WORD,
    STEPPED_WORD,
    GroupName,
    GroupWords,
    Movement,
    Names,
    Region,
    beat_groups,
    detail_of,
    is_inside,
    is_unstepped,
    live_words,
    names_sequence,
    newest_words,
    operation_of,
    pack_beat,
    pack_names,
    write_names,
)

__all__ = [
    "PAGE_BYTES",
    "PageHeldError",
    "PageReader",
    "PageWriter",
    "Progress",
    "ProgressPageError",
    "WrongTokenError",
    "create_page",
]

_pack: Final = PROGRESS.pack
_pack_checked: Final = PROGRESS_CHECKED.pack_into
_check: Final = zlib.crc32
_PHASES: Final = {int(phase): phase for phase in Phase}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a page says.  Instants are nanoseconds of this machine's monotonic clock.

    ``step`` is None until the process completed one, the other fields of a publication until the
    first of them; ``beat_ns`` is None until the first beat.  ``collective_seq`` is the later of
    what both writers said.
    ``collective_since_ns`` is when the training thread entered the collective that it is inside
    of, None while it is in none; ``detail`` is ``read`` or ``write`` in checkpoint I/O.
    ``groups`` are the process groups that the rank is a member of.  ``stable`` is False when a
    region kept changing under the reader: its values are then the last ones that it saw whole.
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
    collective_since_ns: int | None = None
    detail: str = ""
    groups: tuple[GroupPosition, ...] = ()


def create_page(path: AnyPath, token: int) -> None:
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
    HEADER.pack_into(page, 0, MAGIC, LAYOUT_VERSION, token, pid, start_ticks(pid) or 0)
    with exclusive(target.parent):
        refuse_if_held(target)
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
        self.words = memoryview(memory).cast("Q")
        """The page as 8-byte words, for the two that are written alone (`STEP_WORD`)."""
        self._published = _sequence(newest_words(memory, PROGRESS_SLOTS, PROGRESS))
        self._beaten = _sequence(newest_words(memory, BEAT_SLOTS, BEAT))
        self._named = names_sequence(memory)
        self._named_groups: tuple[int, ...] | None = None

    @classmethod
    def open(cls, path: AnyPath, token: int) -> Self:
        """Open the page and claim its writer's end.

        Raises `WrongTokenError`, `PageHeldError` when another live process writes it,
        `ProgressPageError` when it is no page of this layout, `OSError` when it is not there.
        """
        memory = map_page(path, token)
        pid, ticks = CLAIM.unpack_from(memory, CLAIM_AT)
        if pid not in (0, os.getpid()) and lives(pid, ticks):
            memory.close()
            raise PageHeldError(
                f"progress page {os.fspath(path)} is written by process {pid}; "
                "each rank needs a page of its own"
            )
        CLAIM.pack_into(memory, CLAIM_AT, os.getpid(), start_ticks(os.getpid()) or 0)
        writer = cls(memory)
        writer.words[STEP_WORD] = writer.words[STEPPED_WORD] = 0  # of a process before this one
        return writer

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
        self.write(
            step,
            phase,
            now if phase_started_ns is None else phase_started_ns,
            0 if collective_seq is None else collective_seq + 1,
            0 if fingerprint is None else fingerprint + 1,
            now,
            phase_limit_ns or 0,
        )

    def write(  # noqa: PLR0917 - keywords would double the price of the call
        self,
        step: int,
        phase: int,
        started_ns: int,
        collective: int,
        fingerprint: int,
        now_ns: int,
        limit_ns: int,
        group: int = 0,
        what: int = 0,
        since_ns: int = 0,
        count: int = 0,
    ) -> None:
        """Publish the words as they stand on the page (see `scout.page_layout`), for speed."""
        sequence = self._published + 1
        body = _pack(
            sequence,
            step,
            phase,
            started_ns,
            collective,
            fingerprint,
            now_ns,
            limit_ns,
            group,
            what,
            since_ns,
            count,
        )
        _pack_checked(self._memory, PROGRESS_SLOTS[sequence & 1], body, _check(body))
        self._published = sequence

    def beat(
        self,
        now_ns: int,
        collective_seq: int | None,
        groups: Sequence[GroupWords] = (),
        movement: Movement | None = None,
    ) -> None:
        """Say that the process runs, whatever its training thread is doing.

        ``groups`` are the process groups that it is a member of, the most important first;
        ``movement`` is what was seen of the training thread between its own publications.
        """
        self._name(groups)
        sequence = self._beaten + 1
        collective = 0 if collective_seq is None else collective_seq + 1
        body, check = pack_beat(sequence, now_ns, collective, groups, movement)
        BEAT_CHECKED.pack_into(self._memory, BEAT_SLOTS[sequence & 1], body, check)
        self._beaten = sequence

    def _name(self, groups: Sequence[GroupWords]) -> None:
        """Write names and members when they are not those that stand there."""
        present = tuple(it.group for it in groups)
        if present == self._named_groups or (not present and self._named_groups is None):
            return
        self._named += 1
        write_names(self._memory, self._named, pack_names(groups))
        self._named_groups = present

    def close(self) -> None:
        """Let go of the page; what was published stays readable."""
        self.words.release()
        self._memory.close()


class PageReader:
    """The node's end."""

    def __init__(self, page: PageCopy) -> None:
        self._page = page
        self._progress = Region(PROGRESS_SLOTS, PROGRESS)
        self._beat = Region(BEAT_SLOTS, BEAT)
        self._names = Names()

    @classmethod
    def open(cls, path: AnyPath, token: int) -> Self:
        """Open the page to read it.  Raises as `PageWriter.open` does, except for the claim."""
        return cls(PageCopy(path, token))

    def read(self) -> Progress | None:
        """Return what the page says, or None when nothing was ever published.

        Raises `ProgressPageError` when its file was cut short, `OSError` when it cannot be read.
        """
        refresh, memory = self._page.refresh, self._page.bytes
        refresh()
        said, said_stable = self._progress.read(memory, refresh)
        beat, beat_stable = self._beat.read(memory, refresh)
        stable = said_stable and beat_stable
        if said is None and beat is None and stable:
            return None
        live, live_ns = live_words(memory)
        beat_ns = None if beat is None else beat[1]
        beat_seq = None if beat is None else _known(beat[2])
        blank = Progress(
            step=None,
            phase=Phase.UNKNOWN,
            phase_started_ns=None,
            collective_seq=beat_seq,
            fingerprint=None,
            progress_ns=None,
            phase_limit_ns=None,
            beat_ns=max(beat_ns or 0, live_ns) or None,  # who completes a step runs
            stable=stable,
            groups=_positions(beat, said, self._names.read(memory)),
        )
        if said is None:
            return _moved(blank, beat)
        _, step, phase, started, collective, fingerprint, progress_ns, limit, _, what, since, _ = (
            said
        )
        said_seq = _known(collective)
        beat_is_later = said_seq is None or (beat_ns is not None and beat_ns >= progress_ns)
        spoken = replace(
            blank,
            step=_known(live) if live else None if is_unstepped(what) else step,
            phase=_PHASES.get(phase, Phase.UNKNOWN),
            phase_started_ns=started,
            collective_seq=beat_seq if beat_is_later and beat_seq is not None else said_seq,
            fingerprint=_known(fingerprint),
            progress_ns=progress_ns,
            phase_limit_ns=limit or None,
            collective_since_ns=since or None,
            detail=detail_of(what),
        )
        return _stepped(_moved(spoken, beat), live_ns)

    def close(self) -> None:
        """Let go of the page."""
        self._page.close()


def _moved(spoken: Progress, beat: Sequence[int] | None) -> Progress:
    """Return what was said, and what was seen since.

    A phase that goes on keeps its start and its limit; movement in it is progress all the same.
    """
    if beat is None or beat[6] <= (spoken.progress_ns or 0):
        return spoken
    _, _, _, _, phase, started, moved = beat[:7]
    seen = _PHASES.get(phase, Phase.UNKNOWN)
    is_held = spoken.phase_limit_ns is not None or spoken.collective_since_ns is not None
    if is_held or seen is spoken.phase:
        return replace(spoken, progress_ns=moved)
    return replace(spoken, phase=seen, phase_started_ns=started, progress_ns=moved, detail="")


def _stepped(seen: Progress, live_ns: int) -> Progress:
    """Return what is known of a rank that completed a step since: of its phase, nothing new.

    Which phase a rank was last seen in stands until the background thread looks again, which it
    does as soon as steps fail to come.
    """
    return replace(seen, progress_ns=live_ns) if live_ns > (seen.progress_ns or 0) else seen


def _positions(
    beat: Sequence[int] | None, said: Sequence[int] | None, names: Mapping[int, GroupName]
) -> tuple[GroupPosition, ...]:
    """Return the sampled groups.

    That it entered a collective or came out of it, the training thread says earlier, and a
    process that died of it is never sampled again.
    """
    if beat is None:
        return ()
    positions: list[GroupPosition] = []
    for group, count, fingerprint, what in beat_groups(beat):
        named = names.get(group)
        if named is None or not count:
            continue
        is_own = said is not None and said[8] == group
        is_inside_now = said[10] != 0 if said is not None and is_own else is_inside(what)
        if said is not None and is_own and said[11] > count:
            count, fingerprint, what = said[11], said[5], said[9]  # noqa: PLW2901 - a later word
        positions.append(
            GroupPosition(
                name=named.name,
                ranks=named.ranks,
                seq=count - 1,
                fingerprint=_known(fingerprint) or 0,
                op=operation_of(what),
                inside=is_inside_now and (not is_own or is_inside(what)),
            )
        )
    return tuple(positions)


def _sequence(newest: tuple[int, ...] | None) -> int:
    return 0 if newest is None else newest[0]


def _known(plus_one: int) -> int | None:
    return plus_one - 1 if plus_one else None
