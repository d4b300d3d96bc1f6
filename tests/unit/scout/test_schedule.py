"""When checks are due, what they may cost, and how long a fault may stay unseen."""

import pytest

from scout.schedule import INTERVAL_MAX, Coverage, Schedule
from scout.settings import Recipe, ReplayHarnessConfig

EVERYTHING = tuple(Recipe)
COVERAGE = Coverage(hidden_layers=12, state_bytes=1000, state_bytes_per_check=300)


def test_a_set_interval_is_kept_and_recipes_may_have_their_own():
    """A recipe that was switched off for being dear runs all the same."""
    config = ReplayHarnessConfig(
        check_interval=10, embedding_check_interval=0, optimizer_check_interval=30
    )
    schedule = Schedule(config=config, recipes=EVERYTHING)
    assert schedule.due(9) == ()
    assert schedule.due(11) == (Recipe.HIDDEN, Recipe.OUTPUT, Recipe.STATE)
    assert schedule.due(10) == (Recipe.HIDDEN, Recipe.OUTPUT, Recipe.STATE)
    schedule.checked(10, check_ms=5, step_ms=5)
    assert schedule.due(10) == ()
    assert Recipe.OPTIMIZER in schedule.due(30)
    assert schedule.worst_case_steps(COVERAGE) == 120


def test_the_budget_sets_the_interval():
    """Checks take a tenth of the training time, or so little that nothing is ever seen."""
    schedule = Schedule(config=ReplayHarnessConfig(overhead_budget=0.01), recipes=EVERYTHING)
    assert schedule.due(5) == EVERYTHING
    schedule.checked(5, check_ms=20, step_ms=100)
    assert schedule.interval == 20
    assert schedule.due(25) == EVERYTHING
    schedule.checked(25, check_ms=1e9, step_ms=0)
    assert schedule.interval == INTERVAL_MAX


def test_a_resumed_run_keeps_the_steps_that_checkpoints_have():
    """Checks fall between checkpoints, and none is ever certified again."""
    schedule = Schedule(
        config=ReplayHarnessConfig(check_interval=5), recipes=EVERYTHING, completed=12
    )
    assert next(step for step in range(13, 20) if schedule.due(step)) == 15
    schedule.checked(15, check_ms=1, step_ms=1)
    assert next(step for step in range(16, 30) if schedule.due(step)) == 20


def test_manual_checks_are_never_due():
    """Zero means every step to whoever divides by it."""
    schedule = Schedule(config=ReplayHarnessConfig(check_interval=0), recipes=EVERYTHING)
    assert not any(schedule.due(step) for step in range(1, 100))
    schedule.checked(3, check_ms=1, step_ms=1)
    assert not any(schedule.due(step) for step in range(1, 100))


@pytest.mark.parametrize(
    "wrong",
    [
        {"check_interval": -1},
        {"overhead_budget": 0},
        {"hidden_check_interval": -2},
        {"state_bytes_per_check": 0},
    ],
)
def test_impossible_settings_are_refused(wrong):
    """A typing error switches the protection off in silence."""
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_check")[0]):
        ReplayHarnessConfig(**wrong)
