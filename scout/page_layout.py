"""Where each word of a progress page stands, and how whole words are told from torn ones.

A page has three regions, each with one writer: what the training thread publishes, what the
background thread samples, and the names and members of the process groups that the samples are
about.  A region is two slots that are written in turn, each with a sequence number and a checksum.

This module knows bytes.  It opens no file, reads no clock and knows no torch.
"""

import json
import mmap
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Memory: TypeAlias = mmap.mmap | bytearray
"""A page as its writer has it mapped, or as its reader copied it."""

LAYOUT_VERSION: Final = 3
PAGE_BYTES: Final = 16384
"""Four memory pages.  A file of another size is not a progress page."""
READ_TRIES_MAX: Final = 16
"""A real writer steps a few times a second; sixteen collisions in a row mean a runaway one."""
GROUPS_MAX: Final = 32
"""Process groups of one rank on its page: a model cut in five dimensions has about twenty."""
PAIRS_MAX: Final = 8
"""Peers of one rank in one group whose messages are counted: a pipeline stage has two, four when
interleaved."""
NAME_CHARS_MAX: Final = 64
RUNS_MAX: Final = 64
"""Evenly spaced runs of ranks in one group; parallel layouts make groups of one or two."""
MEMBERS_MAX: Final = 1 << 17
"""Ranks of one group, a bound for the reader: larger than any job."""

MAGIC: Final = b"OUTRIDER"
HEADER: Final = struct.Struct("=8sQQQQ")
"""magic, layout version, token, owner's process id, owner's start time in clock ticks."""
CLAIM: Final = struct.Struct("=QQ")
"""The writer's process id and start time; zeroes while nobody has opened the page to write."""
CLAIM_AT: Final = 64
STEP_WORD: Final = 12
"""Which 8-byte word of the page holds completed steps + 1, 0 before the first.  It is written by
one aligned store, which no reader sees half of, and so needs neither slot nor checksum."""
STEPPED_WORD: Final = 13
"""Which word holds when the last of them was complete, written before their number: a reader
between the two takes the rank to have moved a step before it says so, which is true."""

PROGRESS: Final = struct.Struct("=12Q")
"""sequence, step, phase, phase started, collective + 1, fingerprint + 1, progress, limit,
group, what (see `pack_what`), inside a collective since (0: not inside one), and its count in the
group + 1 (0: not known)."""
PROGRESS_CHECKED: Final = struct.Struct(f"={PROGRESS.size}sI")
PROGRESS_SLOTS: Final = (128, 256)

_BEAT_WORDS: Final = 7
_GROUP_WORDS: Final = 4
BEAT: Final = struct.Struct(f"={_BEAT_WORDS + _GROUP_WORDS * GROUPS_MAX}Q")
"""sequence, beat, collective + 1, groups, phase, phase started, last movement (0: none seen);
then for each group: id, count + 1, fingerprint + 1, what.  A zero in a "+ 1" field means not
known."""
BEAT_CHECKED: Final = struct.Struct(f"={BEAT.size}sI")
BEAT_SLOTS: Final = (384, 1536)

NAMES: Final = struct.Struct("=QII")
"""sequence, length of the text behind it, checksum of both and the text."""
NAMES_SLOTS: Final = (4096, 10240)
NAMES_BYTES_MAX: Final = 10240 - 4096 - NAMES.size

OPERATIONS: Final = (
    "",
    "issued outside Python",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
)
"""Names of collectives by their code on the page; the first is "not known"."""
OPERATION_CODES: Final[Mapping[str, int]] = {name: code for code, name in enumerate(OPERATIONS)}
DETAILS: Final = ("", "read", "write")
"""What a checkpoint phase does, by its code on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWords:
    """One process group as the background thread saw it.  ``fingerprint`` None is not known."""

    group: int
    name: str
    ranks: tuple[int, ...]
    seq: int
    fingerprint: int | None
    operation: int
    inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """What the background thread saw of the training thread: its phase and when it last moved."""

    phase: int
    started_ns: int
    moved_ns: int


def pack_what(operation: int, inside: bool, detail: int = 0, *, unstepped: bool = False) -> int:
    """Return an operation's code, whether the rank is inside it, and a detail as one word.

    ``unstepped`` says that the process has not completed a step yet.
    """
    return operation | inside << 8 | detail << 16 | unstepped << 24


def operation_of(what: int) -> str:
    """Return the operation's name, empty for a code of another version."""
    code = what & 0xFF
    return OPERATIONS[code] if code < len(OPERATIONS) else ""


def is_inside(what: int) -> bool:
    """Return whether the rank was inside the operation."""
    return bool(what & 0x100)


def is_unstepped(what: int) -> bool:
    """Return whether the process had not completed a step."""
    return bool(what & 0x1000000)


def detail_of(what: int) -> str:
    """Return the detail's name."""
    code = what >> 16 & 0xFF
    return DETAILS[code] if code < len(DETAILS) else ""


def live_words(memory: Memory) -> tuple[int, int]:
    """Return the completed steps + 1 and when the last was complete, zeroes when none was."""
    step, stepped_ns = _LIVE.unpack_from(memory, STEP_WORD * _SEQUENCE.size)
    return step, stepped_ns


class Region:
    """One writer's two slots, and the last words that this reader saw whole."""

    def __init__(self, slots: tuple[int, int], layout: struct.Struct) -> None:
        self._slots = slots
        self._layout = layout
        self._last: tuple[int, ...] | None = None

    def read(
        self, memory: Memory, refresh: Callable[[], None]
    ) -> tuple[tuple[int, ...] | None, bool]:
        """Return the newest whole words, and whether they were there to be read just now.

        ``refresh`` copies the page into ``memory`` once more, for words that are torn.
        """
        if self._last is None and self._untouched(memory):
            return None, True
        for _ in range(READ_TRIES_MAX):
            newest = newest_words(memory, self._slots, self._layout)
            if newest is not None:
                self._last = newest
                return newest, True
            refresh()
        return self._last, self._untouched(memory)

    def _untouched(self, memory: Memory) -> bool:
        return not any(any(memory[at : at + self._layout.size]) for at in self._slots)


_CHECK: Final = struct.Struct("=I")
_SEQUENCE: Final = struct.Struct("=Q")
_LIVE: Final = struct.Struct("=QQ")


def newest_words(
    memory: Memory, slots: tuple[int, int], layout: struct.Struct
) -> tuple[int, ...] | None:
    """Return the slot with the highest sequence among those whose checksum holds."""
    first, second = (_SEQUENCE.unpack_from(memory, at)[0] for at in slots)
    for at in slots if first > second else slots[::-1]:
        copy = memory[at : at + layout.size + _CHECK.size]
        body = copy[: layout.size]
        if _CHECK.unpack(copy[layout.size :])[0] == zlib.crc32(body):
            return layout.unpack(body)
    return None


def pack_beat(
    sequence: int,
    now_ns: int,
    collective: int,
    groups: Sequence[GroupWords],
    movement: Movement | None,
) -> tuple[bytes, int]:
    """Return a beat's words and their checksum.  Groups beyond `GROUPS_MAX` are left out."""
    words = [sequence, now_ns, collective, min(len(groups), GROUPS_MAX)]
    words += (
        (0, 0, 0) if movement is None else (movement.phase, movement.started_ns, movement.moved_ns)
    )
    for it in groups[:GROUPS_MAX]:
        known = 0 if it.fingerprint is None else it.fingerprint + 1
        words += (it.group, it.seq + 1, known, pack_what(it.operation, it.inside))
    words += [0] * (_BEAT_WORDS + _GROUP_WORDS * GROUPS_MAX - len(words))
    body = BEAT.pack(*words)
    return body, zlib.crc32(body)


def beat_groups(words: Sequence[int]) -> Iterable[tuple[int, int, int, int]]:
    """Yield group id, count + 1, fingerprint + 1 and what, for each group of a beat."""
    end = _BEAT_WORDS + _GROUP_WORDS * min(words[3], GROUPS_MAX)
    for at in range(_BEAT_WORDS, end, _GROUP_WORDS):
        yield words[at], words[at + 1], words[at + 2], words[at + 3]


# --- names and members ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupName:
    """What a group is called and who its members are, ascending."""

    name: str
    ranks: tuple[int, ...]


def pack_names(groups: Iterable[GroupWords]) -> bytes:
    """Return the text of the names region.  Groups that do not fit are left out."""
    parts: list[str] = []
    room = NAMES_BYTES_MAX - 2
    for it in groups:
        runs = runs_of(it.ranks)
        if len(runs) > RUNS_MAX:
            continue
        entry = [it.group, it.name[:NAME_CHARS_MAX], [list(run) for run in runs]]
        part = json.dumps(entry, separators=(",", ":"))
        if len(part) + 1 > room:
            continue
        room -= len(part) + 1
        parts.append(part)
    return f"[{','.join(parts)}]".encode()


def write_names(memory: mmap.mmap, sequence: int, text: bytes) -> None:
    """Put the text into the slot that ``sequence`` has a turn in, its head last."""
    at = NAMES_SLOTS[sequence & 1]
    memory[at + NAMES.size : at + NAMES.size + len(text)] = text
    NAMES.pack_into(memory, at, sequence, len(text), _names_check(sequence, text))


def names_sequence(memory: Memory) -> int:
    """Return the sequence number of the newest whole text, 0 when there is none."""
    return max((sequence for sequence, _ in _whole_names(memory)), default=0)


class Names:
    """The names region as a reader sees it; a text is parsed once."""

    def __init__(self) -> None:
        self._sequence = 0
        self._known: Mapping[int, GroupName] = {}

    def read(self, memory: Memory) -> Mapping[int, GroupName]:
        """Return group id -> name and members."""
        latest = max(NAMES.unpack_from(memory, at)[0] for at in NAMES_SLOTS)
        if latest != self._sequence:
            for sequence, text in sorted(_whole_names(memory)):
                if sequence > self._sequence:
                    self._sequence, self._known = sequence, _parse_names(text)
        return self._known


def _whole_names(memory: Memory) -> Iterable[tuple[int, bytes]]:
    for at in NAMES_SLOTS:
        sequence, length, check = NAMES.unpack_from(memory, at)
        if 0 < length <= NAMES_BYTES_MAX:
            text = bytes(memory[at + NAMES.size : at + NAMES.size + length])
            if check == _names_check(sequence, text):
                yield sequence, text


def _names_check(sequence: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(NAMES.pack(sequence, len(text), 0)))


def _parse_names(text: bytes) -> Mapping[int, GroupName]:
    entries: list[Any] = json.loads(text)
    return {
        group: GroupName(name=name, ranks=ranks_of([(run[0], run[1], run[2]) for run in runs]))
        for group, name, runs in entries
    }


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ascending ranks as runs of (first, count, distance), greedily."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        if runs:
            first, count, distance = runs[-1]
            if count == 1 or rank == first + count * distance:
                runs[-1] = (first, count + 1, rank - first if count == 1 else distance)
                continue
        runs.append((rank, 1, 1))
    return runs


def ranks_of(runs: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return what `runs_of` was given, `MEMBERS_MAX` at most."""
    ranks: list[int] = []
    for first, count, distance in runs:
        room = MEMBERS_MAX - len(ranks)
        ranks.extend(first + it * distance for it in range(min(count, room)))
    return tuple(ranks)
