"""When each recipe is due, in optimizer steps, and how long a fault may stay unseen.

The same numbers on every rank give the same schedule: what was measured is agreed upon before it
comes in here.  Knows no clock and no tensor.
"""

import math
from dataclasses import dataclass, field
from typing import Final

from scout.settings import INHERIT, Recipe, ReplayHarnessConfig

INTERVAL_MAX: Final = 10_000
"""However dear a check: one in so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What one check covers of a whole: hidden layers one at a time, state some bytes at a time."""

    hidden_layers: int
    state_bytes: int
    state_bytes_per_check: int

    @property
    def state_checks(self) -> int:
        """How many checks compare every byte of parameters and moments once."""
        return max(1, math.ceil(self.state_bytes / self.state_bytes_per_check))


@dataclass(slots=True)
class Schedule:
    """The next steps at which something is due."""

    config: ReplayHarnessConfig
    recipes: tuple[Recipe, ...]
    """Those that the model has, in the order in which they run."""
    completed: int = 0
    """Steps that came before this schedule."""
    checkpoint_every: int = 0
    """Every so many steps a checkpoint is saved, which is checked first; 0 for none."""
    interval: int = 0
    """Steps between checks: set, or derived from the budget once it is measured; 0 is manual."""
    _next: int = field(default=0)

    def __post_init__(self) -> None:
        self.interval = self.config.check_interval or 0
        if self.is_measured:
            self._next = self.completed + self.config.first_check
        elif self.interval:
            self._next = (self.completed // self.interval + 1) * self.interval

    @property
    def is_measured(self) -> bool:
        """Whether the interval follows from the overhead budget."""
        return self.config.check_interval is None

    def due(self, step: int) -> tuple[Recipe, ...]:
        """Return the recipes due at ``step``, counted from 1."""
        if self.checkpoint_every and step % self.checkpoint_every == 0:
            return tuple(it for it in self.recipes if self.config.interval_of(it) != 0)
        found = []
        for recipe in self.recipes:
            own = self.config.interval_of(recipe)
            if own == 0:
                continue
            # A step that was missed, because nothing was known of the model yet, is made up for.
            is_due = 0 < self._next <= step if own == INHERIT else step % own == 0
            if is_due:
                found.append(recipe)
        return tuple(found)

    def checked(self, step: int, *, check_ms: float, step_ms: float) -> None:
        """A check of ``step`` is over; times are those that all ranks agreed upon."""
        if self.is_measured:
            budget = self.config.overhead_budget * max(step_ms, 1e-6)
            self.interval = min(INTERVAL_MAX, max(1, math.ceil(check_ms / budget)))
            self._next = step + self.interval
        elif self.interval:
            self._next = (step // self.interval + 1) * self.interval

    def worst_case_steps(self, coverage: Coverage) -> int:
        """Return in how many steps every part has been looked at once; 0 for a manual schedule."""
        bounds = [0]
        for recipe in self.recipes:
            own = self.config.interval_of(recipe)
            interval = self.interval if own == INHERIT else own
            if recipe is Recipe.HIDDEN:
                bounds.append(interval * max(1, coverage.hidden_layers))
            elif recipe is Recipe.STATE:
                bounds.append(interval * coverage.state_checks)
            else:
                bounds.append(interval)
        return max(bounds)
