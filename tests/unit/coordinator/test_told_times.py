from coordinator.told_times import CONFIRMED, REJECTED, STEPS_MAX, UNCONFIRMED, VERIFIED, ToldTimes
from sidecar.api import (
    AgentState,
    CheckpointConfirmation,
    CheckpointPointer,
    RankStatus,
    StatusReport,
)
from worker_shim.messages import ScoutStatus

SECOND = 10**9


def status(
    *, generation: int = 1, steps: tuple[int, ...] = (), scout: ScoutStatus | None = None
) -> StatusReport:
    return StatusReport(
        node="n",
        incarnation="i",
        state=AgentState.RUNNING,
        generation=generation,
        stopped_generation=0,
        topology_version=1,
        rendezvous_port=1,
        checkpoints=tuple(
            CheckpointConfirmation(prefix="model", step=step, ranks=(0,), paths=("/c",))
            for step in steps
        ),
        ranks=(RankStatus(rank=0, local_rank=0, pid=1, scout=scout),),
    )


def found(outcome: str, step: int, **more: tuple[int, ...]) -> ScoutStatus:
    return ScoutStatus(local_rank=0, step=step, outcome=outcome, **more)


def whole(*steps: int) -> tuple[CheckpointPointer, ...]:
    return tuple(CheckpointPointer(prefix="model", step=step, path="/c") for step in steps)


def test_a_checkpoint_takes_from_its_first_rank_to_its_last() -> None:
    """One slow disk holds every save up, and the mean over ranks hides it."""
    told = ToldTimes()
    told.heard(status(steps=(10,)), (), 100 * SECOND)
    told.heard(status(steps=(10,)), (), 103 * SECOND)
    assert told.confirming.count == 0
    told.heard(status(steps=(10,)), whole(10), 107 * SECOND)
    assert (told.confirming.count, told.confirming.sum_s) == (1, 7)
    assert told.transitions == {(UNCONFIRMED, CONFIRMED): 1}
    assert told.reached_ns == {("model", CONFIRMED): 107 * SECOND}


def test_a_step_that_is_saved_again_after_a_restart_begins_anew() -> None:
    """The half of it that was saved before the fault would make it last an hour."""
    told = ToldTimes()
    told.heard(status(steps=(20,)), whole(10), 100 * SECOND)
    told.heard(status(generation=2, steps=(20,)), whole(10), 3700 * SECOND)
    told.heard(status(generation=1, steps=(30,)), whole(10), 3701 * SECOND)
    told.heard(status(generation=2, steps=(20,)), whole(10, 20), 3702 * SECOND)
    told.heard(status(generation=2, steps=(30,)), whole(10, 20), 3800 * SECOND)
    told.heard(status(generation=2, steps=(30,)), whole(10, 20, 30), 3801 * SECOND)
    assert (told.confirming.count, told.confirming.sum_s) == (3, 0 + 2 + 1)


def test_corruption_that_stopped_the_job_at_once_is_still_counted() -> None:
    """Its ranks are gone before the next scrape; the alert would never have fired."""
    told = ToldTimes()
    told.heard(status(scout=found("corrupt", 50, rejected=(50,))), (), SECOND)
    told.heard(status(scout=None), (), 2 * SECOND)
    assert told.checks == {"corrupt": 1}
    assert told.checked_ns == SECOND


def test_a_check_counts_once_however_many_ranks_tell_it() -> None:
    """A job of a thousand ranks would seem to compare a thousand times as often."""
    told = ToldTimes()
    for _ in range(5):
        told.heard(status(scout=found("healthy", 50)), (), SECOND)
    told.heard(status(scout=found("not_run", 60)), (), 2 * SECOND)
    told.heard(status(scout=found("out of thin air", 70)), (), 3 * SECOND)
    assert told.checks == {"healthy": 1, "not_run": 1}
    assert told.checked_ns == SECOND


def test_trust_goes_up_once_and_never_back_up_from_rejected() -> None:
    """A step that was found bad must not be counted as good again."""
    told = ToldTimes()
    told.heard(status(), whole(10, 20), SECOND)
    told.heard(status(scout=found("healthy", 20, verified=(10, 20))), told._whole, 2 * SECOND)
    told.heard(status(scout=found("corrupt", 21, rejected=(20,))), told._whole, 3 * SECOND)
    told.heard(status(scout=found("healthy", 22, verified=(20,))), told._whole, 4 * SECOND)
    assert told.transitions == {
        (UNCONFIRMED, CONFIRMED): 2,
        (CONFIRMED, VERIFIED): 2,
        (VERIFIED, REJECTED): 1,
    }
    assert told.reached_ns["model", REJECTED] == 3 * SECOND
    assert told.reached_ns["model", VERIFIED] == 2 * SECOND


def test_what_an_earlier_coordinator_knew_is_not_counted_again() -> None:
    """After its restart a dashboard would show a burst of checkpoints that nobody wrote."""
    told, known = ToldTimes(), whole(10, 20)
    told.restored(known, (20,))
    told.heard(status(scout=found("healthy", 30, verified=(20,))), known, SECOND)
    assert told.transitions == {}
    assert told.reached_ns == {}


def test_it_remembers_no_more_than_it_needs() -> None:
    """A job of months would fill the coordinator's memory."""
    told = ToldTimes()
    for step in range(3 * STEPS_MAX):
        told.heard(status(steps=(step,), scout=found("healthy", step)), (), step)
    assert len(told._begun) == len(told._counted) == STEPS_MAX
    assert told.checks == {"healthy": 3 * STEPS_MAX}
    apart = told.copy()
    told.heard(status(scout=found("corrupt", 10**6)), (), 0)
    assert apart.checks == {"healthy": 3 * STEPS_MAX}
