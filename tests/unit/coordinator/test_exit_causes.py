"""What exit statuses decide: user errors, lists, preemption; and the pause before a restart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.backoff import BackoffPolicy, draw, pause_s, repeated
from coordinator.culprit import judge
from coordinator.escalation import PREEMPTIONS_MAX, Back, RestartPolicy, cause_of, decide
from coordinator.exit_causes import PREEMPTED, ExitPolicy, exit_number, listed, refusal
from coordinator.incidents import Culprit, Finding, NodeFault
from coordinator.journal_format import Restart
from coordinator.own_faults import node_left
from coordinator.restart_depth import Depth, is_charged
from sidecar.api import ExitCause, FaultKind, FaultReport, Scope
from worker_shim.messages import RestartMode

SECOND = 10**9
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4"
WORLD = ("node-0", "node-1", "node-2", "node-3")


def a_crash(node="node-1", at_s=0.0, *lines, code=None, signal=None, by="") -> NodeFault:
    cause = ExitCause(code=code, signal=signal, by=by)
    rank = WORLD.index(node)
    report = FaultReport(
        fault_id=1,
        kind=FaultKind.CRASH,
        scope=Scope.RANK,
        reason="WorkerCrash",
        message=f"rank {rank} ended with {cause}",
        age_ns=0,
        rank=rank,
        local_rank=0,
        exit=cause,
        evidence=lines,
    )
    return NodeFault(node=node, at_ns=round(at_s * SECOND), report=report)


def found(*faults, exits=None) -> Finding:
    return judge(faults, (), WORLD, 1, 10 * SECOND, exits=exits)


def decided(finding, history=(), *, faults=(), stepped=True, policy=None, step=10):
    return decide(
        policy or RestartPolicy(),
        history,
        finding,
        Depth(mode=RestartMode.IN_PROCESS),
        1000 * SECOND,
        back=Back(world_size=len(WORLD)),
        faults=faults,
        checkpoint_step=step,
        stepped=stepped,
    )


def test_c89_a_preemption_blames_no_node_and_costs_no_budget():
    """A scheduler that takes a node back would drain it, and end the job after ten nights."""
    faults = (
        a_crash("node-1", 0.0, code=143),
        a_crash("node-0", 3.0, GLOO, code=1),
        a_crash("node-2", 3.1, GLOO, code=1),
    )
    finding = found(*faults)
    assert (finding.outcome, finding.culprit) == (PREEMPTED, None)
    assert "preempted on node-1" in finding.why
    history = tuple(
        Restart(at_ns=999 * SECOND, mode=RestartMode.PROCESS, node=None, cause="crash:n:x@10")
        for _ in range(10)
    )
    decision = decided(finding, history, faults=faults)
    assert decision.mode is RestartMode.PROCESS
    assert decision.exclude_nodes == ()
    restart = Restart(at_ns=0, mode=RestartMode.PROCESS, node=None, cause=cause_of(finding, 10))
    assert not is_charged(restart)
    # But not for ever, when it never gets anywhere.
    assert decided(finding, (restart,) * (PREEMPTIONS_MAX - 1)).mode is not None
    refused = decided(finding, (restart,) * PREEMPTIONS_MAX)
    assert "preempted 21 times without a newer checkpoint" in refused.reason


def test_a_sidecar_that_was_told_to_end_is_preempted_and_not_lost():
    """A node that says goodbye must not be remembered as one that fell over."""
    report = node_left("node-2")
    finding = found(NodeFault(node="node-2", at_ns=0, report=report))
    assert finding.outcome == PREEMPTED
    assert "preempted on node-2" in finding.why


def test_a_signal_after_another_failure_or_from_the_kernel_is_no_preemption():
    """Clean-up that ends what a bug left over would hide the bug."""
    first = a_crash("node-0", 0.0, "ValueError: bad", code=1)
    assert found(first, a_crash("node-1", 1.0, signal=15)).culprit.node == "node-0"
    assert found(a_crash(signal=9, by="the kernel's OOM killer")).culprit.node == "node-1"
    exits = ExitPolicy(preempted=frozenset({exit_number("SIGKILL"), 99}))
    assert found(a_crash(signal=9), exits=exits).outcome == PREEMPTED
    assert found(a_crash(code=99), exits=exits).outcome == PREEMPTED
    assert found(a_crash(signal=15), exits=exits).outcome == "attributed"
    assert found(a_crash(signal=9, by="the kernel's OOM killer"), exits=exits).culprit is not None


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (1, "ModuleNotFoundError: No module named 'flash_attn'"),
        (1, "ImportError: cannot import name 'x' from 'y' (/a/y.py)"),
        (1, "SyntaxError: invalid syntax"),
        (1, "IndentationError: unexpected indent"),
        (2, "train.py: error: unrecognized arguments: --setps"),
        (2, "python: can't open file '/src/trian.py': [Errno 2] No such file or directory"),
        (127, "./train.sh: line 3: torchrn: command not found"),
        (126, "bash: ./train: Permission denied"),
    ],
)
def test_a_users_error_at_start_up_is_not_restarted_and_is_said_in_one_sentence(code, line):
    """Ten restarts of a typo cost an hour of a fleet and bury the line that tells it."""
    fault = a_crash("node-1", 0.0, "Traceback (most recent call last):", line, code=code)
    decision = decided(found(fault), faults=(fault,), stepped=False)
    assert decision.mode is None
    assert line in decision.reason
    assert "\n" not in decision.reason
    assert decided(found(fault), faults=(fault,), stepped=True).mode is not None


def test_the_jobs_lists_say_what_never_and_what_always_restarts():
    """A team's own exit codes mean more than any guess about them."""
    fault = a_crash("node-1", 0.0, "giving up: no progress", code=93)
    policy = RestartPolicy(exits=ExitPolicy(never=frozenset({93})))
    decision = decided(found(fault), faults=(fault,), policy=policy)
    assert decision.mode is None
    assert "exit code 93, which this job never restarts (exitPolicy.neverRestart)" in (
        decision.reason
    )
    lazy = a_crash("node-1", 0.0, "ImportError: libcuda.so.1: cannot open", code=2)
    always = RestartPolicy(exits=ExitPolicy(always=frozenset({2})))
    assert decided(found(lazy), faults=(lazy,), stepped=False, policy=always).mode is not None
    assert decided(found(lazy), faults=(lazy,), stepped=False).mode is None
    # A victim's status decides nothing: only who is meant by the finding.
    victim = a_crash("node-2", 1.0, GLOO, code=93)
    other = a_crash("node-1", 0.0, "ValueError: x", code=1)
    assert refusal(policy.exits, found(other, victim), (other, victim), stepped=True) is None


def test_a_signal_in_a_list_stands_for_its_shell_code_too():
    """A wrapper script turns SIGTERM into 143, and the list would not match any more."""
    numbers = frozenset({exit_number("SIGTERM"), exit_number(7)})
    assert listed(ExitCause(signal=15), numbers)
    assert listed(ExitCause(code=143), numbers)
    assert listed(ExitCause(code=7), numbers)
    assert not listed(ExitCause(signal=7), numbers)
    assert not listed(ExitCause(code=0), numbers)
    for wrong in (256, -1, "SIGNOPE", "143", True):
        with pytest.raises(ValueError, match="neither an exit code"):
            exit_number(wrong)


@given(
    st.integers(0, 10_000),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 10),
    st.floats(0, 600),
)
def test_the_pause_is_bounded_and_spread_over_the_whole_of_its_cap(times, drawn, first_s, most_s):
    """Jitter below the cap only would bring all jobs back together exactly at the maximum."""
    policy = BackoffPolicy(first_s=first_s, most_s=most_s)
    pause = pause_s(policy, times, drawn)
    assert 0 <= pause <= min(most_s, first_s * 2.0 ** min(max(times - 1, 0), 64))
    assert pause_s(policy, 0, drawn) == 0
    whole = pause_s(policy, times, 0.999999)
    assert pause <= max(whole, pause_s(policy, times, 0.0)) or drawn > 0.999999


def test_jobs_that_broke_together_come_back_apart():
    """C85: a storage that went away is hit by everybody at the same moment again."""
    draws = sorted(draw(f"job-{number}", "i-0001") for number in range(1000))
    assert draw("job-1", "i-0001") == draw("job-1", "i-0001")
    quarters = [sum(n / 4 <= one < (n + 1) / 4 for one in draws) for n in range(4)]
    assert min(quarters) > 200


def test_progress_ends_the_repetition():
    """A job that gains between its failures must not wait minutes after each of them."""
    made = [
        Restart(at_ns=0, mode=RestartMode.PROCESS, node="n", cause=f"crash:n:x@{step}")
        for step in (10, 10, 20)
    ]
    assert repeated(made, "crash:m:y@20") == 1
    assert repeated(made, "crash:m:y@30") == 0
    assert repeated(made[:2], "crash:n:x@10") == 2


def test_a_finding_with_a_culprit_elsewhere_keeps_its_cause():
    """Two accidents on different nodes must not share a budget of repetitions."""
    culprit = Culprit(
        kind=FaultKind.CRASH, node="n", rank=0, local_rank=0, gpu=None, reason="exit code 1"
    )
    finding = Finding(outcome="attributed", basis="direct", why="w", culprit=culprit)
    assert cause_of(finding, 3) == "crash:n:exit code 1@3"
