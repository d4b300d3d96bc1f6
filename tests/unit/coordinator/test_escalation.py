from hypothesis import given
from hypothesis import strategies as st

from coordinator.escalation import Back, RestartPolicy, cause_of, decide
from coordinator.incidents import Culprit, Finding, NodeFault
from coordinator.journal_format import Restart
from coordinator.restart_depth import OPERATOR_CAUSE, Depth, depth
from sidecar.api import ExitCause, FaultKind, FaultReport, Scope
from worker_shim.messages import RestartMode

SECOND = 1_000_000_000
NOW = 1_800_000_000 * SECOND


def a_finding(kind=FaultKind.CRASH, node="node-1", reason="exit", why="rank 1 died") -> Finding:
    """Return an attributed finding."""
    culprit = Culprit(kind=kind, node=node, rank=1, local_rank=0, gpu=None, reason=reason)
    return Finding(outcome="attributed", basis="direct", why=why, culprit=culprit)


def a_fault(kind=FaultKind.CRASH, node="node-1", **report) -> NodeFault:
    """Return a node's report."""
    fields = {"fault_id": 1, "scope": Scope.RANK, "reason": "exit", "message": "", "age_ns": 0}
    return NodeFault(node=node, at_ns=NOW, report=FaultReport(kind=kind, **(fields | report)))


def restarts(count, cause="crash:node-1:exit@10", at_ns=NOW - SECOND) -> tuple[Restart, ...]:
    """Return ``count`` equal restarts."""
    one = Restart(at_ns=at_ns, mode=RestartMode.PROCESS, node="node-1", cause=cause)
    return (one,) * count


def decided(finding, history=(), requested=None, policy=None, **more):
    """Decide with the usual circumstances."""
    given_ = {"faults": (), "checkpoint_step": 10, "stepped": True} | more
    wanted = Depth(mode=requested or RestartMode.IN_PROCESS, why=requested or "")
    given_ = {"back": Back(world_size=4)} | given_
    return decide(policy or RestartPolicy(), history, finding, wanted, NOW, **given_)


def test_a_crash_is_answered_with_a_process_restart():
    """Doing less leaves dead ranks behind; doing more wastes minutes."""
    decision = decided(a_finding())
    assert decision.mode is RestartMode.PROCESS
    assert decision.exclude_nodes == ()
    assert decision.reason == "process restart: rank 1 died"


def test_hardware_faults_exclude_every_node_they_were_seen_on():
    """A node with a broken GPU that gets its ranks back breaks the next run in seconds."""
    faults = (
        a_fault(FaultKind.GPU_FATAL),
        a_fault(FaultKind.GPU_FATAL, "node-3"),
        a_fault(node="node-2"),
    )
    decision = decided(a_finding(FaultKind.GPU_FATAL), faults=faults)
    assert decision.mode is RestartMode.PROCESS
    assert decision.exclude_nodes == ("node-1", "node-3")
    assert "node-1, node-3" in decision.reason


def test_a_lost_node_that_comes_back_may_be_used_again():
    """A rebooted switch that excluded its nodes for good would leave a job without any."""
    decision = decided(a_finding(FaultKind.NODE_LOST), faults=(a_fault(FaultKind.NODE_LOST),))
    assert decision.mode is RestartMode.PROCESS
    assert decision.exclude_nodes == ()


def test_the_budget_is_a_sliding_window():
    """A fixed window lets twice the budget through at its edge; no window punishes old faults."""
    policy = RestartPolicy(retries_max=3, window_s=100)
    old = restarts(3, "a@1", NOW - 100 * SECOND)
    assert decided(a_finding(), old, policy=policy).mode is RestartMode.PROCESS
    recent = restarts(3, "a@1", NOW - 99 * SECOND)
    refused = decided(a_finding(), recent, policy=policy)
    assert refused.mode is None
    assert "3 restarts in the last 100 s" in refused.reason
    assert "jobMaxRetryCount" in refused.reason


def test_a_budget_of_zero_allows_no_restart():
    """A person who forbids restarts wants to look at the first failure."""
    refused = decided(a_finding(), policy=RestartPolicy(retries_max=0))
    assert refused.mode is None
    assert refused.reason == "no restart is allowed (jobMaxRetryCount is 0): rank 1 died"


def test_a_clock_set_back_does_not_refill_the_budget():
    """Time synchronisation must not turn a bounded crash loop into an endless one."""
    policy = RestartPolicy(retries_max=3, window_s=100)
    future = restarts(3, "a@1", NOW + 500 * SECOND)
    assert decided(a_finding(), future, policy=policy).mode is None


def test_the_third_identical_failure_from_one_checkpoint_ends_the_job():
    """A deterministic failure repeats until the budget is gone and hides behind 'flaky'."""
    cause = cause_of(a_finding(), 10)
    assert decided(a_finding(), restarts(1, cause)).mode is RestartMode.PROCESS
    refused = decided(a_finding(), restarts(2, cause))
    assert refused.mode is None
    assert refused.reason.startswith("the same failure from the same checkpoint three times")


def test_a_new_checkpoint_or_another_cause_is_another_failure():
    """Two different accidents on one node must not be taken for a loop."""
    cause = cause_of(a_finding(), 10)
    assert decided(a_finding(), restarts(2, cause), checkpoint_step=20).mode is not None
    assert decided(a_finding(node="node-2"), restarts(2, cause)).mode is not None
    assert decided(a_finding(reason="oom"), restarts(2, cause)).mode is not None


def attempts_until_the_end(policy: RestartPolicy, saved: list[int], apart_s: int) -> int | None:
    """Return after how many attempts, each with its newest checkpoint, the job is given up."""
    history: tuple[Restart, ...] = ()
    for number, step in enumerate(saved, start=1):
        now_ns = NOW + number * apart_s * SECOND
        finding = a_finding()
        circumstances = {"faults": (), "checkpoint_step": step, "stepped": True}
        cause = cause_of(finding, step)
        wanted = depth(policy.levels, history, cause, None, now_ns)
        circumstances["back"] = Back(world_size=4)
        mode = decide(policy, history, finding, wanted, now_ns, **circumstances).mode
        if mode is None:
            return number
        history = (*history, Restart(at_ns=now_ns, mode=mode, node="node-1", cause=cause))
    return None


def test_c86_a_loop_without_progress_ends_and_slow_progress_goes_on():
    """Two minutes at the same step burn a night, and a job that gains is stopped by mistake."""
    policy = RestartPolicy()
    assert attempts_until_the_end(policy, [100, 100, 100], apart_s=120) == 3
    assert attempts_until_the_end(policy, [100, 350, 610], apart_s=120) is None
    # However far apart: the window of the other budget is no way out of the loop.
    assert attempts_until_the_end(policy, [100] * 5, apart_s=7200) == 3
    assert attempts_until_the_end(policy, list(range(100, 5000, 250)), apart_s=600) is None


def test_a_repeated_failure_without_a_culprit_ends_the_job_too():
    """A hang that nobody can explain would otherwise be restarted for ever."""
    finding = Finding(outcome="inconclusive", basis=None, why="a tie", culprit=None)
    cause = cause_of(finding, None)
    assert decided(finding, restarts(2, cause), checkpoint_step=None).mode is None


def test_a_persons_request_is_obeyed_and_not_charged():
    """The person on call must be able to restart a job whose budget is spent."""
    history = restarts(50, OPERATOR_CAUSE) + restarts(2)
    assert decided(None, restarts(50)).mode is RestartMode.PROCESS
    assert decided(a_finding(reason="x"), history).mode is RestartMode.PROCESS
    assert cause_of(None, 10) == OPERATOR_CAUSE


def test_requests_of_other_depth_are_named_in_the_reason():
    """Silently doing something else than asked makes the report a lie."""
    for mode in (RestartMode.LOCAL_PROCESS, RestartMode.PROCESS, RestartMode.JOB):
        assert str(mode) in decided(a_finding(), requested=mode).reason


def test_who_came_back_to_the_barrier_decides_what_an_in_process_restart_becomes():
    """Calling it in-process although a process was lost hides what the restart cost."""
    everybody = Back(world_size=4, ranks={"node-0": (0, 1), "node-1": (2, 3)})
    three = Back(world_size=4, ranks={"node-0": (0, 1), "node-1": (3,)})
    found = decided(a_finding(), back=everybody)
    assert (found.mode, found.reason) == (
        RestartMode.IN_PROCESS,
        "in-process restart, every rank is back at its barrier: rank 1 died",
    )
    found = decided(a_finding(), back=three)
    assert (found.mode, found.reason) == (
        RestartMode.LOCAL_PROCESS,
        "in-process restart, but rank 2 gets a new process: rank 1 died",
    )
    assert decided(a_finding(), back=Back(world_size=4)).mode is RestartMode.PROCESS
    for deep in (RestartMode.PROCESS, RestartMode.JOB):
        assert decided(a_finding(), requested=deep, back=everybody).mode is deep


def test_the_ranks_of_a_node_that_is_left_out_do_not_count_as_back():
    """They would be promised a start on a node that gets none."""
    fault = a_fault(FaultKind.GPU_FATAL)
    back = Back(world_size=4, ranks={"node-0": (0, 1), "node-1": (2, 3)})
    found = decided(a_finding(FaultKind.GPU_FATAL), faults=(fault,), back=back)
    assert found.mode is RestartMode.LOCAL_PROCESS
    assert "ranks 2, 3 get new processes" in found.reason


def test_a_missing_module_before_the_first_step_is_not_restarted():
    """Restarting a typing error ten times delays its author by ten start-ups."""
    lines = ("Traceback (most recent call last):", "ModuleNotFoundError: No module named 'nump'")
    fault = a_fault(rank=1, exit=ExitCause(code=1), evidence=lines)
    decision = decided(a_finding(), faults=(fault,), stepped=False, checkpoint_step=None)
    assert decision.mode is None
    assert "before its first step" in decision.reason
    assert decision.reason.endswith(lines[-1])


def test_an_import_that_fails_after_the_process_group_is_seen_too():
    """Lazy imports fail under torch's own exception hook, which puts the rank in front."""
    fault = a_fault(rank=1, exit=ExitCause(code=1), evidence=("[rank1]: ImportError: no x",))
    decision = decided(a_finding(), faults=(fault,), stepped=False)
    assert decision.mode is None
    assert decision.reason.endswith(": ImportError: no x")


def test_argument_errors_and_missing_scripts_are_not_restarted():
    """Argparse and the interpreter both say 'exit code 2'; the last line says which."""
    line = "train.py: error: unrecognized arguments: --stepz 3"
    fault = a_fault(rank=1, exit=ExitCause(code=2), evidence=("usage: train.py [-h]", line, ""))
    decision = decided(a_finding(), faults=(fault,), stepped=False)
    assert decision.mode is None
    assert decision.reason.endswith(line)
    silent = a_fault(rank=1, exit=ExitCause(code=2))
    assert decided(a_finding(), faults=(silent,), stepped=False).reason.endswith("exit code 2")


def test_every_rank_failing_alike_at_start_is_not_restarted():
    """When all ranks fail, none is the culprit, and the job is still hopeless."""
    fault = a_fault(rank=0, exit=ExitCause(code=1), evidence=("SyntaxError: invalid syntax",))
    finding = Finding(outcome="agree", basis=None, why="all failed alike", culprit=None)
    assert decided(finding, faults=(fault,), stepped=False).mode is None


def test_the_same_error_after_a_step_is_restarted():
    """A script that ran before is right; the node it now fails on may be wrong."""
    fault = a_fault(rank=1, exit=ExitCause(code=2), evidence=("ImportError: libfoo.so",))
    assert decided(a_finding(), faults=(fault,), stepped=True).mode is RestartMode.PROCESS


def test_a_victims_import_error_does_not_end_the_job():
    """Another rank's dying words must not decide over the culprit's."""
    fault = a_fault(node="node-0", rank=0, exit=ExitCause(code=2))
    killed = a_fault(rank=1, exit=ExitCause(signal=9))
    decision = decided(a_finding(), faults=(fault, killed), stepped=False)
    assert decision.mode is RestartMode.PROCESS


@given(
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["a@1", "b@1", OPERATOR_CAUSE]))),
    st.integers(1, 5),
)
def test_no_window_ever_holds_more_than_the_budget(ages, retries_max):
    """The budget is the only thing between a crash loop and a burnt allocation."""
    policy = RestartPolicy(retries_max=retries_max, window_s=100, identical_max=10_000)
    history: list[Restart] = []
    for age, cause in sorted(ages):
        now = NOW + age * SECOND
        finding = None if cause == OPERATOR_CAUSE else a_finding(reason=cause)
        wanted = depth(policy.levels, history, cause_of(finding, 1), None, now)
        circumstances = {"faults": (), "checkpoint_step": 1, "stepped": True}
        back = Back(world_size=4)
        decision = decide(policy, history, finding, wanted, now, back=back, **circumstances)
        if decision.mode is None:
            continue
        at = Restart(at_ns=now, mode=decision.mode, node=None, cause=cause_of(finding, 1))
        history.append(at)
        charged = [
            item
            for item in history
            if item.cause != OPERATOR_CAUSE and item.at_ns > now - 100 * SECOND
        ]
        assert len(charged) <= retries_max
