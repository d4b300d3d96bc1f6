"""The agent's lifecycle: which state may follow which, and what triggers it.

Everything that decides a transition stands in the two tables.  They follow the HyperPod elastic
agent's process-restart and in-process-restart machines, extended where those have gaps: a stop is
legal before a start, a stop while stopping is legal (it may be forced), and shutdown is legal from
everywhere.  The tables do not know whether a daemon, a simulator or a test drives them.
"""

from collections.abc import Mapping
from enum import StrEnum, auto
from types import MappingProxyType
from typing import Final, TypeAlias

from sidecar.api import AgentState


class Trigger(StrEnum):
    """What moves the agent from one state to another."""

    PREPARED = auto()
    """The agent can take a start."""
    START_COMMANDED = auto()
    FAULT_DETECTED = auto()
    STOP_COMMANDED = auto()
    WORKERS_STOPPED = auto()
    WORKERS_COMPLETED = auto()
    SHUTDOWN_COMMANDED = auto()
    BARRIER_MISSED = auto()
    """In-process restart only: fall back to a process restart."""


class TransitionError(Exception):
    """A trigger arrived in a state that has no row for it."""

    def __init__(self, state: AgentState, trigger: Trigger) -> None:
        super().__init__(f"{trigger} is not allowed in state {state}")
        self.state = state
        self.trigger = trigger


TransitionTable: TypeAlias = Mapping[tuple[AgentState, Trigger], AgentState]

_S, _T = AgentState, Trigger

_SHUTDOWN: Final[TransitionTable] = {
    (state, _T.SHUTDOWN_COMMANDED): _S.SHUTDOWN for state in AgentState if state is not _S.SHUTDOWN
}

PROCESS_RESTART: Final[TransitionTable] = MappingProxyType(
    {
        **_SHUTDOWN,
        (_S.INIT, _T.PREPARED): _S.READY,
        (_S.READY, _T.START_COMMANDED): _S.RUNNING,
        (_S.READY, _T.STOP_COMMANDED): _S.STOPPING,
        (_S.RUNNING, _T.FAULT_DETECTED): _S.FAULTED,
        (_S.RUNNING, _T.STOP_COMMANDED): _S.STOPPING,
        (_S.RUNNING, _T.WORKERS_COMPLETED): _S.COMPLETED,
        (_S.FAULTED, _T.STOP_COMMANDED): _S.STOPPING,
        (_S.COMPLETED, _T.STOP_COMMANDED): _S.STOPPING,
        (_S.STOPPING, _T.STOP_COMMANDED): _S.STOPPING,
        (_S.STOPPING, _T.WORKERS_STOPPED): _S.READY,
    }
)

# In-process restart keeps the processes alive, so a missed barrier leads back to INIT.
IN_PROCESS_RESTART: Final[TransitionTable] = MappingProxyType(
    {
        **PROCESS_RESTART,
        (_S.INIT, _T.FAULT_DETECTED): _S.FAULTED,
        (_S.READY, _T.FAULT_DETECTED): _S.FAULTED,
        **{
            (state, _T.BARRIER_MISSED): _S.INIT
            for state in (_S.READY, _S.RUNNING, _S.FAULTED, _S.STOPPING)
        },
    }
)


def advance(table: TransitionTable, state: AgentState, trigger: Trigger) -> AgentState:
    """Return the state after ``trigger``, or raise `TransitionError`."""
    try:
        return table[state, trigger]
    except KeyError:
        raise TransitionError(state, trigger) from None
