"""docs/state-machines.md against the code, row by row."""

import re
from pathlib import Path

import pytest

from coordinator.incidents import IncidentPhase, Outcome
from coordinator.phases import FOLLOWS, JobPhase
from sidecar.barrier import Barrier
from sidecar.events import Orders
from sidecar.lifecycle import IN_PROCESS_RESTART, PROCESS_RESTART
from worker_shim.messages import AtBarrier, LeftBlock, PastBarrier

PAGE = (Path(__file__).parents[2] / "docs" / "state-machines.md").read_text(encoding="utf-8")
TABLES = [
    [
        tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|"))
        for line in block.splitlines()
    ]
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
]
WORKER, AGENT, IN_PROCESS, JOB, MILESTONES, OUTCOMES = (rows[2:] for rows in TABLES)
HALTED, RUNS, NEXT = 1, 1, 2


def rows_of(table) -> set[tuple[str, str, str]]:
    return {(str(before), str(trigger), str(after)) for (before, trigger), after in table.items()}


def test_the_agents_two_tables_stand_on_the_page_as_they_are():
    """A client written after the page would send what is refused."""
    assert set(AGENT) == rows_of(PROCESS_RESTART)
    assert set(AGENT) | set(IN_PROCESS) == rows_of(IN_PROCESS_RESTART)
    assert len(AGENT) + len(IN_PROCESS) == len(IN_PROCESS_RESTART)


def test_the_jobs_phases_follow_one_another_as_the_page_says():
    """Whoever watches the phase would wait for one that cannot come."""
    said = {phase: set(after.split()) - {"nothing"} for phase, after in JOB}
    assert said == {str(phase): {str(it) for it in FOLLOWS[phase]} for phase in JobPhase}


def test_an_incidents_milestones_and_outcomes_are_all_on_the_page_in_their_order():
    """A dashboard reads durations between milestones by their names."""
    assert [name for name, _ in MILESTONES] == [str(it) for it in IncidentPhase]
    assert [name for name, _ in OUTCOMES] == [str(it) for it in Outcome]


def in_state(state: str) -> Barrier:
    """Return a barrier whose worker came to ``state`` by the usual way."""
    barrier = Barrier()
    if state != "unknown":
        barrier.heard(AtBarrier(local_rank=0, epoch=0), 1, 1, RUNS)
    if state in ("started", "inside"):
        barrier.start(RUNS, {0: Orders()})
    if state == "inside":
        barrier.heard(PastBarrier(local_rank=0, epoch=RUNS), 1, 2, RUNS)
    return barrier


def state_of(barrier: Barrier) -> str:
    """Return what a barrier shows of its worker: who neither waits nor is inside was started."""
    if 0 in barrier.waiting:
        return "waiting"
    if 0 not in barrier.restartable:
        return "unknown"
    return "inside" if barrier.halt(HALTED, 1, "asked") else "started"


def said_in(barrier: Barrier, state: str, message: str):
    """Let ``message`` come in; a start is for a generation that the worker has not run."""
    epoch = RUNS if state == "inside" else 0
    match message:
        case "at_rcb_barrier":
            return barrier.heard(AtBarrier(local_rank=0, epoch=epoch), 1, 3, RUNS)
        case "past_rcb_barrier":
            return barrier.heard(PastBarrier(local_rank=0, epoch=RUNS), 1, 3, RUNS)
        case "left_rcb":
            return barrier.heard(LeftBlock(local_rank=0), 1, 3, RUNS)
        case "start":
            return barrier.start(NEXT if state == "inside" else RUNS, {0: Orders()})
        case "stop":
            return barrier.halt(HALTED, 1, "called off")
    raise AssertionError(message)


@pytest.mark.parametrize("row", WORKER, ids="-".join)
def test_a_worker_at_its_barrier_does_what_its_row_says(row):
    """A start that is lost between two states holds a rank, and with it the job, for ever."""
    state, message, after, answer = row
    barrier = in_state(state)
    answers = said_in(barrier, state, message)
    assert [it.reply.TYPE for it in answers] == ([answer] if answer else [])
    assert state_of(barrier) == after


def test_the_page_has_a_row_for_every_state_and_message_of_a_worker():
    """A pair that nobody wrote down is one that nobody thought of."""
    states, messages = {row[0] for row in WORKER}, {row[1] for row in WORKER}
    assert {row[2] for row in WORKER} <= states
    assert len(WORKER) == len({row[:2] for row in WORKER}) == len(states) * len(messages)
