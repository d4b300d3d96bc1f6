"""How deep a restart goes: severity, what did not help, and the budgets of the levels."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.journal_format import Restart
from coordinator.restart_depth import OPERATOR_CAUSE, LevelBudgets, depth
from worker_shim.messages import RestartMode, most_severe

SECOND = 1_000_000_000
NOW = 1_800_000_000 * SECOND
MODES = list(RestartMode)


def restart(mode, cause="crash:node-1:exit@10", *, ago_s=1.0, failed=False) -> Restart:
    """Return a restart that was decided ``ago_s`` ago."""
    at_ns = NOW - round(ago_s * SECOND)
    return Restart(at_ns=at_ns, mode=mode, node="node-1", cause=cause, failed=failed)


def wanted(history=(), requested=None, cause="crash:node-1:exit@10", **budgets):
    """Return the depth for a failure of ``cause``."""
    return depth(LevelBudgets(**budgets), history, cause, requested, NOW)


def test_the_first_restart_is_as_mild_as_anybody_allows():
    """Every deeper one costs minutes that nobody asked for."""
    assert wanted().mode is RestartMode.IN_PROCESS
    assert wanted(requested=RestartMode.PROCESS).mode is RestartMode.PROCESS


def test_a_level_that_did_not_cure_the_failure_is_followed_by_a_deeper_one():
    """The same restart for the same failure from the same checkpoint is a loop."""
    history: tuple[Restart, ...] = ()
    seen = []
    for _ in range(4):
        mode = wanted(history).mode
        seen.append(mode)
        history = (*history, restart(mode))
    assert seen == [RestartMode.IN_PROCESS, RestartMode.PROCESS, RestartMode.JOB, RestartMode.JOB]


def test_progress_begins_the_ladder_anew_and_going_back_does_not():
    """A checkpoint that was given up is no progress; a newer one is."""
    history = (restart(RestartMode.IN_PROCESS),)
    assert wanted(history, cause="crash:node-1:exit@20").mode is RestartMode.IN_PROCESS
    assert wanted(history, cause="crash:node-1:exit@5").mode is RestartMode.PROCESS
    assert wanted(history, cause="crash:node-1:exit@start").mode is RestartMode.PROCESS


def test_a_restart_that_broke_before_its_first_step_is_followed_by_a_deeper_one():
    """It did not help, whatever broke it."""
    history = (restart(RestartMode.PROCESS, "crash:node-2:exit@30", failed=True),)
    found = wanted(history)
    assert found.mode is RestartMode.JOB
    assert "broke before its first step" in found.why


def test_job_restarts_follow_too_many_milder_ones_in_the_window_that_slides():
    """Many different small faults in an hour are a sign of something larger."""
    mild = tuple(restart(RestartMode.IN_PROCESS, f"crash:n:{it}@{it}") for it in range(3))
    assert wanted(mild, before_job_max=3).mode is RestartMode.JOB
    assert wanted(mild, before_job_max=4).mode is RestartMode.IN_PROCESS
    old = tuple(restart(RestartMode.PROCESS, f"c:n:{it}@1", ago_s=7200) for it in range(3))
    assert wanted(old, before_job_max=3).mode is RestartMode.IN_PROCESS
    after_a_job = (*mild, restart(RestartMode.JOB, "other:n:x@1"))
    assert wanted(after_a_job, before_job_max=3).mode is RestartMode.IN_PROCESS


def test_when_the_job_restarts_are_used_up_no_level_is_left():
    """Beyond `maxFullJobRestarts` the job must end with that sentence."""
    history = (restart(RestartMode.JOB, "other:n:x@1"),)
    found = wanted(history, RestartMode.JOB, job_max=1)
    assert found.mode is None
    assert "maxFullJobRestarts" in found.why
    assert wanted(history, job_max=1).mode is RestartMode.IN_PROCESS


def test_a_persons_restart_is_deepened_by_no_history():
    """The person on call knows what he asks for."""
    history = (restart(RestartMode.JOB, failed=True),) * 3
    found = wanted(history, RestartMode.PROCESS, OPERATOR_CAUSE, job_max=0)
    assert found.mode is RestartMode.PROCESS


causes = st.sampled_from(["a:n:x@1", "a:n:x@2", "b:n:y@1", OPERATOR_CAUSE])
histories = st.lists(
    st.builds(restart, st.sampled_from(MODES), causes, failed=st.booleans()), max_size=12
)


@given(histories, st.sampled_from([None, *MODES]), causes)
def test_no_request_is_ever_answered_with_less(history, requested, cause):
    """The most severe request must win: milder would leave broken what it was asked for."""
    found = wanted(tuple(history), requested, cause)
    assert found.mode is not None
    assert most_severe(found.mode, requested) is found.mode


@given(histories, st.integers(0, 3), causes)
def test_job_restarts_never_exceed_their_budget(history, job_max, cause):
    """Each costs minutes of every device."""
    used = sum(it.mode is RestartMode.JOB and it.cause != OPERATOR_CAUSE for it in history)
    found = wanted(tuple(history), None, cause, job_max=job_max)
    assert found.mode is not RestartMode.JOB or used < job_max


@given(st.lists(st.sampled_from(MODES), min_size=1, max_size=6))
def test_negotiation_takes_the_most_severe_whatever_the_order(modes):
    """Two ranks that ask for different modes must not depend on who is heard first."""
    assert most_severe(*modes) is max(modes, key=lambda mode: mode.severity)
    assert most_severe(*modes) is most_severe(*reversed(modes))
    assert most_severe(None, *modes, None) is most_severe(*modes)
