"""Whole numbers in foreign text."""

import pytest

from sidecar.whole_numbers import whole_number


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1)])
def test_digits_are_a_number(text, value):
    """Whatever it is used for, it must be what was written."""
    assert whole_number(text) == value


@pytest.mark.parametrize(
    "text", ["", " 1", "1 ", "+1", "-1", "1.0", "1_0", "\u00b2", "\u0664", "9" * 19, "1" * 5000]
)
def test_everything_else_is_none_and_never_raises(text):
    """Python's own int() takes some of these, and raises for thousands of digits."""
    assert whole_number(text) is None
