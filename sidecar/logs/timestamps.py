"""When a line was printed, as the line itself says.

Decides which digits of a line are its time, and nothing about zones: every instant is counted as
if its clock were UTC, because only differences within one log are asked for.  Of several times in
a line the first one counts.
"""

import re
from datetime import UTC, datetime
from typing import Final

SEARCHED_BYTES: Final = 96
"""A line's own time stands near its start; what stands further right is about something else."""
DAY_S: Final = 86_400.0

_DATE: Final = re.compile(
    rb"(?P<year>20\d\d|19\d\d)[-/]?(?P<month>[01]\d)[-/]?(?P<day>[0-3]\d)[T ]"
    rb"(?P<time>\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)"
)
_GLOG: Final = re.compile(
    rb"\b[DIWEF](?P<month>[01]?\d)(?P<day>[0-3]\d) (?P<time>\d\d:\d\d:\d\d(?:\.\d{1,9})?)"
)
_SYSLOG: Final = re.compile(
    rb"\b(?P<name>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<day>\d{1,2}) "
    rb"(?P<time>\d\d:\d\d:\d\d(?:\.\d{1,9})?)"
)
_DATED: Final = (_DATE, _GLOG, _SYSLOG)
_CLOCK: Final = re.compile(rb"(?:^|[\[ (|])(?P<time>[0-2]\d:[0-5]\d:[0-5]\d(?:[.,]\d{1,9})?)")
_MONTHS: Final = (
    b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun",
    b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec",
)  # fmt: skip


class Clock:
    """The times of one log.  What lines leave out, a year or a day, is taken from those before."""

    __slots__ = ("_day_s", "_last_s", "_year")

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._year = 2000  # a leap year, so that every date of a log without years exists
        self._day_s = 0.0

    def read(self, line: bytes) -> float | None:
        """Return the time of ``line`` in seconds since 1970, or None when it carries none."""
        head = line[:SEARCHED_BYTES]
        found = next((match for form in _DATED if (match := form.search(head))), None)
        at = self._of_day(head) if found is None else self._dated(found)
        if at is not None:
            self._day_s = at - at % DAY_S
            self._last_s = at
        return at

    def _dated(self, found: re.Match[bytes]) -> float | None:
        parts = found.groupdict()
        named = parts.get("name")
        month = int(parts["month"]) if named is None else _MONTHS.index(named) + 1
        year = int(parts["year"]) if "year" in parts else self._year
        at = _seconds(year, month, int(parts["day"]), parts["time"])
        if at is not None:
            self._year = year
        return at

    def _of_day(self, head: bytes) -> float | None:
        found = _CLOCK.search(head)
        if found is None:
            return None
        within = _seconds_of_day(found["time"])
        if within is None:
            return None
        at = self._day_s + within
        if self._last_s is not None and at < self._last_s - DAY_S / 2:
            at += DAY_S  # past midnight
        return at


def _seconds(year: int, month: int, day: int, time: bytes) -> float | None:
    within = _seconds_of_day(time)
    try:
        midnight = datetime(year, month, day, tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return None if within is None else midnight + within


def _seconds_of_day(time: bytes) -> float | None:
    hours, minutes, seconds = time.replace(b",", b".").split(b":")
    at = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    return at if at < DAY_S else None
