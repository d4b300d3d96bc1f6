r"""Whether the kernel wrote a line of a log, and what it said.

Decides by transport, never by a tag alone where the transport is known: a ``/dev/kmsg`` record
carries its facility, a journal entry its ``_TRANSPORT``, and only the kernel's own is believed.
A plain log file is believed where it writes ``kernel:`` without a process id, as syslog does.
Refuses to know what the words mean.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

LINE_CHARS_MAX: Final = 4096
"""Characters of a line that are looked at; the kernel's own limit for one is about 1 KiB."""
FIELDS_MAX: Final = 64
"""Fields kept of one journal entry or of one record's dictionary."""
STAMPS_MAX: Final = 4
"""Bracketed times and caller ids before a text."""
LEVEL_BITS: Final = 3
"""A syslog priority is the facility shifted by this, plus the level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """What the kernel said.  ``uptime_us`` and ``seq`` are known where the transport has them.

    ``fields`` is the record's dictionary (the device, for instance).  Programs choose the names
    that the kernel repeats, so control characters are taken out of all that is shown.
    """

    text: str
    raw: str = ""
    uptime_us: int | None = None
    seq: int | None = None
    level: int | None = None
    boot: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("text", "raw"):
            said: str = getattr(self, name)
            if not said.isprintable():
                object.__setattr__(self, name, said.translate(_HARMLESS))


_HARMLESS: Final = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), "?") | {9: " ", 10: " "}


class Mark(StrEnum):
    """What a log says about itself."""

    GAP = "gap"
    """Records were lost: what the kernel said meanwhile is not known."""
    BOOT = "boot"
    """What follows is another boot's."""


_RECORD: Final = re.compile(r"(\d{1,6}),(\d{1,20}),(\d{1,20}),[^;]{0,200};(.*)", re.DOTALL)
_PRIORITY: Final = re.compile(r"<(\d{1,4})>(?:1 )?")
_DECODED: Final = re.compile(r"([a-z0-9]{2,9}) *:([a-z]{2,7}) *: ")
_STAMP: Final = re.compile(
    r"\[ *(?:\+?\d{1,12}\.\d{1,9}(?: *<[ .\d]{1,24}>)?"
    r"|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} ?[ \d]?\d [\d:.]{4,15}(?: \d{4})?"
    r"|[TC] *\d{1,9})\] *"
)
_ISO: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? +"
)
_TAG: Final = re.compile(r"(?:\S{0,255}[^\s:] +){0,7}kernel: ?")
_TAG_5424: Final = re.compile(
    r"\S{10,40} \S{1,255} kernel (?:-|0) \S{1,32} (?:-|\[[^\]]{0,400}\]) "
)
_UPTIME: Final = re.compile(r"\[ *(\d{1,12})\.(\d{1,9})")
_ESCAPED: Final = re.compile(r"\\x([0-9a-f]{2})")
_GAP: Final = re.compile(
    r"(?:\S+ +){0,6}systemd-journald(?:\[\d{1,10}\])?: (?P<by_journal>.*)|"
    r"(?P<by_kernel>.*)",
    re.DOTALL,
)
_LOST_BY_JOURNAL: Final = re.compile(
    r"/dev/kmsg buffer overrun|Missed \d{1,12} kernel messages"
    r"|Suppressed \d{1,12} messages from (?:kernel|/?system\.slice/kernel)"
)
_LOST_BY_KERNEL: Final = re.compile(
    r".{0,80}?\b\d{1,12} (?:callbacks|messages|output lines|printk messages) (?:are )?suppressed"
    r"|.{0,80}?\*\* \d{1,12} printk messages dropped \*\*",
    re.DOTALL,
)
_GAP_WORDS: Final = ("suppressed", "overrun", "dropped", "Missed", "Suppressed")
_BOOT: Final = re.compile(r"-- (?:Boot [0-9a-f]{32}|Reboot) --")


def kernel_text(line: str) -> str | None:
    """Return what the kernel said in ``line``, or None when somebody else wrote it."""
    found = read_line(line)
    return found.text if isinstance(found, KernelLine) else None


def read_line(line: str) -> KernelLine | Mark | None:
    """Read one line of any log format; None when the kernel did not write it."""
    line = line[:LINE_CHARS_MAX].rstrip("\r\n")
    if line.startswith('{"'):
        return _from_json(line)
    if line.startswith("-- ") and _BOOT.match(line):
        return Mark.BOOT
    record = _RECORD.match(line)
    if record is not None:
        return _from_record(record, line, {})
    priority = _PRIORITY.match(line)
    level = None
    rest = line
    if priority is not None:
        if not _is_kernel(int(priority[1])):
            return None
        level, rest = int(priority[1]), line[priority.end() :]
    decoded = _DECODED.match(rest)
    if decoded is not None:
        if decoded[1] != "kern":
            return None
        rest = rest[decoded.end() :]
    lost = _gap(rest)
    if lost is not None:
        return lost
    uptime = _UPTIME.search(rest[:80])
    text = _without_prefix(rest)
    at = None if uptime is None else int(uptime[1]) * 10**6 + int(uptime[2][:6].ljust(6, "0"))
    found = _gap(text)
    return found or KernelLine(text=text, raw=line, level=level, uptime_us=at)


def _without_prefix(text: str) -> str:
    tag = _TAG.match(text) or _TAG_5424.match(text) or _ISO.match(text)
    text = _without_stamps(text if tag is None else text[tag.end() :])
    if tag is None:
        tag = _TAG.match(text)  # journalctl's monotonic form has the stamp before the host
        text = text if tag is None else text[tag.end() :]
    return text


def _without_stamps(text: str) -> str:
    for _ in range(STAMPS_MAX):
        stamp = _STAMP.match(text)
        if stamp is None:
            break
        text = text[stamp.end() :]
    return text


def _gap(text: str) -> Mark | None:
    if not any(word in text for word in _GAP_WORDS):
        return None
    found = _GAP.match(text)
    assert found is not None, "the pattern takes any text"
    if found["by_journal"] is not None:
        return Mark.GAP if _LOST_BY_JOURNAL.match(found["by_journal"]) else None
    return Mark.GAP if _LOST_BY_KERNEL.match(found["by_kernel"]) else None


def _is_kernel(priority: int) -> bool:
    return priority >> LEVEL_BITS == 0


def _from_record(
    record: re.Match[str], raw: str, fields: Mapping[str, str]
) -> KernelLine | Mark | None:
    if not _is_kernel(int(record[1])):
        return None  # a program may write into /dev/kmsg, but not as the kernel
    text = _ESCAPED.sub(lambda code: chr(int(code[1], 16)), record[4])
    return _gap(text) or KernelLine(
        text=text,
        raw=raw,
        level=int(record[1]),
        seq=int(record[2]),
        uptime_us=int(record[3]),
        fields=fields,
    )


def read_record(record: str) -> KernelLine | Mark | None:
    """Read one whole ``/dev/kmsg`` record with its dictionary lines (each begins with a blank)."""
    first, *rest = record[:LINE_CHARS_MAX].split("\n")
    found = _RECORD.match(first)
    if found is None:
        return read_line(first)
    return _from_record(found, first, dict(_dictionary(rest)))


def _dictionary(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in list(lines)[:FIELDS_MAX]:
        name, equals, value = line.strip().partition("=")
        if line.startswith(" ") and equals and name:
            yield name, value


def _from_json(line: str) -> KernelLine | Mark | None:
    try:
        body: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return _entry({str(key): _plain(value) for key, value in list(body.items())[:FIELDS_MAX]}, line)


def _plain(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, int) and 0 <= item < 256 for item in value):  # noqa: PLR2004
        return bytes(value).decode(errors="replace")
    return value if isinstance(value, str) else str(value)


def _entry(fields: Mapping[str, str], raw: str) -> KernelLine | Mark | None:
    """Return what a journal entry says, if the kernel said it."""
    text = fields.get("MESSAGE", "")
    if fields.get("_TRANSPORT") != "kernel":
        ours = fields.get("SYSLOG_IDENTIFIER") == "systemd-journald"
        journal = ours and fields.get("_TRANSPORT") in ("driver", "journal")
        return Mark.GAP if journal and _LOST_BY_JOURNAL.match(text) else None
    at = fields.get("_SOURCE_MONOTONIC_TIMESTAMP") or fields.get("__MONOTONIC_TIMESTAMP") or ""
    level = fields.get("PRIORITY", "")
    names = {name[8:]: value for name, value in fields.items() if name.startswith("_KERNEL_")}
    return _gap(text) or KernelLine(
        text=text,
        raw=raw or text,
        uptime_us=int(at) if at.isascii() and at.isdigit() and len(at) < 20 else None,  # noqa: PLR2004
        level=int(level) if level in tuple("01234567") else None,
        boot=fields.get("_BOOT_ID"),
        fields=names,
    )


_FIELD: Final = re.compile(r"([A-Z_][A-Z0-9_]{0,63})=(.*)", re.DOTALL)
_ENTRY_STARTS: Final = (
    "__CURSOR=",
    "__REALTIME_TIMESTAMP=",
    "__MONOTONIC_TIMESTAMP=",
    "_TRANSPORT=",
    "_BOOT_ID=",
    "MESSAGE=",
    "PRIORITY=",
    "SYSLOG_",
)


@dataclass(slots=True)
class LineReader:
    """Lines of any format in a row, as they come; journal export entries are put together.

    An entry is told as soon as its transport and its words are known, because the blank line at
    its end may come late or have been dropped.  A record's own dictionary lines are dropped here
    for the same reason; `read_record` takes a record whole.
    """

    _fields: dict[str, str] | None = None
    _told: bool = False
    _awaits: str | None = None

    def feed(self, line: str) -> KernelLine | Mark | None:
        """Take one line and return what is complete with it."""
        line = line[:LINE_CHARS_MAX].rstrip("\r\n")
        if self._fields is not None:
            return self._within(self._fields, line)
        if line.startswith(_ENTRY_STARTS):
            self._fields, self._told = {}, False
            return self._within(self._fields, line)
        if not line or line[0] == " ":
            return None
        return read_line(line)

    def _within(self, fields: dict[str, str], line: str) -> KernelLine | Mark | None:
        if self._awaits is not None:
            name, self._awaits = self._awaits, None
            return self._field(fields, name, _binary(line))
        found = _FIELD.fullmatch(line)
        if found is not None:
            if found[1] == "__CURSOR" and fields:
                fields, self._told = {}, False
                self._fields = fields
            return self._field(fields, found[1], found[2])
        if line and line.isupper() and line.replace("_", "A").isalnum():
            self._awaits = line[:FIELDS_MAX]
            return None
        self._fields = None
        return self.feed(line) if line else None

    def _field(self, fields: dict[str, str], name: str, value: str) -> KernelLine | Mark | None:
        if len(fields) < FIELDS_MAX or name in _NEEDED:
            fields.setdefault(name, value)
        if self._told or not all(needed in fields for needed in _NEEDED):
            return None
        self._told = True
        return _entry(fields, "")


_NEEDED: Final = ("MESSAGE", "_TRANSPORT")


def _binary(line: str) -> str:
    """Return a value of the binary form: eight bytes of its length come first.

    Their zeros may have been dropped on the way, and bytes that are no text replaced.
    """
    if "\0" in line[:8]:
        return line[line.rfind("\0", 0, 8) + 1 :]
    for size in (1, 2):
        if line[:size].encode("latin-1", "replace") == len(line[size:].encode()).to_bytes(
            size, "little"
        ):
            return line[size:]
    return line.lstrip("\ufffd") if line.startswith("\ufffd") else line


def read_log(text: str) -> Iterator[KernelLine | Mark]:
    """Read a whole text in any of the formats."""
    reader = LineReader()
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if _RECORD.match(line[:LINE_CHARS_MAX]):
            following: list[str] = []
            for after in lines[number + 1 : number + 1 + FIELDS_MAX]:
                if not after.startswith(" "):
                    break
                following.append(after)
            found = read_record("\n".join([line, *following]))
        else:
            found = reader.feed(line)
        if found is not None:
            yield found
