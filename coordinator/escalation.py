"""How deep the job restarts after a finding, whom it leaves out, and when it gives up.

It counts what was already spent and compares causes.  It refuses to know how a restart is done,
who holds which rank, and which checkpoint exists beyond the step that is handed in.

How deep it must go at least is `coordinator.restart_depth`'s; how deep it goes is seen once every
node has stopped, by who came back to the barrier alive.  The reason says both each time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.backoff import BackoffPolicy
from coordinator.exit_causes import PREEMPTED, ExitPolicy, refusal
from coordinator.incidents import Decision, Finding, NodeFault
from coordinator.journal_format import Restart
from coordinator.restart_depth import OPERATOR_CAUSE, Depth, LevelBudgets, is_charged
from coordinator.wording import rank_list
from sidecar.api import FaultKind
from worker_shim.messages import RestartMode

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
    """Restarts of processes or deeper for one failure, this one included, before it is final."""
    exits: ExitPolicy = field(default_factory=ExitPolicy)
    backoff: BackoffPolicy = field(default_factory=BackoffPolicy)
    before_job_max: int | None = None
    """``numRestartBeforeFullJobRestart`` of `LevelBudgets`."""
    job_max: int | None = None
    """``maxFullJobRestarts`` of `LevelBudgets`."""

    @property
    def levels(self) -> LevelBudgets:
        """Return the budgets of the single levels."""
        return LevelBudgets(
            before_job_max=self.before_job_max, job_max=self.job_max, window_s=self.window_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """Who stands at the barrier, alive, once every node has stopped: node -> global ranks."""

    world_size: int
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


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


def decide(
    policy: RestartPolicy,
    history: Sequence[Restart],
    finding: Finding | None,
    depth: Depth,
    now_ns: int,
    *,
    back: Back,
    faults: Sequence[NodeFault],
    checkpoint_step: int | None,
    stepped: bool,
) -> Decision:
    """Choose the restart mode, or end the job.

    ``history`` holds the restarts already decided, ``now_ns`` is the wall clock like theirs.
    ``depth`` is the least one, ``back`` who can go on without a new process.
    ``faults`` are all reports of the incident.  ``checkpoint_step`` is that of `cause_of`.
    ``stepped`` is true once any rank completed a step in this or an earlier generation: the
    script is then known to start, and a start-up error is no longer the user's.
    """
    if finding is None:
        return _restart(depth, back, "a person asked", ())
    exclude = _unfit_nodes(finding, faults)
    refused = (
        refusal(policy.exits, finding, faults, stepped=stepped)
        or _repetition_refusal(policy, history, finding, checkpoint_step)
        or _budget_refusal(policy, history, finding, now_ns)
        or (f"{depth.why}: {finding.why}" if depth.mode is None else None)
    )
    if refused is not None:
        return Decision(mode=None, reason=refused, exclude_nodes=exclude)
    return _restart(depth, back, finding.why, exclude)


def _restart(depth: Depth, back: Back, why: str, exclude: tuple[str, ...]) -> Decision:
    """Return the restart that ``depth`` asks for and ``back`` allows."""
    staying = tuple(
        rank for node, ranks in back.ranks.items() if node not in exclude for rank in ranks
    )
    mode, how = _carried_out(depth, staying, back.world_size)
    reason = f"{how}: {why}" + (f"; left out: {', '.join(exclude)}" if exclude else "")
    return Decision(mode=mode, reason=reason, exclude_nodes=exclude)


def _carried_out(depth: Depth, staying: tuple[int, ...], world: int) -> tuple[RestartMode, str]:
    """Return the mode that this restart is, and in words what is done and why not less."""
    because = f" ({depth.why})" if depth.why else ""
    match depth.mode:
        case RestartMode.JOB:
            return RestartMode.JOB, f"job restart{because}"
        case RestartMode.IN_PROCESS | RestartMode.LOCAL_PROCESS if len(staying) == world:
            return RestartMode.IN_PROCESS, "in-process restart, every rank is back at its barrier"
        case RestartMode.IN_PROCESS | RestartMode.LOCAL_PROCESS if staying:
            anew = rank_list(sorted(set(range(world)) - set(staying)))
            verb = "get new processes" if world - len(staying) > 1 else "gets a new process"
            return RestartMode.LOCAL_PROCESS, f"in-process restart, but {anew} {verb}{because}"
        case RestartMode.IN_PROCESS:
            return RestartMode.PROCESS, "process restart"
        case RestartMode.LOCAL_PROCESS:
            return RestartMode.PROCESS, f"process restart, as no rank can stay alive{because}"
        case _:
            return RestartMode.PROCESS, f"process restart{because}"


def _repetition_refusal(
    policy: RestartPolicy,
    history: Sequence[Restart],
    finding: Finding,
    checkpoint_step: int | None,
) -> str | None:
    cause = cause_of(finding, checkpoint_step)
    same = [restart for restart in history if restart.cause == cause]
    if finding.outcome == PREEMPTED:
        return _preempted_too_often(len(same) + 1, finding)
    deep = sum(restart.mode.severity >= RestartMode.PROCESS.severity for restart in same)
    if deep + 1 < policy.identical_max:
        return None
    times = len(same) + 1
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
