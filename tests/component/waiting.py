"""One way to wait for what real processes bring about: a condition, and a generous deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def await_that(what: str, condition: Callable[[], T], within_s: float = 200.0) -> T:
    """Return the condition's first true value; fail with ``what`` when none comes in time."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.1)
    return found
