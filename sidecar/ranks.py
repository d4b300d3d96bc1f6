"""The node's running ranks: pid, progress, stall and labels of each, for one generation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from scout.clock import Instant, seconds, since
from scout.held import is_held
from scout.phases_learned import DeadlinePolicy, LearnedPhases, Limit
from scout.snapshot import RankSnapshot, is_overdue
from sidecar.api import RankStatus, Start
from worker_shim.messages import ScoutStatus


def stall_policy(start: Start) -> DeadlinePolicy:
    """Return the bounds of the ranks' limits that a start sets."""
    return DeadlinePolicy(
        most_ns=seconds(start.stall_timeout_s),
        least_ns=seconds(start.stall_timeout_min_s),
        factor=start.stall_factor,
    )


@dataclass(slots=True)
class Worker:
    """What is known of one local rank.  ``step`` is None until it completed one."""

    pid: int | None = None
    step: int | None = None
    progress_at: Instant | None = None
    stalled: bool = False
    held: bool = False
    """Its process is stopped, or asleep in the kernel, for longer than a moment."""
    attached: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    _process_states: str = ""
    scout: ScoutStatus | None = None
    data: str | None = None
    """What it has an operator know, until it runs its block."""
    limit: Limit | None = None
    """The silence allowed to it now, None while stalls are not judged."""
    usual_ns: int | None = None
    """The longest silence remembered of the phase that it is in."""
    _learned: LearnedPhases = field(default_factory=LearnedPhases)

    def observe(self, seen: RankSnapshot, policy: DeadlinePolicy, now: Instant) -> bool:
        """Take a look at its page.  Returns True when the coordinator must hear of it at once.

        The first step is such news, because it ends a recovery, and so is entering or leaving a
        stall (silence beyond the rank's limit after a first step), or being held.
        """
        if seen.step is None:
            return False
        first = self.step is None
        self.step = seen.step
        self._learned.learn(seen, now)
        if seen.progress_age_ns is not None:
            self.progress_at = Instant(now - seen.progress_age_ns)
        age = self.progress_age(now)
        stalled = False
        if policy.most_ns:
            self.limit = self._learned.limit(seen, policy)
            aged = replace(seen, progress_age_ns=age, stall_limit_ns=self.limit.ns)
            stalled = age is not None and is_overdue(aged, policy.most_ns)
            self.usual_ns = self._learned.usual_ns(seen)
        held = policy.most_ns > 0 and is_held(seen)
        turned = (stalled, held) != (self.stalled, self.held)
        self.stalled, self.held = stalled, held
        return first or turned

    def with_limit(self, seen: RankSnapshot) -> RankSnapshot:
        """Return a look at this rank with its limit, and with the longest silence remembered."""
        limit = None if self.limit is None else self.limit.ns
        return replace(seen, stall_limit_ns=limit, usual_silence_ns=self.usual_ns)

    def carried(self) -> "Worker":
        """Return it as it goes into another generation: alive, with no step made."""
        return Worker(pid=self.pid, attached=self.attached, labels=self.labels, data=self.data)

    def look(self, process_state: str | None) -> bool:
        """Take its state in ``/proc``.  Returns whether it can obey nothing at all.

        A stopped process is seen to be one at once.  An uninterruptible wait is usual while a
        disk is written to, and means something only when it lasts from one look to the next.
        """
        self._process_states = (self._process_states + (process_state or "?"))[-2:]
        return self.is_stuck

    @property
    def is_stuck(self) -> bool:
        """Whether it was seen to be stopped, or in an uninterruptible wait that lasts."""
        return self._process_states[-1:] in {"T", "t"} or self._process_states == "DD"

    def progress_age(self, now: Instant) -> int | None:
        """Return nanoseconds since its last progress, or None when there was none."""
        return None if self.progress_at is None else since(self.progress_at, now)

    def status(
        self, rank: int, local_rank: int, now: Instant, *, restartable: bool, at_barrier: bool
    ) -> RankStatus:
        """Return it as the coordinator is told."""
        return RankStatus(
            rank=rank,
            local_rank=local_rank,
            pid=self.pid,
            step=self.step,
            progress_age_ns=self.progress_age(now),
            stalled=self.stalled,
            held=self.held,
            stall_limit_ns=None if self.limit is None else self.limit.ns,
            stall_armed=self.limit is not None and self.limit.armed,
            attached=self.attached,
            restartable=restartable,
            at_barrier=at_barrier,
            labels=self.labels,
            scout=self.scout,
        )


def with_limits(
    seen: Iterable[RankSnapshot], workers: Mapping[int, Worker]
) -> tuple[RankSnapshot, ...]:
    """Return what was seen with what each rank is known for, for whoever judges it."""
    known = {local_rank: worker for local_rank, worker in workers.items() if worker.limit}
    return tuple(
        it if (worker := known.get(it.local_rank)) is None else worker.with_limit(it) for it in seen
    )
