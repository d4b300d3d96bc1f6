"""How deep the next restart goes: from a call back to the barrier to a job begun anew.

    in_process -> local_process -> process -> job

It starts as mild as anybody allows and goes one level deeper wherever the last try did not help:
when the job broke again before every rank had made a step, and when the same failure from the
same checkpoint was answered with that level already.  Budgets of each level end the ladder.
It refuses to know how a level is carried out and which workers can be brought back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.exit_causes import PREEMPTED
from coordinator.journal_format import Restart
from worker_shim.messages import RestartMode, most_severe

OPERATOR_CAUSE: Final = "operator"
"""Cause of a restart that a person asked for; it is not charged to any budget."""

_DEEPER: Final = {
    RestartMode.IN_PROCESS: RestartMode.PROCESS,
    RestartMode.LOCAL_PROCESS: RestartMode.PROCESS,
    RestartMode.PROCESS: RestartMode.JOB,
    RestartMode.JOB: RestartMode.JOB,
}
"""What follows a level that did not help.  A process that was started anew on one node only is
as good as an in-process restart to those that stayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelBudgets:
    """How much each level may be used.

    ``before_job_max`` is ``numRestartBeforeFullJobRestart``: milder restarts within ``window_s``
    since the last job restart, beyond which the next one is a job restart; None is no such bound.
    ``job_max`` is ``maxFullJobRestarts``; None is no bound of its own.
    """

    before_job_max: int | None = None
    job_max: int | None = None
    window_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The level, and why it is not a milder one (empty when nobody asked for more).

    ``mode`` None means that no level is left.
    """

    mode: RestartMode | None
    why: str = ""


def is_charged(restart: Restart) -> bool:
    """Return True for a restart that counts: nobody asked for it, and no scheduler caused it."""
    return restart.cause != OPERATOR_CAUSE and not restart.cause.startswith(f"{PREEMPTED}@")


def depth(
    budgets: LevelBudgets,
    history: Sequence[Restart],
    cause: str,
    requested: RestartMode | None,
    now_ns: int,
) -> Depth:
    """Return how deep a restart for ``cause`` must go at least.

    ``history`` holds the restarts already decided, oldest first; ``requested`` is the most severe
    mode that anybody asked for.  A person's restart is charged to no budget and deepened by none.
    """
    mode = most_severe(RestartMode.IN_PROCESS, requested)
    assert mode is not None, "one was asked for"
    why = "" if mode is RestartMode.IN_PROCESS else f"{mode} was asked for"
    if cause == OPERATOR_CAUSE:
        return Depth(mode=mode, why=why)
    for tried, reason in _did_not_help(history, cause):
        deeper = _DEEPER[tried]
        if deeper.severity > mode.severity:
            mode, why = deeper, reason
    return _within_budgets(budgets, history, Depth(mode=mode, why=why), now_ns)


def _did_not_help(history: Sequence[Restart], cause: str) -> list[tuple[RestartMode, str]]:
    """Return the deepest level that was tried in vain for either reason, with that reason."""
    found: list[tuple[RestartMode, str]] = []
    again = [item for item in history if is_charged(item) and _no_progress(item.cause, cause)]
    same = [item.mode for item in again]
    deepest = most_severe(*same)
    if deepest is not None:
        times = "once" if len(same) == 1 else f"{len(same)} times"
        found.append((deepest, f"{deepest} did not cure the same failure ({times} before)"))
    last = history[-1] if history else None
    if last is not None and last.failed:
        found.append((last.mode, f"the last {last.mode} broke before its first step"))
    return found


def _no_progress(then: str, now: str) -> bool:
    """Return whether it is the same failure, from no newer checkpoint than then.

    Causes end in the step that is loaded next, or in ``start``; a checkpoint that was given up
    takes the job further back, which is no progress either.
    """
    (failure, _, origin), (failure_now, _, origin_now) = then.rpartition("@"), now.rpartition("@")
    return failure == failure_now and _step(origin_now) <= _step(origin)


def _step(origin: str) -> int:
    return int(origin) if origin.isdigit() else -1


def _within_budgets(
    budgets: LevelBudgets, history: Sequence[Restart], wanted: Depth, now_ns: int
) -> Depth:
    since_ns = now_ns - round(budgets.window_s * 1e9)
    charged = [item for item in history if is_charged(item)]
    jobs = [index for index, item in enumerate(charged) if item.mode is RestartMode.JOB]
    mild = [it for it in charged[jobs[-1] + 1 if jobs else 0 :] if it.at_ns > since_ns]
    limit = budgets.before_job_max
    if wanted.mode is not RestartMode.JOB and limit is not None and len(mild) >= limit:
        why = (
            f"{len(mild)} milder restarts in the last {budgets.window_s:g} s "
            f"(numRestartBeforeFullJobRestart is {limit})"
        )
        wanted = Depth(mode=RestartMode.JOB, why=why)
    spent = budgets.job_max is not None and len(jobs) >= budgets.job_max
    if wanted.mode is not RestartMode.JOB or not spent:
        return wanted
    used = f"all {budgets.job_max} job restarts are used up (maxFullJobRestarts)"
    return Depth(mode=None, why=f"{wanted.why}, and {used}")
