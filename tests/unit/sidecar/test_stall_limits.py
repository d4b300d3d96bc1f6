"""When a rank counts as stalled: learned, declared, or the job's one limit."""

from dataclasses import replace

import pytest

from scout.clock import SECOND, Instant
from scout.phases_learned import SILENCES_MIN, DeadlinePolicy, LearnedPhases
from scout.snapshot import Phase, RankSnapshot
from sidecar.ranks import Worker, with_limits

POLICY = DeadlinePolicy(most_ns=300 * SECOND, least_ns=5 * SECOND, factor=10.0)
TICK_NS = SECOND // 4


class Rank:
    """A rank that is looked at every quarter of a second."""

    def __init__(self, policy=POLICY):
        self.worker = Worker()
        self.policy = policy
        self.now = 1000 * SECOND
        self.moved = self.now
        self.seen = RankSnapshot(rank=3, node="n", local_rank=0, step=1)

    def look(self, phase, **more):
        self.seen = replace(
            self.seen, phase=phase, progress_age_ns=self.now - self.moved, phase_limit_ns=None
        )
        self.seen = replace(self.seen, **more)
        return self.worker.observe(self.seen, self.policy, Instant(self.now))

    def stays(self, phase, silence_ns, **more):
        """Enter ``phase``, and say nothing for so long while the node goes on looking."""
        self.moved = self.now
        self.look(phase, **more)
        while self.now < self.moved + silence_ns:
            self.now += TICK_NS
            if self.worker.stalled:
                return
            self.look(phase, phase_started_age_ns=self.now - self.moved, **more)

    def trains(self, steps=SILENCES_MIN + 1, forward_ns=SECOND):
        for _ in range(steps):
            self.stays(Phase.FORWARD, forward_ns)
            self.stays(Phase.BACKWARD, SECOND // 2)


def test_until_armed_a_rank_has_the_jobs_limit():
    """The first steps compile and fill caches; nothing is known of a rank yet."""
    rank = Rank()
    rank.stays(Phase.FORWARD, 200 * SECOND)
    assert not rank.worker.stalled
    assert not rank.worker.limit.armed
    assert rank.worker.limit.ns == 300 * SECOND


def test_a_limit_is_a_multiple_of_what_the_phase_usually_takes():
    """The person on call would wait for five minutes for what ten seconds show."""
    rank = Rank()
    rank.trains()
    rank.stays(Phase.FORWARD, 60 * SECOND)
    assert rank.worker.stalled
    assert rank.worker.limit.armed
    assert 10 * SECOND <= rank.worker.limit.ns <= 13 * SECOND
    assert rank.now - rank.moved <= rank.worker.limit.ns + 2 * TICK_NS


def test_a_learned_limit_has_a_floor():
    """Steps of a millisecond would make a stall of every collection of garbage."""
    rank = Rank(replace(POLICY, least_ns=60 * SECOND))
    rank.trains(forward_ns=TICK_NS)
    rank.stays(Phase.FORWARD, 50 * SECOND)
    assert not rank.worker.stalled
    assert rank.worker.limit.ns == 60 * SECOND


def test_a_learned_limit_never_exceeds_the_jobs():
    """What a person wrote down as the longest would not hold."""
    rank = Rank(replace(POLICY, most_ns=8 * SECOND))
    rank.trains(forward_ns=2 * SECOND)
    rank.stays(Phase.FORWARD, 20 * SECOND)
    assert rank.worker.stalled
    assert rank.worker.limit.ns == 8 * SECOND


@pytest.mark.parametrize("phase", [Phase.UNKNOWN, Phase.CHECKPOINT, Phase.EVALUATE])
def test_what_is_rare_or_untold_keeps_the_jobs_limit(phase):
    """The first evaluation and the first checkpoint would be called hangs, after hours."""
    rank = Rank()
    for _ in range(10):
        rank.trains(4)
        rank.stays(Phase.UNKNOWN, SECOND // 4)
    rank.stays(phase, 200 * SECOND)
    assert not rank.worker.stalled


def test_one_long_silence_is_remembered():
    """Every epoch's first batch would be a stall again."""
    rank = Rank()
    for _ in range(40):
        rank.stays(Phase.DATA, SECOND)
        rank.stays(Phase.FORWARD, SECOND)
    rank.stays(Phase.DATA, 9 * SECOND)
    rank.stays(Phase.FORWARD, SECOND)
    rank.stays(Phase.DATA, 17 * SECOND)
    assert not rank.worker.stalled


def test_a_declared_limit_takes_the_place_of_any_other():
    """A script that says how long it needs would still be cut short, or be waited for longer."""
    rank = Rank()
    rank.trains()
    rank.stays(Phase.EVALUATE, 400 * SECOND, phase_limit_ns=600 * SECOND)
    assert not rank.worker.stalled
    assert rank.worker.limit.armed
    rank.stays(Phase.EVALUATE, 400 * SECOND, phase_limit_ns=2 * SECOND)
    assert rank.worker.stalled


def test_no_limit_at_all_when_stalls_are_not_judged():
    """Switched off, it would still call the coordinator."""
    rank = Rank(replace(POLICY, most_ns=0))
    rank.stays(Phase.FORWARD, 1000 * SECOND)
    assert not rank.worker.stalled
    assert rank.worker.limit is None
    assert with_limits([rank.seen], {0: rank.worker}) == (rank.seen,)


def test_a_floor_above_the_jobs_limit_switches_learning_off():
    """Whoever wants the one number that they wrote must be able to have it."""
    learned = LearnedPhases()
    seen = RankSnapshot(rank=0, node="n", local_rank=0, phase=Phase.FORWARD, progress_age_ns=0)
    for moment in range(100):
        learned.learn(seen, Instant(moment * SECOND))
    policy = DeadlinePolicy(most_ns=3 * SECOND, least_ns=60 * SECOND)
    assert learned.limit(seen, policy).ns == 3 * SECOND
    assert not learned.limit(seen, policy).armed


def test_whoever_judges_is_told_each_ranks_limit():
    """The coordinator would wait for the job's limit after the node has called."""
    rank = Rank()
    rank.trains()
    seen = replace(rank.seen, rank=7)
    stranger = replace(seen, local_rank=1)
    told, untold = with_limits([seen, stranger], {0: rank.worker})
    assert told.stall_limit_ns == rank.worker.limit.ns
    assert untold == stranger
