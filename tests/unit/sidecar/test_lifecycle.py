"""The two transition tables, pair by pair."""

import pytest

from sidecar.api import AgentState
from sidecar.lifecycle import (
    IN_PROCESS_RESTART,
    PROCESS_RESTART,
    TransitionError,
    Trigger,
    advance,
)

S = AgentState
# Which states the HyperPod elastic agent's tables allow, plus our documented extensions.
PROCESS_MAY = {
    S.INIT: {S.READY, S.SHUTDOWN},
    S.READY: {S.RUNNING, S.SHUTDOWN, S.STOPPING},
    S.RUNNING: {S.COMPLETED, S.FAULTED, S.STOPPING, S.SHUTDOWN},
    S.FAULTED: {S.STOPPING, S.SHUTDOWN},
    S.STOPPING: {S.READY, S.STOPPING, S.SHUTDOWN},
    S.COMPLETED: {S.SHUTDOWN, S.STOPPING},
    S.SHUTDOWN: set(),
}
IN_PROCESS_ADDS = {
    S.INIT: {S.FAULTED},
    S.READY: {S.INIT, S.FAULTED},
    S.RUNNING: {S.INIT},
    S.FAULTED: {S.INIT},
    S.STOPPING: {S.INIT},
}


@pytest.mark.parametrize("state", AgentState)
@pytest.mark.parametrize("trigger", Trigger)
def test_every_pair_either_has_a_row_or_raises(state, trigger):
    """An unlisted pair that passed silently would let two commands fight unnoticed."""
    for table in (PROCESS_RESTART, IN_PROCESS_RESTART):
        if (state, trigger) in table:
            assert advance(table, state, trigger) in AgentState
        else:
            with pytest.raises(TransitionError, match=str(state)):
                advance(table, state, trigger)


@pytest.mark.parametrize("state", AgentState)
def test_the_tables_reach_exactly_the_documented_states(state):
    """A client written for the HyperPod agent relies on these and no other transitions."""
    reached = {after for (before, _), after in PROCESS_RESTART.items() if before is state}
    assert reached == PROCESS_MAY[state]
    reached = {after for (before, _), after in IN_PROCESS_RESTART.items() if before is state}
    assert reached == PROCESS_MAY[state] | IN_PROCESS_ADDS.get(state, set())
