"""Numbers as training frameworks print them, and the unit that stands beside them.

Decides what a captured text is worth: ``1,234.5``, ``'2.31'``, ``1.049B``, ``nan.0``, and that
``10.13s/it`` and ``2.4it/s`` are the same quantity.  It knows no rule.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

METRICS: Final = ("loss", "step_time", "throughput", "grad_norm")
"""Groups of these names are metrics.  ``step_time`` is in seconds, ``throughput`` as printed."""
STEP: Final = "step"
STEP_DIGITS_MAX: Final = 18
"""A step beyond that is no step, and would not fit in 64 bits."""
BEFORE_BYTES: Final = 12
AFTER_BYTES: Final = 9
"""How far from a number its unit may stand: "(ms): " before it, " seconds" after it."""
NUMBER_CHARS_MAX: Final = 64
"""A longer text is no number that anyone printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """A metric that a line held.  ``step`` is that of the line, or the last one before it."""

    metric: str
    value: float
    step: int | None


_NOT_FINITE: Final = re.compile(
    r"(?P<sign>[-+]?)(?:1\.#)?(?:(?P<nan>s?q?nan|ind)|inf(?:inity)?)(?:\.0*|\([a-z]+\))?0*",
    re.IGNORECASE,
)
_SUFFIXED: Final = re.compile(r"([-+]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?) ?([KMBGTPE])", re.ASCII)
_MAGNITUDES: Final[Mapping[str, int]] = MappingProxyType(
    {"K": 3, "M": 6, "B": 9, "G": 9, "T": 12, "P": 15, "E": 18}
)
_DECIMAL_COMMA: Final = re.compile(
    r"[-+]?(?:0,\d+|\d{1,3}(?:\.\d{3})+,\d+|\d+,(?:\d{1,2}|\d{4,}))(?:[eE][-+]?\d+)?", re.ASCII
)
"""A comma that parts no thousands: ``0,0001``, ``1.234,5``, ``2,34``."""
_STUCK: Final = " \t,;:|()[]{}<>\"'%="


def number(text: str) -> float | None:
    """Return the number a group captured, or None.  What sticks to it in prose is dropped."""
    bare = text.strip(_STUCK)
    if bare.startswith("tensor("):
        bare = bare.removeprefix("tensor(").split(",")[0].strip(_STUCK)
    if not bare or len(bare) > NUMBER_CHARS_MAX or "_" in bare or not bare.isascii():
        return None
    try:
        return float(_with_point(bare) if "," in bare else bare)
    except ValueError:
        pass
    # Windows writes -nan(ind); "(" at the end was taken for prose above.
    odd = _NOT_FINITE.fullmatch(bare) or _NOT_FINITE.fullmatch(f"{bare})")
    if odd is not None:
        if odd["nan"]:
            return math.nan
        return -math.inf if odd["sign"] == "-" else math.inf
    suffixed = _SUFFIXED.fullmatch(bare)
    if suffixed is not None:
        digits, magnitude = suffixed[1].replace(",", ""), _MAGNITUDES[suffixed[2]]
        # Written behind the digits, a magnitude loses none of them.
        exact = "e" not in digits.lower()
        return float(f"{digits}e{magnitude}") if exact else float(digits) * 10.0**magnitude
    return None


def _with_point(text: str) -> str:
    """Return a number with commas as Python reads it; between threes of digits they say nothing."""
    if _DECIMAL_COMMA.fullmatch(text):
        return text.replace(".", "").replace(",", ".")
    return text.replace(",", "")


def plain_number(data: bytes) -> float | None:
    """Return `number` of bytes; most are a float as they stand."""
    try:
        value = float(data)
    except ValueError:
        return number(data.decode(errors="replace"))
    return None if b"_" in data else value


def step_number(data: bytes) -> int | None:
    """Return the step that a group captured, or None."""
    if not data.isdigit():
        data = data.replace(b",", b"").strip()
        if not data.isdigit():
            return None
    return int(data) if len(data) <= STEP_DIGITS_MAX else None


# --- units ----------------------------------------------------------------------------------

_SPLIT: Final = re.compile(
    rb"(?P<number>[^a-zA-Z/]*(?:[eE][-+]?\d+)?[^a-zA-Z/]*)(?P<unit>[a-zA-Z/_]+)\W*"
)
_AFTER: Final = re.compile(rb" ?(?P<unit>[a-zA-Z]+(?:/[a-zA-Z]+)?)(?![\w=:/])")
_BEFORE: Final = re.compile(rb"[(\[_ ](?P<unit>ms|us|s|sec|min)[)\]]?[\"']?\s*[:=]?\s*$")

_SECONDS: Final[Mapping[str, float]] = MappingProxyType(
    {
        **dict.fromkeys(("ns", "nanoseconds"), 1e-9),
        **dict.fromkeys(("us", "microseconds"), 1e-6),
        **dict.fromkeys(("ms", "msec", "millis", "milliseconds"), 1e-3),
        **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
        **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
        **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    }
)
_PER_STEP: Final = ("it", "iter", "step", "steps", "batch", "i")


def measured(metric: str, data: bytes, start: int, end: int) -> float | None:
    """Return what ``data[start:end]`` says of ``metric``, in its own unit, or None for no number.

    The unit is looked for in the text itself, right after it, and right before it.
    """
    text = data[start:end]
    if metric not in {"step_time", "throughput"}:
        return plain_number(text)
    value = plain_number(text)
    unit = b""
    if value is None:
        apart = _SPLIT.fullmatch(text.strip(_STUCK.encode()))
        if apart is None:
            return None
        value, unit = plain_number(apart["number"]), apart["unit"]
        if value is None:
            return None
    if unit:
        return _converted(metric, value, unit)
    beside = _unit_beside(data[max(0, start - BEFORE_BYTES) : start], data[end : end + AFTER_BYTES])
    return _converted(metric, value, beside) if beside else value


def measured_all(metric: str, data: bytes, edges: Iterable[tuple[int, int]]) -> list[float]:
    """Return `measured` of each text that the edges hold, or nothing if one is no plain number.

    A framework prints the same around the same number, so a unit is looked for once.
    """
    values: list[float] = []
    plain: dict[tuple[bytes, bytes], bool] = {}
    for start, end in edges:
        text = data[start:end]
        around = data[max(0, start - BEFORE_BYTES) : start], data[end : end + AFTER_BYTES]
        try:
            value = float(text)
            if plain[around] and b"_" not in text:
                values.append(value)
                continue
        except KeyError:
            plain[around] = not _unit_beside(*around)
        except ValueError:
            return []
        converted = measured(metric, data, start, end)
        if converted is None:
            return []
        values.append(converted)
    return values


@functools.lru_cache(maxsize=4096)
def _unit_beside(before: bytes, after: bytes) -> bytes:
    """Return the unit between or beside which a number stands; a framework prints it alike."""
    found = _AFTER.match(after)
    if found is not None and _is_unit(found["unit"]):
        return found["unit"]
    found = _BEFORE.search(before)
    return b"" if found is None else found["unit"]


def _is_unit(unit: bytes) -> bool:
    name, _, per = unit.decode().lower().partition("/")
    return name in _SECONDS or (name in _PER_STEP and per in _SECONDS)


def _converted(metric: str, value: float, unit: bytes) -> float:
    name, _, per = unit.decode(errors="replace").lower().partition("/")
    is_rate = name in _PER_STEP and per in _SECONDS
    if metric == "step_time":
        if is_rate:
            return _SECONDS[per] / value if value else math.inf
        return value * _SECONDS.get(name, 1.0)
    if name in _SECONDS and per in _PER_STEP:
        return 1.0 / (value * _SECONDS[name]) if value else math.inf
    return value / _SECONDS[per] if is_rate else value
