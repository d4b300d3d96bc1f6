"""Whether a command is to be obeyed, has been obeyed already, or is refused, and why.

Handlers must be idempotent: any command may be told twice, or late.  What was told twice is done
once; what comes late, for a generation that is over here, is refused with a sentence.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from sidecar.api import AgentState, Start, Stop
from sidecar.lifecycle import TransitionTable, Trigger
from worker_shim.messages import RestartMode


class Answer(Enum):
    """A command that is not refused."""

    OBEY = auto()
    DONE = auto()
    """It was obeyed before, or there is nothing left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The command changes nothing."""

    reason: str


Judgement: TypeAlias = Answer | Refused

_STARTED: Final = (AgentState.RUNNING, AgentState.FAULTED, AgentState.COMPLETED)


def judge_start(
    start: Start, state: AgentState, table: TransitionTable, generation: int, stopped: int
) -> Judgement:
    """Judge a start; ``generation`` ran last here, ``stopped`` is the highest one stopped."""
    if start.generation == generation and state in _STARTED:
        return Answer.DONE
    seen = max(generation, stopped)
    if start.generation <= seen:
        return Refused(
            reason=f"start of generation {start.generation} refused: generation {seen} has "
            "already been seen here"
        )
    if (state, Trigger.START_COMMANDED) not in table:
        return Refused(reason=f"start refused: the agent is {state}, a start needs it to be ready")
    return Answer.OBEY


def judge_stop(
    stop: Stop,
    state: AgentState,
    table: TransitionTable,
    generation: int,
    stopped: int,
    *,
    stopping: Stop | None,
    holding: bool,
) -> Judgement:
    """Judge a stop; ``stopping`` is the one under way.

    ``holding`` says that workers of a generation that is stopped live on at their barrier.
    """
    ends_held = holding and stop.restart_mode is not RestartMode.IN_PROCESS
    if stop.generation <= stopped and state is not AgentState.STOPPING and not ends_held:
        return Answer.DONE
    if stop.generation < generation:
        return Refused(
            reason=f"stop of generation {stop.generation} refused: generation {generation} "
            "runs here"
        )
    if (state, Trigger.STOP_COMMANDED) not in table:
        return Refused(reason=f"stop refused: the agent is {state}")
    if stopping is not None and stop.generation <= stopping.generation:
        deeper = stop.restart_mode.severity > stopping.restart_mode.severity
        # The deadline of the first stop stands, unless more than it is to be ended now.
        return Answer.OBEY if deeper else Answer.DONE
    return Answer.OBEY
