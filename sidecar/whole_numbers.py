"""Reads a whole number out of text that somebody else wrote.

Decides what is one: ASCII digits, and no more of them than a 64-bit number has.  Python itself
takes digits of every script, and raises for thousands of them.
"""

from typing import Final

DIGITS_MAX: Final = 18
"""Any number of so many digits fits into 63 bits."""


def whole_number(text: str) -> int | None:
    """Return the number that ``text`` is, or None where it is none."""
    if len(text) > DIGITS_MAX or not text.isascii() or not text.isdigit():
        return None
    return int(text)
