"""How long arbitrary input is tried: ``FUZZ_SECONDS`` for all targets together.

`make test` gives them a few seconds, `make fuzz` two minutes; by hand it may be twenty.
"""

import os
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

SECONDS: Final = float(os.environ.get("FUZZ_SECONDS", "10"))
TARGETS: Final = 18
"""Tests in this folder, which share the time."""
ROUND_EXAMPLES: Final = 100
"""Between two looks at the clock."""


def fuzz(inputs: SearchStrategy[T], check: Callable[[T], None], share: float = 1.0) -> None:
    """Call ``check`` with inputs until the time is over; a failure is shrunk and shown.

    ``share`` is how much of an even part of the time this target gets.
    """
    deadline = time.monotonic() + SECONDS / TARGETS * share
    rounds = 0
    while rounds == 0 or time.monotonic() < deadline:
        number = random.randrange(1 << 32)

        @seed(number)
        @settings(
            max_examples=ROUND_EXAMPLES,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def one(value: T) -> None:
            check(value)

        one()
        rounds += 1
