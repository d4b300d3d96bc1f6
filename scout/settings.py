"""What a person may set about SCOUT's checks, each with its unit and default.  Vocabulary only."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from scout.straggler import StragglerThresholds

OVERHEAD_BUDGET: Final = 0.005
"""Of the measured step time that checks may take on average, when no interval is set."""
INHERIT: Final = -1
"""A recipe's interval that follows ``check_interval``."""


class Recipe(StrEnum):
    """What is checked on a schedule of its own."""

    EMBEDDING = "embedding"
    HIDDEN = "hidden"
    """One hidden layer at a time, the next one at the next check."""
    OUTPUT = "output"
    OPTIMIZER = "optimizer"
    STATE = "state"
    """Parameters and optimizer moments, compared directly, some bytes at each check."""


class Referee(StrEnum):
    """Who decides where no majority does."""

    NOBODY = "nobody"
    CPU = "cpu"
    """Every disagreeing peer repeats the computation in double precision on its CPU, and whoever
    is far from its own result is named.  For faults of an accelerator: the CPU is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayHarnessConfig:
    """How often, what and how strictly to check.  The defaults are meant to be left alone.

    ``check_interval`` is in optimizer steps; 0 leaves checks to ``Protection.check``, and None
    derives the interval from ``overhead_budget`` and what steps and checks were measured to take.
    Intervals of single recipes override it, and 0 switches one off; they are multiples of
    ``check_interval`` where it is set.  ``state_bytes_per_check`` bounds what each check compares
    of parameters and moments; ``optimizer_slice_elements`` what an optimizer replay steps.
    Raises `ValueError`.
    """

    check_interval: int | None = None
    embedding_check_interval: int = INHERIT
    hidden_check_interval: int = INHERIT
    output_check_interval: int = INHERIT
    optimizer_check_interval: int = INHERIT
    state_check_interval: int = INHERIT
    overhead_budget: float = OVERHEAD_BUDGET
    first_check: int = 5
    deterministic: bool = True
    compare_parameter_state: bool = True
    compare_stragglers: bool = True
    referee: Referee = Referee.NOBODY
    state_bytes_per_check: int = 64 << 20
    optimizer_slice_elements: int = 65_536
    sweep_on_suspicion: bool = True
    stragglers: StragglerThresholds = field(default_factory=StragglerThresholds)

    def __post_init__(self) -> None:
        for name in ("state_bytes_per_check", "optimizer_slice_elements", "first_check"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.check_interval is not None and self.check_interval < 0:
            raise ValueError(f"check_interval is zero or more, not {self.check_interval}")
        if not 0 < self.overhead_budget <= 1:
            raise ValueError(
                f"overhead_budget is above 0 and at most 1, not {self.overhead_budget}"
            )
        if (rounds := self.stragglers.rounds) < 1:
            raise ValueError(f"stragglers.rounds is at least 1, not {rounds}")
        for recipe in Recipe:
            if self.interval_of(recipe) < INHERIT:
                raise ValueError(f"{recipe}_check_interval is zero or more")

    def interval_of(self, recipe: Recipe) -> int:
        """Return the recipe's own interval, `INHERIT`, or 0 where it is switched off."""
        return int(getattr(self, f"{recipe}_check_interval"))
