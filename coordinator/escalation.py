"""How deep the job restarts after a finding, whom it leaves out, and when it gives up.

It counts what was already spent and compares causes.  It refuses to know how a restart is done,
who holds which rank, and which checkpoint exists beyond the step that is handed in.

This engine restarts processes only: milder requests are deepened, and a job-level request is
carried out as a process restart after every worker has stopped.  The reason says so each time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.backoff import BackoffPolicy
from coordinator.exit_causes import PREEMPTED, ExitPolicy, refusal
from coordinator.incidents import Decision, Finding, NodeFault
from coordinator.journal_format import Restart
from sidecar.api import FaultKind
from worker_shim.messages import RestartMode

OPERATOR_CAUSE: Final = "operator"
"""Cause of a restart that a person asked for; it is not charged to any budget."""

PREEMPTIONS_MAX: Final = 20
"""Preemptions without a newer checkpoint before the job is given up: it then runs nowhere long
enough to be worth its start."""

_HARDWARE: Final = frozenset({FaultKind.GPU_FATAL})
"""Faults that stay with the node: giving it a rank again would break the next run too.

A lost node is not among them: while it is away it gets no rank anyway, and a sidecar that comes
back is as good as any other.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The budgets.

    ``retries_max`` in ``window_s``: ten an hour is an order of magnitude above what the largest
    published runs suffer from hardware, and a crash loop of seconds is through with it in
    minutes instead of burning a night.  ``identical_max``: the first repetition may be chance,
    the third failure at the same place is a property of the job.
    """

    retries_max: int = 10
    window_s: float = 3600.0
    identical_max: int = 3
    exits: ExitPolicy = field(default_factory=ExitPolicy)
    backoff: BackoffPolicy = field(default_factory=BackoffPolicy)


def cause_of(finding: Finding | None, checkpoint_step: int | None) -> str:
    """Return what two failures must share to count as the same one.

    ``checkpoint_step`` is the step that the next start would load: a newer one means that the
    job made progress between the two failures.  No finding means that a person asked.
    """
    if finding is None:
        return OPERATOR_CAUSE
    origin = "start" if checkpoint_step is None else str(checkpoint_step)
    if finding.outcome == PREEMPTED:
        return f"{PREEMPTED}@{origin}"
    if finding.culprit is None:
        return f"{finding.outcome}::@{origin}"
    culprit = finding.culprit
    return f"{culprit.kind}:{culprit.node}:{culprit.reason}@{origin}"


def is_charged(restart: Restart) -> bool:
    """Return True for a restart that counts: nobody asked for it, and no scheduler caused it."""
    return restart.cause != OPERATOR_CAUSE and not restart.cause.startswith(f"{PREEMPTED}@")


def decide(
    policy: RestartPolicy,
    history: Sequence[Restart],
    finding: Finding | None,
    requested: RestartMode | None,
    now_ns: int,
    *,
    faults: Sequence[NodeFault],
    checkpoint_step: int | None,
    stepped: bool,
) -> Decision:
    """Choose the restart mode, or end the job.

    ``history`` holds the restarts already decided, ``now_ns`` is the wall clock like theirs.
    ``faults`` are all reports of the incident.  ``checkpoint_step`` is that of `cause_of`.
    ``stepped`` is true once any rank completed a step in this or an earlier generation: the
    script is then known to start, and a start-up error is no longer the user's.
    """
    if finding is None:
        return Decision(mode=RestartMode.PROCESS, reason=_depth("a person asked", requested))
    exclude = _unfit_nodes(finding, faults)
    refused = (
        refusal(policy.exits, finding, faults, stepped=stepped)
        or _repetition_refusal(policy, history, finding, checkpoint_step)
        or _budget_refusal(policy, history, finding, now_ns)
    )
    if refused is not None:
        return Decision(mode=None, reason=refused, exclude_nodes=exclude)
    reason = _depth(finding.why, requested)
    if exclude:
        reason += f"; left out: {', '.join(exclude)}"
    return Decision(mode=RestartMode.PROCESS, reason=reason, exclude_nodes=exclude)


def _repetition_refusal(
    policy: RestartPolicy,
    history: Sequence[Restart],
    finding: Finding,
    checkpoint_step: int | None,
) -> str | None:
    cause = cause_of(finding, checkpoint_step)
    times = 1 + sum(restart.cause == cause for restart in history)
    if finding.outcome == PREEMPTED:
        return _preempted_too_often(times, finding)
    if times < policy.identical_max:
        return None
    origin = "the start" if checkpoint_step is None else f"step {checkpoint_step}"
    count = {3: "three times"}.get(times, f"{times} times")
    return f"the same failure from the same checkpoint {count} (from {origin}): {finding.why}"


def _preempted_too_often(times: int, finding: Finding) -> str | None:
    if times <= PREEMPTIONS_MAX:
        return None
    return f"preempted {times} times without a newer checkpoint: {finding.why}"


def _budget_refusal(
    policy: RestartPolicy, history: Sequence[Restart], finding: Finding, now_ns: int
) -> str | None:
    # A restart stamped in the future was decided before the clock was set back: it still counts.
    since_ns = now_ns - round(policy.window_s * 1e9)
    spent = sum(item.at_ns > since_ns and is_charged(item) for item in history)
    if finding.outcome == PREEMPTED or spent < policy.retries_max:
        return None
    if policy.retries_max == 0:
        return f"no restart is allowed (jobMaxRetryCount is 0): {finding.why}"
    return (
        f"{spent} restarts in the last {policy.window_s:g} s have used up the job's "
        f"{policy.retries_max} (jobMaxRetryCount); the last failure: {finding.why}"
    )


def _unfit_nodes(finding: Finding, faults: Sequence[NodeFault]) -> tuple[str, ...]:
    """Return the nodes that must not be used again, the culprit's first."""
    culprit = finding.culprit
    named = [culprit.node] if culprit is not None and culprit.kind in _HARDWARE else []
    others = [fault.node for fault in faults if fault.report.kind in _HARDWARE]
    return tuple(dict.fromkeys([*named, *others]))


def _depth(why: str, requested: RestartMode | None) -> str:
    match requested:
        case None | RestartMode.PROCESS:
            return f"process restart: {why}"
        case RestartMode.IN_PROCESS | RestartMode.LOCAL_PROCESS:
            return f"process restart instead of the {requested} asked for, the mildest here: {why}"
        case RestartMode.JOB:
            return f"{requested} asked for, done as a process restart once all have stopped: {why}"
