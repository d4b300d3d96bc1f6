"""The job spec's ``scout`` section: whether and how often ranks compare one another."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from scout.settings import OVERHEAD_BUDGET


class ScoutPolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Whether and how often ranks compare one another, without a line in the script.

    ``checkInterval`` is in optimizer steps; left out, it follows from ``overheadBudget``, the part
    of the step time that checks may take on average.  ``stateBytesPerCheck`` bounds what of
    parameters and moments one check compares.
    """

    enabled: bool = False
    check_interval: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    overhead_budget: Annotated[float, Meta(gt=0, le=1)] = OVERHEAD_BUDGET
    state_bytes_per_check: Annotated[int, Meta(ge=1)] = 64 << 20

    def config(self) -> dict[str, Any] | None:
        """Return the fields of `scout.settings.ReplayHarnessConfig`, None when not enabled."""
        if not self.enabled:
            return None
        return {
            "check_interval": self.check_interval,
            "overhead_budget": self.overhead_budget,
            "state_bytes_per_check": self.state_bytes_per_check,
        }
