"""How much arbitrary input is tried.

`make test` tries the same inputs each time, so that it judges the code and not the dice;
`make fuzz` rolls them: ``FUZZ_SECONDS`` for all targets together, two minutes or, by hand, twenty.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

SECONDS: Final = float(os.environ.get("FUZZ_SECONDS", "0"))
"""0 where each target tries ``FIXED_ROUNDS`` with fixed seeds."""
FIXED_ROUNDS: Final = 3
TARGETS: Final = 18
"""Tests in this folder, which share the time."""
ROUND_EXAMPLES: Final = 100
"""Between two looks at the clock."""


def fuzz(
    inputs: SearchStrategy[T],
    check: Callable[[T], None],
    share: float = 1.0,
    examples: Sequence[T] = (),
) -> None:
    """Call ``check`` with inputs until they are all tried; a failure is shrunk and shown.

    ``share`` is how much of an even part of the time this target gets, where there is one.
    ``examples`` were found before, and are tried first each time.
    """
    deadline = time.monotonic() + SECONDS / TARGETS * share
    rounds = 0
    while rounds < FIXED_ROUNDS or time.monotonic() < deadline:
        number = random.randrange(1 << 32) if SECONDS else rounds

        @seed(number)
        @settings(
            max_examples=ROUND_EXAMPLES,
            deadline=None,
            database=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs)
        def one(value: T) -> None:
            check(value)

        for found in examples:
            one = example(found)(one)
        one()
        rounds += 1
