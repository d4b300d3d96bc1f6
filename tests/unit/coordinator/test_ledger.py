"""The time ledger: every nanosecond once, and the right name for it."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from coordinator.incidents import (
    Culprit,
    Decision,
    Finding,
    Incident,
    IncidentPhase,
    NodeFault,
)
from coordinator.journal_format import decode_ledger, encode_ledger
from coordinator.ledger import CAUSES, Account, Ledger, Seen, report
from coordinator.phases import JobPhase
from scout.snapshot import Phase, RankSnapshot
from sidecar.api import FaultKind, FaultReport, Scope
from worker_shim.messages import RestartMode

S = 10**9
RANKS = 8


def incident(
    kind: FaultKind = FaultKind.CRASH,
    *,
    backoff_s: float = 0.0,
    phase: Phase = Phase.FORWARD,
    **stones: int,
) -> Incident:
    """Return an incident that names rank 3, with milestones at these seconds."""
    fault = FaultReport(fault_id=1, kind=kind, scope=Scope.RANK, reason="r", message="m", age_ns=0)
    culprit = Culprit(kind=kind, node="a", rank=3, local_rank=3, gpu=None, reason="r")
    found = Incident(
        id="i",
        job="job",
        generation=1,
        topology_version=1,
        trigger="t",
        faults=(NodeFault(node="a", at_ns=0, report=fault),),
        snapshots=(RankSnapshot(rank=3, node="a", local_rank=3, phase=phase),),
        finding=Finding(outcome="attributed", basis="direct", why="w", culprit=culprit),
        decision=Decision(mode=RestartMode.PROCESS, reason="r", backoff_s=backoff_s),
    )
    for name, at_s in stones.items():
        found = found.reached(IncidentPhase(name), at_s * S)
    return found


def seen(phase: JobPhase, step: int | None = None, it: Incident | None = None) -> Seen:
    """Return a look at a job of eight ranks that tell their steps."""
    return Seen(phase=phase, ranks=RANKS, step=step, attached=True, incident=it)


def spent(ledger: Ledger) -> Mapping[str, float]:
    """Return the accounts that hold anything, in seconds."""
    return {name.value: ns / S for name, ns in ledger.booked_ns.items() if ns}


def recovered(it: Incident) -> Ledger:
    """Return the accounts of a job that broke at second 40 and passed its old step at 100."""
    ledger = Ledger.begin(0)
    ledger.look(5 * S, seen(JobPhase.STARTING))
    ledger.look(8 * S, seen(JobPhase.RUNNING))
    ledger.look(10 * S, seen(JobPhase.RUNNING, 1))
    ledger.look(40 * S, seen(JobPhase.RUNNING, 31))
    ledger.look(50 * S, seen(JobPhase.LOCALIZING, 31, it))
    ledger.look(53 * S, seen(JobPhase.STOPPING, 31, it))
    ledger.look(55 * S, seen(JobPhase.WAITING, None, it))
    ledger.look(65 * S, seen(JobPhase.STARTING, None, it))
    ledger.look(67 * S, seen(JobPhase.RUNNING, None, it))
    ledger.look(70 * S, seen(JobPhase.RUNNING, 11))
    ledger.look(90 * S, seen(JobPhase.RUNNING, 31))
    ledger.look(100 * S, seen(JobPhase.RUNNING, 41))
    return ledger


STONES = {"fault": 42, "detected": 50, "localized": 51, "captured": 52, "decided": 55}


def test_a_recovery_is_split_into_what_it_was() -> None:
    """A slow stop booked as a slow start sends people to the wrong part."""
    ledger = recovered(incident(backoff_s=4.0, **STONES))
    assert spent(ledger) == {
        "waiting_for_node": 5 + 6,
        "starting": 3 + 2,
        "loading": 2 + 3,
        "productive": 30 + 2 + 10,
        "detecting": 9,
        "capturing": 1,
        "stopping": 3,
        "deciding": 4,
        "recompute": 20,
    }
    assert ledger.held_ns == 0
    lost = {cause: ns / S for cause, ns in ledger.lost_rank_ns.items() if ns}
    assert lost == {"start": 10 * RANKS, "crash": (100 - 42 - 10) * RANKS}


def test_slowness_and_a_stalled_save_are_named_after_what_they_were() -> None:
    """Time lost to a slow rank or to storage hides behind "detecting"."""
    slow = spent(recovered(incident(FaultKind.LOG_SLOW, **STONES)))
    assert (slow["straggling"], slow["detecting"]) == (8, 1)
    saving = incident(FaultKind.PROCESS_STALL, phase=Phase.CHECKPOINT, **STONES)
    found = spent(recovered(saving))
    assert (found["checkpoint_stall"], found["detecting"]) == (8, 1)
    elsewhere = spent(recovered(incident(FaultKind.PROCESS_STALL, **STONES)))
    assert elsewhere["detecting"] == 9


def test_running_time_waits_for_the_step_that_confirms_it() -> None:
    """A hung job would look productive until somebody notices, and then lose it again."""
    ledger = Ledger.begin(0)
    ledger.look(0, seen(JobPhase.RUNNING, 5))
    ledger.look(100 * S, seen(JobPhase.RUNNING, 5))
    assert spent(ledger) == {}
    assert ledger.held_ns == 100 * S
    ledger.look(110 * S, seen(JobPhase.RUNNING, 6))
    assert spent(ledger) == {"productive": 110}


def test_a_pause_that_was_none_stays_running_time() -> None:
    """A look that convicted nobody costs the job nothing."""
    ledger = Ledger.begin(0)
    ledger.look(0, seen(JobPhase.RUNNING, 5))
    ledger.look(10 * S, seen(JobPhase.LOCALIZING, 5, incident(fault=3, detected=10)))
    ledger.look(11 * S, seen(JobPhase.RUNNING, 5))
    ledger.look(12 * S, seen(JobPhase.RUNNING, 6))
    assert spent(ledger) == {"productive": 12}


def test_workers_that_tell_no_steps_count_as_productive_while_they_run() -> None:
    """A job without the shim would never have done anything."""
    ledger = Ledger.begin(0)
    untold = Seen(phase=JobPhase.RUNNING, ranks=RANKS)
    for second in (0, 10, 20):
        ledger.look(second * S, untold)
    assert spent(ledger) == {"productive": 20}


def test_what_passes_after_the_end_is_idle_and_lowers_no_share() -> None:
    """A coordinator that lingers for a week would halve the job's goodput."""
    ledger = recovered(incident(backoff_s=4.0, **STONES))
    ledger.look(110 * S, seen(JobPhase.COMPLETED, 41))
    before = report("job", ledger)
    ledger.look(900 * S, seen(JobPhase.COMPLETED))
    after = report("job", ledger)
    assert after.accounts_s["idle"] == 790
    assert (before.goodput, before.ettr) == (after.goodput, after.ettr)
    assert after.ettr == 52 / 110
    assert after.goodput == 52 / (110 - 11)
    assert after.lost_gpu_hours == {"start": 80 / 3600, "crash": 48 * RANKS / 3600}


PHASES = st.sampled_from(list(JobPhase))
INCIDENTS = st.none() | st.builds(
    lambda kind, stones: incident(
        kind, **{phase.value: at for phase, at in zip(IncidentPhase, stones, strict=False)}
    ),
    st.sampled_from(list(FaultKind)),
    st.lists(st.integers(0, 4000), max_size=9),
)
LOOKS = st.lists(
    st.tuples(
        st.integers(-50, 400),
        st.builds(
            Seen,
            phase=PHASES,
            ranks=st.just(RANKS),
            step=st.none() | st.integers(0, 50),
            attached=st.booleans(),
            incident=INCIDENTS,
        ),
        st.booleans(),
    ),
    max_size=40,
)


@given(LOOKS)
def test_every_nanosecond_is_in_exactly_one_account(
    looks: list[tuple[int, Seen, bool]],
) -> None:
    """Shares of a whole that is not the wall clock convince nobody."""
    begun = 7_000 * S
    ledger, now, before = Ledger.begin(begun), begun, dict.fromkeys(Account, 0)
    latest = begun
    for step_s, look, restarted in looks:
        now += step_s * S
        latest = max(latest, now)
        if restarted:
            ledger = decode_ledger(encode_ledger(ledger))
        ledger.look(now, look)
        assert sum(ledger.booked_ns.values()) + ledger.held_ns == latest - begun
        assert all(ledger.booked_ns[name] >= before[name] for name in Account)
        before = dict(ledger.booked_ns)
        lost = sum(
            ns
            for name, ns in ledger.booked_ns.items()
            if name not in (Account.PRODUCTIVE, Account.IDLE)
        )
        assert sum(ledger.lost_rank_ns.values()) == lost * RANKS
        assert set(ledger.lost_rank_ns) == set(CAUSES)
    told = report("job", ledger)
    assert abs(sum(told.accounts_s.values()) + told.held_s - told.wall_s) < 1e-6
