"""How ranks, signals and foreign text are put into the sentences that people read.

Decides nothing.  It knows Linux signal numbers by heart, because reports come from Linux nodes
whatever machine reads them.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

LINE_CHARS_MAX: Final = 300
"""Longest foreign line inside a sentence; beyond it a sentence is no longer read."""

RANKS_SHOWN_MAX: Final = 16
"""Ranks written out one by one; a wider set is shown as its first ones and a count."""

SIGNAL_NAMES: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "SIGHUP",
        2: "SIGINT",
        3: "SIGQUIT",
        4: "SIGILL",
        5: "SIGTRAP",
        6: "SIGABRT",
        7: "SIGBUS",
        8: "SIGFPE",
        9: "SIGKILL",
        10: "SIGUSR1",
        11: "SIGSEGV",
        12: "SIGUSR2",
        13: "SIGPIPE",
        14: "SIGALRM",
        15: "SIGTERM",
        16: "SIGSTKFLT",
        17: "SIGCHLD",
        18: "SIGCONT",
        19: "SIGSTOP",
        20: "SIGTSTP",
        21: "SIGTTIN",
        22: "SIGTTOU",
        23: "SIGURG",
        24: "SIGXCPU",
        25: "SIGXFSZ",
        26: "SIGVTALRM",
        27: "SIGPROF",
        28: "SIGWINCH",
        29: "SIGIO",
        30: "SIGPWR",
        31: "SIGSYS",
    }
)

_ANSI: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_SPACE: Final = re.compile(r"\s+")
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_RANK_PREFIX: Final = re.compile(r"^\[rank\d+\]:\s?")
_DIGITS: Final = re.compile(r"([0-9]{1,18})")


def signal_name(number: int) -> str:
    """Return ``SIGKILL (signal 9)``, or ``signal 34`` where the number has no common name."""
    name = SIGNAL_NAMES.get(number)
    return f"signal {number}" if name is None else f"{name} (signal {number})"


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 2, 3``, ascending and without doubles."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    shown = ", ".join(str(rank) for rank in ordered[:RANKS_SHOWN_MAX])
    more = len(ordered) - RANKS_SHOWN_MAX
    return f"ranks {shown}" + (f" and {more} more" if more > 0 else "")


def have(ranks: Iterable[int]) -> str:
    """Return the verb that follows `rank_list`."""
    return "has" if len(set(ranks)) == 1 else "have"


def one_line(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    r"""Return foreign ``text`` as one printable line of at most ``chars_max`` characters.

    Terminal sequences are dropped, white space is folded, what is left of control and
    direction-changing characters and halves of characters is written as ``\x..``, so that it can
    neither act on a reader nor fail to be written.
    """
    flat = _SPACE.sub(" ", _ANSI.sub("", text)).strip()
    safe = _CONTROL.sub(_escaped, flat)
    return safe if len(safe) <= chars_max else safe[: chars_max - 1] + "\u2026"


def output_line(text: str) -> str:
    """Return a worker's line without the ``[rank1]: `` that torch puts before a traceback's."""
    return one_line(_RANK_PREFIX.sub("", text))


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a sort key under which ``node-2`` stands before ``node-10``."""
    parts = [part for part in _DIGITS.split(name) if part]
    key = tuple((0, int(part), "") if part[0] in "0123456789" else (1, 0, part) for part in parts)
    return key, name


def _escaped(match: re.Match[str]) -> str:
    point = ord(match.group())
    return f"\\x{point:02x}" if point <= 0xFF else f"\\u{point:04x}"  # noqa: PLR2004 - one byte
