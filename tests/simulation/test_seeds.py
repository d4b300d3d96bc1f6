"""Whole jobs under faults that a seed draws, and under none."""

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.simulation.checkers import NAMES
from tests.simulation.run import Result, simulate
from worker_shim.messages import RestartMode

ROOT = Path(__file__).resolve().parents[2]
NODES = 16
SEEDS = (1, 2, 6, 10, 12)
RESTARTABLE_SEEDS = (3, 8, 11, 17)


@cache
def result(seed: int) -> Result:
    """Return the simulation of ``seed``; a broken invariant raises."""
    return simulate(seed, NODES)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_goes_on_after_its_faults_and_breaks_no_invariant(seed: int) -> None:
    """A recovery that is wrong once in a hundred orders of events ruins a month of training."""
    found = result(seed)
    assert found.faults
    assert found.outcome == "completed", found.reason
    assert found.generations > 1


@pytest.mark.parametrize("seed", RESTARTABLE_SEEDS)
def test_a_job_with_a_restartable_block_breaks_none_either(seed: int) -> None:
    """Survivors and new processes that meet at a barrier have more orders to meet in."""
    found = simulate(seed, 6, restartable=True)
    assert found.outcome == "completed", found.reason
    modes = {item.decision.mode for item in found.incidents if item.decision is not None}
    assert modes & {RestartMode.IN_PROCESS, RestartMode.LOCAL_PROCESS}


def test_every_checker_had_something_to_look_at() -> None:
    """A checker that never looks passes for ever."""
    looked = sum((result(seed).looked for seed in SEEDS), Counter[str]())
    assert set(looked) == set(NAMES)


def test_survivors_are_told_what_changed_of_the_table_of_hosts() -> None:
    """Each simulated node checks its table at every start; here, that the short way is taken."""
    assert any("Update" in result(seed).commands for seed in SEEDS)


def test_a_run_without_faults_takes_no_action() -> None:
    """A tool that restarts a healthy job costs more than the faults it was bought for."""
    found = simulate(1, NODES, ())
    assert (found.outcome, found.generations, found.incidents) == ("completed", 1, ())
    assert found.commands == {"Start", "Shutdown"}


def test_the_same_seed_is_the_same_story_whatever_the_hash_seed() -> None:
    """A core that iterates over a set decides by chance, and no run can be repeated."""

    def story(hash_seed: str) -> str:
        command = [sys.executable, "-m", "tests.simulation.run", "--seeds", "10", "--nodes", "6"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    first = story("1")
    assert "completed" in first
    assert first == story("2")
