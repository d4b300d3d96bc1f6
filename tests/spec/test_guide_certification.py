"""The guide's tables of status, certification, trust and recovery, row by row."""

import pytest

from scout import consensus
from scout.c3 import C3Result, C3Status
from scout.recovery import (
    Checkpoint,
    EmergencyReplay,
    Failure,
    NoCheckpoint,
    RecoveryMode,
    decide,
)
from scout.results import FaultKind, Header, NotReady, ReplayResult, fault_report
from scout.trust import (
    CHECKPOINT_ACTIONS,
    Action,
    Certified,
    Certifier,
    Outcome,
    Rejected,
    TrustState,
    Waiting,
    job_wide,
    outcome_of,
)
from scout.verdict import Agree, Attributed, Inconclusive

HEADER = Header(id="r-check-5-0", time_ns=1, run="r", step=5, reporter=0)
LATEST = Checkpoint(step=20, checkpoint_id="c20", source="latest", topology="t")
VERIFIED = Checkpoint(step=10, checkpoint_id="c10", source="durable", topology="t")


def result(status=C3Status.AGREE, bitmap=(0, 0, 0), slow=(0, 0, 0), **more):
    return ReplayResult(
        header=HEADER,
        peer_ranks=(4, 5, 6),
        checked_recipe_ids=("hidden",),
        c3_results={"hidden.output": C3Result(status=status, bitmap=bitmap, evidence=(1, 1, 2))},
        sdc_bitmap=bitmap,
        sdc_sources=("hidden.output",) if any(bitmap) else (),
        straggler_bitmap=slow,
        **more,
    )


# --- status table ---------------------------------------------------------------------------


def test_agree_means_that_the_evidence_satisfies_the_rule():
    """Row 1 of the status table."""
    assert isinstance(consensus.exact({0: 7, 1: 7, 2: 7}, range(3), "s"), Agree)


def test_attributed_means_that_a_strict_majority_identifies_the_divergent():
    """Row 2 of the status table."""
    found = consensus.exact({0: 7, 1: 8, 2: 7}, range(3), "s")
    assert isinstance(found, Attributed)
    assert found.ranks == (1,)


@pytest.mark.parametrize(
    "votes", [{0: 7, 1: 8}, {0: 7, 1: 7, 2: 8, 3: 8}, {0: 1, 1: 2, 2: 3}, {0: 7, 1: 7}]
)
def test_inconclusive_means_disagreement_without_support(votes):
    """Row 3 of the status table; the last group of four has two silent members."""
    electorate = range(4) if votes == {0: 7, 1: 7} else votes
    assert isinstance(consensus.exact(votes, electorate, "s"), Inconclusive)


def test_bitmap_positions_map_to_global_ranks_through_peer_ranks():
    """A manager acts on position 1 as if it were rank 1."""
    found = result(C3Status.ATTRIBUTED, (0, 1, 0))
    assert found.sdc_ranks == (5,)
    report = fault_report(found)
    assert report is not None
    assert (report.kind, report.failed_ranks) == (FaultKind.SDC, (5,))


# --- certification table --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "outcome", "action"),
    [
        (result(), Outcome.HEALTHY, Action.CERTIFY),
        (result(slow=(0, 0, 1)), Outcome.STRAGGLER, Action.CAPTURE_AND_REPORT),
        (result(C3Status.ATTRIBUTED, (0, 1, 0)), Outcome.CORRUPT, Action.REJECT),
        (result(C3Status.INCONCLUSIVE), Outcome.INCONCLUSIVE, Action.REJECT),
        (result(job_disagrees=True), Outcome.INCONCLUSIVE, Action.REJECT),
        (result(job_disagrees=True, job_sdc_ranks=(9,)), Outcome.CORRUPT, Action.REJECT),
        (NotReady(header=HEADER, peer_ranks=(4,), why="w"), Outcome.NOT_RUN, Action.WAIT),
    ],
)
def test_every_result_has_its_checkpoint_action(found, outcome, action):
    """The certification table; a check that could not run certifies nothing and rejects nothing."""
    assert outcome_of(found) is outcome
    assert CHECKPOINT_ACTIONS[outcome] is action


def test_every_outcome_has_an_action():
    """A new outcome is let through by default."""
    assert set(CHECKPOINT_ACTIONS) == set(Outcome)


def test_an_accepted_dense_check_certifies_at_once():
    """The state that was checked is not trusted, and an older one is loaded."""
    certifier = Certifier()
    found = certifier.boundary(10, Outcome.HEALTHY)
    assert isinstance(found, Certified)
    assert found.state is TrustState.RECOVERY_VERIFIED
    slow = certifier.boundary(20, Outcome.STRAGGLER)
    assert isinstance(slow, Certified)
    assert slow.action is Action.CAPTURE_AND_REPORT
    assert certifier.verified == 20


def test_a_dynamic_catalogue_needs_the_following_complete_cycle():
    """A candidate is used for recovery before the rest of its catalogue was tried."""
    certifier = Certifier(dynamic=True)
    part = certifier.boundary(5, Outcome.HEALTHY, cycle_complete=False)
    assert isinstance(part, Certified)
    assert part.state is TrustState.LATEST
    first = certifier.boundary(10, Outcome.HEALTHY)
    assert isinstance(first, Certified)
    assert (first.state, first.promoted) == (TrustState.CANDIDATE, ())
    assert certifier.verified is None
    second = certifier.boundary(20, Outcome.HEALTHY)
    assert isinstance(second, Certified)
    assert (second.state, second.promoted) == (TrustState.CANDIDATE, (10,))
    assert certifier.verified == 10


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.INCONCLUSIVE])
def test_corruption_rejects_the_state_and_keeps_the_prior_trusted_one(outcome):
    """The candidate saved between two checks is promoted although the second one failed."""
    certifier = Certifier(dynamic=True)
    for step in (10, 20):
        certifier.boundary(step, Outcome.HEALTHY)
    found = certifier.boundary(30, outcome)
    assert isinstance(found, Rejected)
    assert (found.withdrawn, found.kept) == ((20,), (10,))
    assert certifier.verified == 10
    assert certifier.candidate is None


def test_a_check_that_could_not_run_leaves_everything_as_it_is():
    """A missing capture throws away a good candidate, or certifies an unchecked state."""
    certifier = Certifier(dynamic=True)
    certifier.boundary(10, Outcome.HEALTHY)
    assert isinstance(certifier.boundary(20, Outcome.NOT_RUN), Waiting)
    assert (certifier.candidate, certifier.verified) == (10, None)


def test_any_group_s_corruption_rejects_job_wide():
    """The other pipeline stages save what they computed from the wrong one's output."""
    groups = [Outcome.HEALTHY, Outcome.STRAGGLER, Outcome.CORRUPT, Outcome.NOT_RUN]
    assert job_wide(groups) is Outcome.CORRUPT
    assert job_wide([Outcome.HEALTHY, Outcome.NOT_RUN]) is Outcome.NOT_RUN
    assert job_wide([Outcome.HEALTHY, Outcome.STRAGGLER]) is Outcome.STRAGGLER


# --- recovery table -------------------------------------------------------------------------

CLEAN, CORRUPT = EmergencyReplay.CLEAN, EmergencyReplay.CORRUPT
INCOMPLETE, UNAVAILABLE = EmergencyReplay.INCOMPLETE, EmergencyReplay.UNAVAILABLE


@pytest.mark.parametrize(
    ("failure", "accessible", "replay", "mode"),
    [
        (Failure.SDC, True, CLEAN, RecoveryMode.RECOVERY_VERIFIED),
        (Failure.INACCESSIBLE, False, CLEAN, RecoveryMode.RECOVERY_VERIFIED),
        (Failure.STRAGGLER, False, CLEAN, RecoveryMode.RECOVERY_VERIFIED),
        (Failure.STRAGGLER, True, UNAVAILABLE, RecoveryMode.LATEST),
        (Failure.HANG, True, CLEAN, RecoveryMode.LATEST),
        (Failure.UNCERTAIN, True, CLEAN, RecoveryMode.LATEST),
        (Failure.HANG, False, CLEAN, RecoveryMode.RECOVERY_VERIFIED),
        (Failure.HANG, True, INCOMPLETE, RecoveryMode.RECOVERY_VERIFIED),
        (Failure.UNCERTAIN, True, UNAVAILABLE, RecoveryMode.RECOVERY_VERIFIED),
        (Failure.HANG, True, CORRUPT, RecoveryMode.RECOVERY_VERIFIED),
    ],
)
def test_every_failure_condition_selects_its_checkpoint(failure, accessible, replay, mode):
    """The recovery table, row by row."""
    found = decide(
        failure,
        all_ranks_accessible=accessible,
        replay=replay,
        latest=LATEST,
        verified=VERIFIED,
        run="r",
        at_ns=1,
    )
    assert found.mode is mode
    assert found.target is (LATEST if mode is RecoveryMode.LATEST else VERIFIED)
    assert found.available
    assert found.reason


def test_a_decision_without_a_checkpoint_says_so():
    """The manager waits for a checkpoint that nobody has."""
    found = decide(
        Failure.SDC,
        all_ranks_accessible=True,
        replay=UNAVAILABLE,
        latest=LATEST,
        verified=NoCheckpoint(),
        run="r",
        at_ns=1,
    )
    assert not found.available
    assert "there is none" in found.reason
