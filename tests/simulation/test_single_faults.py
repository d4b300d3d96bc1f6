"""One fault in an otherwise healthy job: the right one is named, and nothing more is done."""

from functools import cache

import pytest

from coordinator.incidents import Outcome
from tests.simulation.faults import HARMLESS, OF_A_NODE, Trouble
from tests.simulation.run import Result, convicted_rightly, simulate
from worker_shim.messages import RestartMode

NODES = 16
SEED = 3
BY_PERSON = Trouble.PERSON_RESTARTS
HARMFUL = tuple(item for item in Trouble if item not in HARMLESS and item is not BY_PERSON)
TWO_RESTARTS = frozenset({Trouble.SPAWN_FAILS})
"""A death brings about the start that then fails."""
KEEPS_ITS_NODE = frozenset(Trouble) - OF_A_NODE - TWO_RESTARTS
"""A node that fails again before the first step is exchanged: the second restart is the job's."""


@cache
def result(trouble: Trouble) -> Result:
    """Return the job that suffers ``trouble`` once."""
    return simulate(SEED, NODES, (trouble,))


@pytest.mark.parametrize("trouble", HARMFUL)
def test_one_fault_is_one_incident_and_the_job_completes(trouble: Trouble) -> None:
    """A fault that costs more than one restart, or leaves the job behind, costs a night."""
    found = result(trouble)
    restarts = 1 + (trouble in TWO_RESTARTS)
    assert (found.outcome, found.generations) == ("completed", 1 + restarts), found.reason
    assert [item.outcome for item in found.incidents][-1] is Outcome.RECOVERED
    assert len(found.incidents) == restarts


@pytest.mark.parametrize("trouble", HARMFUL)
def test_the_one_who_broke_is_named(trouble: Trouble) -> None:
    """Whoever is named is taken out of the rack; a healthy node must never be."""
    found = result(trouble)
    for incident in found.incidents:
        assert incident.finding is not None
        assert convicted_rightly(incident, found.faults), incident.finding.why


@pytest.mark.parametrize("trouble", HARMFUL)
def test_only_a_node_that_broke_loses_its_rank(trouble: Trouble) -> None:
    """Every rank that moves for nothing is a spare that is missing later."""
    found = result(trouble)
    moved = {move.from_node for incident in found.incidents for move in incident.moves}
    assert moved == (set() if trouble in KEEPS_ITS_NODE else {found.faults[0].node})


@pytest.mark.parametrize("trouble", HARMFUL)
def test_with_a_block_the_survivors_of_one_fault_keep_their_processes(trouble: Trouble) -> None:
    """One dead process would cost a thousand healthy ones their imports and their model."""
    found = simulate(SEED, 6, (trouble,), restartable=True)
    assert (found.outcome, found.generations) == ("completed", 2 + (trouble in TWO_RESTARTS))
    decision = found.incidents[0].decision
    assert decision is not None
    assert decision.mode in (RestartMode.IN_PROCESS, RestartMode.LOCAL_PROCESS)


@pytest.mark.parametrize("trouble", sorted(HARMLESS))
def test_what_does_not_touch_the_training_does_not_stop_it(trouble: Trouble) -> None:
    """The tool's own outages must never cost a step."""
    found = result(trouble)
    assert found.faults
    assert (found.outcome, found.generations, found.incidents) == ("completed", 1, ())


def test_a_person_who_asks_for_a_restart_gets_one() -> None:
    """And no rank is blamed for it."""
    found = result(BY_PERSON)
    assert (found.outcome, found.generations) == ("completed", 2)
    assert convicted_rightly(found.incidents[0], found.faults) is None
