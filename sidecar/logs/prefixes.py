"""What launchers write before a worker's line: stripped, and read for the rank that it names.

Decides which rank a line speaks for, when several write into one file.  Only forms that no
training framework prints itself are taken for a prefix.
"""

import re
from dataclasses import dataclass
from typing import Final

_RANK: Final = re.compile(
    r"\[(?P<role>[A-Za-z_]+)(?P<number>\d+)\]: ?"  # torchrun, and torch's own [rank3]:
    r"|\[\d+,(?P<mpi>\d+)\]<std(?:out|err)>: ?"  # mpirun --tag-output
    r"|\([\w.<>-]+ pid=\d+(?:, ip=[^)]*)?\) ?"  # Ray
    r"|(?:\d{1,3}(?:\.\d{1,3}){3}|(?:ip|node|host|gpu|compute|worker)[\w.-]*\d): "  # pdsh
    r"|[a-z]\w*\.[\w-]+/\d+ "  # torchx, nemo-run
    r"| *(?P<task>\d+): "  # srun --label
)
_PREFIX: Final = re.compile(rf"(?:{re.sub(r'[?]P<[a-z]+>', '?:', _RANK.pattern)})+".encode())
_INSIDE: Final = re.compile(r"\[(?:RANK|Rank|rank)[: ](\d+)\]")
PREFIX_BYTES_MAX: Final = 80
"""Where a prefix ends at the latest."""
NEVER_FIRST: Final = frozenset(range(256)) - frozenset(b"[( 0123456789abcdefghijklmnopqrstuvwxyz")
"""A line that begins with one of these has no prefix."""
_BLANK: Final = ord(" ")
_AFTER_BLANK: Final = frozenset(b" 0123456789")
_LETTERS: Final = frozenset(b"abdefjklmopqrstuvxyz")
"""Letters that no host name of the forms above begins with."""
DIGITS_MAX: Final = 9
"""A longer number is no rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who wrote a line, as its prefix says.  None is "not said"."""

    rank: int | None = None
    local_rank: int | None = None
    text: str = ""


def origin(line: str) -> Origin:
    """Return the ranks that a line names, and the line without the prefix."""
    rank: int | None = None
    local_rank: int | None = None
    position = 0
    while (found := _RANK.match(line, position)) is not None:
        position = found.end()
        number = found["number"]
        if number is not None and len(number) <= DIGITS_MAX:
            if found["role"].lower() == "rank":
                rank = int(number)
            else:
                local_rank = int(number)
        for name in ("mpi", "task"):
            if found[name] is not None and len(found[name]) <= DIGITS_MAX:
                rank = int(found[name])
    text = line[position:]
    if rank is None and (inside := _INSIDE.search(text)) and len(inside[1]) <= DIGITS_MAX:
        rank = int(inside[1])
    return Origin(rank=rank, local_rank=local_rank, text=text)


def prefix_end(data: bytes, start: int, end: int) -> int:
    """Return where the prefix of the line from ``start`` to ``end``, its line feed, ends."""
    first = data[start]
    if first in NEVER_FIRST or (first == _BLANK and data[start + 1] not in _AFTER_BLANK):
        return start
    if first in _LETTERS and data.find(b"/", start, start + PREFIX_BYTES_MAX) < 0:
        return start  # only torchx begins with such a letter
    found = _PREFIX.match(data, start, min(end, start + PREFIX_BYTES_MAX))
    return start if found is None else found.end()


def without_prefix(line: str) -> str:
    """Return a line without launchers' prefixes."""
    return origin(line).text
