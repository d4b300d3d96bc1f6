import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.culprit import damaged_at, judge
from coordinator.escalation import Back, RestartPolicy, decide
from coordinator.incidents import NodeFault
from coordinator.lost_peer import is_victim
from coordinator.restart_depth import Depth
from scout.hang import GroupPosition, Phase, RankSnapshot
from sidecar.api import ExitCause, FaultKind, FaultReport, Scope
from worker_shim.messages import RestartMode

MS = 1_000_000
NOW = 1_800_000_000_000 * MS
WORLD = ("node-0", "node-1", "node-2", "node-3")
STALL_NS = 5_000 * MS

GLOO = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] "
    "Connection closed by peer [127.0.0.1]:39443"
)


def a_fault(kind, rank=None, *, ms=0, node=None, **report) -> NodeFault:
    """Return a report about ``rank``, ``ms`` after the first moment."""
    fields = {
        "fault_id": 1,
        "kind": kind,
        "scope": Scope.RANK,
        "reason": "Reason",
        "message": "something broke",
        "age_ns": 0,
        "rank": rank,
    }
    node = node or WORLD[rank or 0]
    return NodeFault(node=node, at_ns=NOW + ms * MS, report=FaultReport(**(fields | report)))


def a_crash(rank, *lines, ms=0, code=1, signal=None, by="", **more) -> NodeFault:
    """Return the crash of ``rank`` with its last lines."""
    ended = ExitCause(code=None if signal else code, signal=signal, by=by)
    return a_fault(FaultKind.CRASH, rank, ms=ms, exit=ended, evidence=tuple(lines), **more)


def a_nan(rank, step, ms=0, line="step 31 loss: nan") -> NodeFault:
    """Return a log rule's report of a value that is not finite."""
    return a_fault(
        FaultKind.LOG_RULE, rank, ms=ms, step=step, reason="LogFault_NonFinite", evidence=(line,)
    )


def judged(*faults, snapshots=(), nproc=1):
    """Judge ``faults`` in the usual world."""
    return judge(faults, snapshots, WORLD, nproc, STALL_NS)


def named(finding):
    """Return (node, rank) of the culprit, who must have been named."""
    assert finding.culprit is not None, finding.why
    assert finding.outcome == "attributed"
    return finding.culprit.node, finding.culprit.rank


# --- crashes ------------------------------------------------------------------------------------


def test_a_killed_rank_is_the_culprit_although_its_victims_were_heard_first():
    """The victims report within milliseconds; the killed one's node may be the last to speak."""
    victims = [a_crash(rank, "Traceback", GLOO, ms=rank) for rank in (0, 2, 3)]
    finding = judged(*victims, a_crash(1, ms=40, signal=9))
    assert named(finding) == ("node-1", 1)
    assert finding.why == (
        "rank 1 on node-1 was killed by SIGKILL (signal 9); ranks 0, 2, 3 only lost their peer"
    )
    assert finding.culprit.reason == "SIGKILL (signal 9)"
    assert [item.ranks for item in finding.dissent] == [(0,), (2,), (3,)]


def test_a_rank_that_the_kernel_killed_is_told_with_the_reason():
    """The same batch size would be tried again, on node after node."""
    later = a_crash(1, signal=9, ms=30, by="the kernel's OOM killer")
    for faults in ((a_crash(1, signal=9), later), (later,)):
        finding = judged(*faults, a_crash(0, "Connection closed by peer", ms=1))
        assert named(finding) == ("node-1", 1)
        assert "was killed by the kernel's OOM killer with SIGKILL (signal 9)" in finding.why
        assert finding.culprit.reason == "SIGKILL (signal 9) from the kernel's OOM killer"


def test_an_exception_of_its_own_is_told_from_a_lost_connection():
    """Blaming the rank that printed first sends a person to the wrong machine."""
    finding = judged(
        a_crash(0, "RuntimeError: Connection reset by peer"),
        a_crash(2, "ValueError: bad batch 17", ms=9),
        a_crash(3, "torch.distributed.DistBackendError: NCCL error, remote process exited", ms=10),
    )
    assert named(finding) == ("node-2", 2)
    assert finding.culprit.reason == "exit code 1, ValueError"
    assert "ValueError: bad batch 17" in finding.why
    assert "ranks 0, 3 only lost their peer" in finding.why


def test_a_death_by_signal_comes_before_an_earlier_exception():
    """An exception may be a consequence in words we do not know; SIGSEGV never is."""
    finding = judged(a_crash(3, "RuntimeError: unheard of"), a_crash(1, ms=20, signal=11))
    assert named(finding) == ("node-1", 1)
    assert "rank 3 failed as well" in finding.why


def test_most_ranks_failing_in_one_way_convict_nobody():
    """A missing module on every rank is not the fault of the fastest rank's node."""
    finding = judged(*[a_crash(n, "ModuleNotFoundError: No module named 'x'") for n in range(4)])
    assert finding.outcome == "agree"
    assert finding.culprit is None
    assert "ranks 0, 1, 2, 3 failed in the same way" in finding.why


def test_victims_alone_point_at_the_first_and_say_that_this_is_weak():
    """Certainty that does not exist makes people stop looking."""
    finding = judged(a_crash(2, GLOO), a_crash(0, GLOO, ms=8), a_crash(3, GLOO, ms=9))
    assert named(finding) == ("node-2", 2)
    assert "the first by 8 ms, which is weak evidence" in finding.why


def test_victims_within_milliseconds_convict_nobody():
    """The order of two reports that crossed a network is noise."""
    finding = judged(a_crash(2, GLOO), a_crash(0, GLOO, ms=3), a_crash(3, GLOO, ms=90))
    assert finding.outcome == "inconclusive"
    assert finding.culprit is None
    assert "ranks 0, 2 did so within 5 ms" in finding.why


def test_ranks_whose_time_ran_out_do_not_convict_one_of_themselves():
    """The rank that waited longest is the one that certainly came."""
    line = "RuntimeError: Timed out waiting 4000ms for recv operation to complete"
    finding = judged(*[a_crash(rank, line, ms=90 * rank) for rank in (0, 2, 3)])
    assert finding.outcome == "inconclusive"
    assert "ranks 0, 2, 3 gave up waiting for a peer; rank 1 did not fail" in finding.why


def test_the_prefix_that_torch_prints_does_not_hide_the_exception():
    """With a process group, torch starts each line of a traceback with the rank."""
    finding = judged(a_crash(1, "[rank1]: ValueError: bad batch"), a_crash(0, f"[rank0]: {GLOO}"))
    assert named(finding) == ("node-1", 1)
    assert finding.culprit.reason == "exit code 1, ValueError"
    alike = judged(*[a_crash(rank, f"[rank{rank}]: KeyError: 'lr'") for rank in range(4)])
    assert alike.outcome == "agree"


def test_a_node_that_cannot_start_its_workers_is_named():
    """A missing interpreter on one node would otherwise look like a fault of nobody."""
    spawn = a_fault(
        FaultKind.CRASH, node="node-2", scope=Scope.NODE, message="no such file: python"
    )
    assert named(judged(spawn)) == ("node-2", None)


@pytest.mark.parametrize(
    ("line", "signal", "victim"),
    [
        (GLOO, None, True),
        ("RuntimeError: Connection was lost", None, True),
        ("BrokenPipeError: [Errno 32] Broken pipe", None, True),
        ("ncclRemoteError: A call failed possibly due to a network error", None, True),
        ("[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(...)", 6, True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", None, True),
        (GLOO, 9, False),
        (GLOO, 11, False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", None, False),
        ("DistBackendError: NCCL error: unhandled cuda error", None, False),
        ("ValueError: connection string is empty", None, False),
    ],
)
def test_last_words_tell_victims_from_culprits(line, signal, victim):
    """Every recovery's culprit hangs on this distinction."""
    assert is_victim(a_crash(1, "Traceback", line, signal=signal)) is victim


# --- hardware, nodes, people --------------------------------------------------------------------


def test_a_fatal_gpu_fault_comes_before_everything_it_causes():
    """The crash that follows an XID is restarted on the same broken device for ever."""
    gpu = a_fault(
        FaultKind.GPU_FATAL, node="node-2", gpu=1, reason="XID 79", message="fell off the bus", ms=5
    )
    finding = judged(a_crash(5, "CUDA error: device lost", node="node-2"), gpu, nproc=2)
    assert named(finding) == ("node-2", 5)
    culprit = finding.culprit
    assert (culprit.gpu, culprit.local_rank, culprit.reason) == (1, 1, "XID 79")
    assert (
        finding.why == "GPU 1 of node-2 (used by rank 5) reported a fatal fault: fell off the bus"
    )
    assert len(finding.evidence) == 2


def test_a_gpu_that_no_worker_uses_is_no_rank():
    """A made-up rank sends a person to a healthy worker."""
    gpu = a_fault(FaultKind.GPU_FATAL, node="node-2", gpu=7)
    assert named(judged(gpu)) == ("node-2", None)


def test_a_lost_node_is_named_with_the_ranks_it_held():
    """The survivors only see closed connections."""
    lost = a_fault(FaultKind.NODE_LOST, node="node-3", message="silent for 15 s", ms=100)
    finding = judged(a_crash(0, GLOO), lost)
    assert named(finding) == ("node-3", 3)
    assert finding.why == "node-3 (rank 3) is lost: silent for 15 s"
    told = a_fault(FaultKind.NODE_LOST, node="node-3", message="node-3 is lost: silent for 15 s")
    assert judged(told).why == finding.why
    pair = judged(a_fault(FaultKind.NODE_LOST, node="node-3", message="gone"), nproc=2)
    assert named(pair) == ("node-3", None)
    assert "(ranks 6, 7)" in pair.why


def test_two_broken_nodes_are_both_mentioned():
    """Replacing one of two broken nodes costs a second restart."""
    faults = [a_fault(FaultKind.NODE_LOST, node=f"node-{n}", ms=n) for n in (2, 1)]
    finding = judged(*faults)
    assert named(finding) == ("node-1", 1)
    assert "the same was reported of node-2" in finding.why


def test_an_idle_spares_fault_does_not_cover_the_jobs_own():
    """A broken spare must not take the blame for a killed rank."""
    spare = a_fault(FaultKind.GPU_FATAL, node="node-9", gpu=0)
    assert named(judged(spare, a_crash(1, signal=9))) == ("node-1", 1)
    assert named(judged(spare)) == ("node-9", None)


def test_a_persons_request_is_nobodys_fault_but_theirs():
    """A restart by hand must not be booked on a node."""
    asked = a_fault(FaultKind.OPERATOR, node="", message="ada asks: new data", reason="restart")
    finding = judged(asked, a_crash(1, GLOO))
    assert finding.culprit is not None
    assert finding.culprit.kind is FaultKind.OPERATOR
    assert finding.why == "ada asks: new data"


# --- logs and workers ---------------------------------------------------------------------------


def test_the_first_step_that_is_not_finite_names_its_rank():
    """A NaN reaches every rank with the next all-reduce; the first one made it."""
    finding = judged(a_nan(0, 32, ms=1), a_nan(2, 31, ms=9), a_nan(3, 32, ms=2))
    assert named(finding) == ("node-2", 2)
    assert finding.why == (
        "rank 2 on node-2 was the first to print a value that is not finite at step 31: "
        "step 31 loss: nan; ranks 0, 3 printed one later, as it spreads with the next all-reduce"
    )
    assert damaged_at([a_nan(0, 32), a_nan(2, 31)]) == 31


def test_a_nan_that_every_rank_prints_at_once_names_nobody():
    """A loss that is averaged before it is printed is everybody's."""
    finding = judged(*[a_nan(rank, 31, ms=30 * rank) for rank in range(3)])
    assert finding.outcome == "inconclusive"
    assert "ranks 0, 1, 2 printed" in finding.why


def test_infinities_count_and_ordinary_words_do_not():
    """'INFO' read as infinity would convict the rank with the noisiest logger."""
    for line in ("loss=inf", "grad_norm: -inf", "Loss: NaN", "non-finite loss", "loss -Infinity"):
        assert damaged_at([a_nan(0, 7, line=line)]) == 7, line
    for line in ("INFO nothing", "banana", "config: info", "x=nano", "inference=inf2"):
        fault = a_nan(0, 7, line=line)
        assert damaged_at([fault]) is None, line


def test_a_log_rule_or_a_worker_names_its_rank_when_nothing_is_more_direct():
    """Out of memory in the log is the cause; the crash of its peers is not."""
    rule = a_fault(FaultKind.LOG_RULE, 1, ms=5, message="CUDA out of memory", reason="LogFault_OOM")
    assert named(judged(a_crash(0, GLOO), rule)) == ("node-1", 1)
    spoken = a_fault(FaultKind.WORKER_REPORTED, 3, message="data shard unreadable")
    finding = judged(spoken, a_crash(0, GLOO))
    assert named(finding) == ("node-3", 3)
    assert finding.why == "rank 3 on node-3 reported a fault itself: data shard unreadable"


def test_a_worker_that_reports_a_lost_peer_is_a_victim_too():
    """A polite victim must not be convicted for its manners."""
    polite = a_fault(FaultKind.WORKER_REPORTED, 0, message="Connection closed by peer")
    assert named(judged(polite, a_crash(2, "ValueError: x", ms=30))) == ("node-2", 2)


# --- stalls -------------------------------------------------------------------------------------


def a_snapshot(rank, **more) -> RankSnapshot:
    """Return a rank that waits in a collective, or as ``more`` says."""
    fields = {
        "step": 30,
        "phase": Phase.COLLECTIVE,
        "collective_seq": 100,
        "progress_age_ns": 6_000 * MS,
        "heartbeat_age_ns": 100 * MS,
        "process_state": "S",
    }
    return RankSnapshot(rank=rank, node=WORLD[rank], local_rank=0, **(fields | more))


def a_stall(rank, ms=0) -> NodeFault:
    """Return the report that ``rank`` makes no progress."""
    return a_fault(FaultKind.PROCESS_STALL, rank, ms=ms, message="no step for 6 s")


STOPPED = [a_snapshot(rank) for rank in (0, 2, 3)] + [
    a_snapshot(1, process_state="T", heartbeat_age_ns=6_000 * MS, collective_seq=99)
]


def test_a_stopped_process_is_the_culprit_of_a_stall():
    """All four ranks stand still; only one of them is the reason."""
    finding = judged(a_stall(0), a_stall(2), a_stall(3), snapshots=STOPPED)
    assert named(finding) == ("node-1", 1)
    assert finding.culprit.reason == "process_stall: the process is stopped"
    assert finding.culprit.kind is FaultKind.PROCESS_STALL
    assert finding.why.startswith("rank 1 on node-1 holds the others up: ")


def test_victims_that_time_out_do_not_hide_the_stopped_process():
    """When the collective times out first, the crashes are the hang's echo."""
    finding = judged(
        a_crash(0, "RuntimeError: Timed out waiting 5000ms for recv operation"),
        a_crash(3, GLOO, ms=40),
        snapshots=STOPPED,
    )
    assert named(finding) == ("node-1", 1)


def test_a_stall_without_snapshots_convicts_nobody():
    """Silence about everybody is no evidence against anybody."""
    finding = judged(a_stall(0), a_stall(2))
    assert finding.outcome == "inconclusive"
    assert finding.culprit is None
    assert finding.why
    assert len(finding.evidence) >= 2


def in_collective(rank, print_, **more) -> RankSnapshot:
    """Return a rank inside one collective of the whole job."""
    group = GroupPosition(
        name="0", ranks=(0, 1, 2, 3), seq=9, op="all_reduce", fingerprint=print_, inside=True
    )
    return a_snapshot(rank, groups=(group,), progress_age_ns=200 * MS, **more)


ENFORCE = (
    "what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] "
    "op.preamble.length <= op.nbytes. 262144 vs 4"
)


def test_who_sends_too_much_is_named_and_not_the_one_that_aborts_of_it():
    """The healthy receiver is the first to die."""
    finding = judged(
        a_crash(1, ENFORCE, signal=6),
        snapshots=[in_collective(rank, 8 if rank == 2 else 7) for rank in range(4)],
    )
    assert named(finding) == ("node-2", 2)
    assert finding.basis == "majority"
    assert finding.culprit.reason.endswith("it is in another collective than the others")


def test_torchs_own_comparison_names_the_minority():
    """Every rank crashes with it, and whoever crashed first would be called the culprit."""
    line = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running "
        "collective: CollectiveFingerPrint(SequenceNumber=9, OpType=ALLREDUCE), but Rank 2 is "
        "running collective: CollectiveFingerPrint(SequenceNumber=9, OpType=BROADCAST)."
    )
    crashes = [a_crash(rank, line.format(rank), ms=rank) for rank in (0, 1, 3)]
    assert named(judged(*crashes)) == ("node-2", 2)


# --- properties ---------------------------------------------------------------------------------


def test_every_rank_that_names_the_corrupt_one_speaks_for_the_verdict_and_once():
    """Filed as dissent, agreement of the whole job looks like doubt on the incident's page."""
    told = [a_fault(FaultKind.SDC, 2, node=node) for node in WORLD for _ in range(2)]
    other = a_fault(FaultKind.LOG_SLOW, 0)
    finding = judged(*told, other)
    assert named(finding) == ("node-2", 2)
    assert [(it.surface, it.ranks) for it in finding.evidence] == [("replay", (2,))]
    assert [it.ranks for it in finding.dissent] == [(0,)]


def test_no_report_at_all_is_an_answer():
    """The core may ask before anybody spoke."""
    assert judged().outcome == "agree"
    assert judge([a_crash(1, signal=9)], [], (), 1, STALL_NS).culprit is not None


any_fault = st.one_of(
    st.builds(
        a_crash,
        st.integers(0, 3),
        st.sampled_from([GLOO, "ValueError: x", "", "\x1b[31mboom"]),
        ms=st.integers(0, 50),
        signal=st.sampled_from([None, 6, 9, 11]),
    ),
    st.builds(
        a_nan, st.integers(0, 3), st.one_of(st.none(), st.integers(0, 3)), st.integers(0, 50)
    ),
    st.builds(
        lambda kind, rank, ms: a_fault(kind, rank, ms=ms),
        st.sampled_from(FaultKind),
        st.integers(0, 3),
        st.integers(0, 50),
    ),
    st.builds(
        lambda gpu, n: a_fault(FaultKind.GPU_FATAL, node=f"node-{n}", gpu=gpu),
        st.one_of(st.none(), st.integers(0, 9)),
        st.integers(0, 9),
    ),
)


@given(st.lists(any_fault, max_size=8), st.lists(st.sampled_from(STOPPED), unique=True))
def test_every_judgement_is_explained_and_names_somebody_who_was_reported(faults, snapshots):
    """A finding without a reason, or about a bystander, is worse than none."""
    finding = judged(*faults, snapshots=snapshots)
    assert finding.why
    assert "\x1b" not in str(finding)
    assert (finding.outcome == "attributed") == (finding.culprit is not None)
    assert (finding.basis is not None) == (finding.culprit is not None)
    if finding.culprit is not None:
        seen = {fault.node for fault in faults} | {item.node for item in snapshots}
        assert finding.culprit.node in seen | set(WORLD)
        rank = finding.culprit.rank
        if rank is not None:
            assert WORLD[rank] == finding.culprit.node
        if finding.culprit.kind is not FaultKind.PROCESS_STALL:
            assert len(finding.evidence) + len(finding.dissent) >= 1


@given(st.lists(any_fault, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_decide(faults, rng):
    """The network must not choose the culprit."""
    faults = [
        NodeFault(node=fault.node, at_ns=NOW + 10 * index * MS, report=fault.report)
        for index, fault in enumerate(faults)
    ]
    shuffled = faults[:]
    rng.shuffle(shuffled)
    assert judged(*faults) == judged(*shuffled)


def test_c99_a_process_killed_for_memory_before_the_timeouts_is_the_root_and_no_bad_node():
    """The ranks only say "timeout": healthy nodes would be left out, and the size kept."""
    words = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    killed = a_crash(
        2,
        "kernel: python3 was killed by the kernel's OOM killer: the host was out of memory",
        ms=-600_000,
        signal=9,
        by="the kernel's OOM killer",
    )
    timeouts = [
        a_fault(FaultKind.LOG_RULE, rank, reason="LogFault_Nccl", message=words, evidence=(words,))
        for rank in (0, 1, 3)
    ]
    aborts = [a_crash(rank, words, ms=5, signal=6) for rank in (0, 1, 3)]
    faults = [*timeouts, *aborts, killed]
    finding = judged(*faults)
    assert named(finding) == ("node-2", 2)
    assert finding.culprit.reason == "SIGKILL (signal 9) from the kernel's OOM killer"
    assert "killed by the kernel's OOM killer" in finding.why
    circumstances = {"faults": faults, "checkpoint_step": 10, "stepped": True}
    wanted, back = Depth(mode=RestartMode.IN_PROCESS), Back(world_size=4)
    decision = decide(RestartPolicy(), (), finding, wanted, NOW, back=back, **circumstances)
    assert decision.exclude_nodes == ()


# --- confidence ---------------------------------------------------------------------------------


def test_how_sure_a_finding_is_stands_in_it():
    """A node would be drained on weak evidence, or kept despite the strongest."""
    assert judged(a_crash(1, signal=9)).confidence == "high"
    assert judged(a_stall(0), snapshots=STOPPED).confidence == "high"
    desync = [in_collective(rank, 8 if rank == 2 else 7) for rank in range(4)]
    assert judged(a_crash(1, ENFORCE, signal=6), snapshots=desync).confidence == "medium"
    assert judged(a_crash(1, GLOO), a_crash(0, GLOO, ms=50)).confidence == "low"
    assert judged(a_stall(0), a_stall(2)).confidence == "none"
