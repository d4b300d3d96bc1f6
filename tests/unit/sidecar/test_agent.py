"""The agent core: commands, findings, and what the coordinator is told."""

from dataclasses import replace

import pytest

from scout.clock import SECOND, Instant
from scout.hang import RankSnapshot
from sidecar.agent import AgentCore
from sidecar.agent_config import AgentConfig
from sidecar.api import (
    AgentState,
    CheckpointPointer,
    ExitCause,
    FaultKind,
    Shutdown,
    Start,
    Stop,
)
from sidecar.events import (
    AnswerWorker,
    CommandReceived,
    HardwareFinding,
    HardwareRecovered,
    KillWorkers,
    LogFinding,
    PortReserved,
    ProcessNote,
    ProgressObserved,
    Quit,
    Reply,
    Report,
    ReservePort,
    SpawnWorkers,
    WatchLogs,
    WorkerExited,
    WorkersGone,
    WorkerSpoke,
    WorkersSpawned,
)
from worker_shim.messages import (
    Ack,
    CheckpointAnswer,
    CheckpointQuery,
    CheckpointSaved,
    Envelope,
    JobFault,
    RankLabels,
    Refusal,
    RestartMode,
)

T0 = Instant(10 * SECOND)


def at(seconds: float) -> Instant:
    return Instant(T0 + round(seconds * SECOND))


def start(generation=1, **changes):
    fields = {
        "generation": generation,
        "topology_version": 1,
        "group_rank": 1,
        "nnodes": 4,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "fault_count": 0,
        "node_hosts": ("a", "b", "c", "d"),
        "stall_timeout_s": 5.0,
    }
    return Start(**{**fields, **changes})


def stop(generation=1, grace_s=0.0):
    return Stop(
        generation=generation, restart_mode=RestartMode.PROCESS, reason="test", grace_s=grace_s
    )


def ready(nproc=1):
    core = AgentCore(AgentConfig(job="j", node="n1", incarnation="i", nproc_per_node=nproc), T0)
    assert core.begin() == [ReservePort()]
    core.handle(PortReserved(port=4242), T0)
    assert core.state is AgentState.READY
    return core


def running(nproc=1, **changes):
    core = ready(nproc)
    core.handle(CommandReceived(command=start(**changes)), at(1))
    core.handle(WorkersSpawned(generation=1, pids=dict(enumerate(range(100, 100 + nproc)))), at(1))
    assert core.state is AgentState.RUNNING
    return core


def status_of(effects):
    return [e.message for e in effects if isinstance(e, Report)][-1]


def reply_of(effects):
    return next(e for e in effects if isinstance(e, Reply))


def exited(local_rank=0, generation=1, **cause):
    return WorkerExited(
        generation=generation, local_rank=local_rank, pid=100, cause=ExitCause(**cause)
    )


def test_a_start_spawns_once_however_often_it_is_told():
    """A repeated start that spawned again would put two processes on one rank."""
    core = ready()
    first = core.handle(CommandReceived(command=start()), at(1))
    again = core.handle(CommandReceived(command=start()), at(2))
    assert [e for e in first if isinstance(e, SpawnWorkers)]
    assert not [e for e in again if isinstance(e, SpawnWorkers)]


def test_a_start_of_a_stopped_generation_is_refused():
    """A late start would run workers that everybody believes stopped."""
    core = ready()
    core.handle(CommandReceived(command=stop(generation=3)), at(1))
    core.handle(WorkersGone(generation=3), at(1))
    effects = core.handle(CommandReceived(command=start(3), request_id=7), at(2))
    assert not [e for e in effects if isinstance(e, SpawnWorkers)]
    assert reply_of(effects).status == 409
    assert "generation 3" in reply_of(effects).reason


def test_a_crash_is_reported_with_its_true_cause_and_age():
    """An exit that reads as another exit makes every policy on causes wrong."""
    core = running()
    report = status_of(core.handle(exited(signal=9), at(2)))
    assert report.state is AgentState.FAULTED
    assert report.reason == "WorkerCrash"
    fault = report.faults[0]
    assert (fault.kind, fault.rank, fault.exit.signal) == (FaultKind.CRASH, 1, 9)
    assert core.snapshot(at(5)).faults[0].age_ns == 3 * SECOND


def note(pid=100, local_rank=None, **more):
    fields = {
        "reason": "OomKilled",
        "message": "the kernel's OOM killer ended python3",
        "line": "Killed process 100 (python3)",
        "killer": "the kernel's OOM killer",
    }
    return ProcessNote(pid=pid, local_rank=local_rank, **{**fields, **more})


def test_a_worker_that_the_kernel_killed_is_reported_with_the_killer():
    """A crash without its cause is tried again with the same batch size."""
    core = running()
    core.handle(note(), T0)
    (fault,) = status_of(core.handle(exited(signal=9), T0)).faults
    assert fault.reason == "OomKilled"
    assert fault.exit == ExitCause(signal=9, by="the kernel's OOM killer")
    assert "sent by the kernel's OOM killer" in fault.message
    assert fault.evidence[0] == "kernel: the kernel's OOM killer ended python3"


def test_a_reason_that_comes_after_the_death_is_told_as_well():
    """The kernel's log may be read a moment after the process is gone."""
    core = running()
    core.handle(exited(signal=9), T0)
    first, second = status_of(core.handle(note(), at(0.1))).faults
    assert (first.exit.by, second.exit.by) == ("", "the kernel's OOM killer")
    assert second.fault_id > first.fault_id
    core.handle(note(), at(0.2))
    assert len(core.snapshot(at(0.3)).faults) == 2


def test_the_kernels_word_about_another_process_is_evidence_or_nothing():
    """A worker would be called killed because one of its neighbours was."""
    core = running(nproc=2)
    core.handle(note(pid=4242), T0)
    core.handle(note(pid=555, local_rank=1), T0)
    core.handle(exited(0, signal=9), T0)
    (first,) = core.snapshot(T0).faults
    assert (first.exit.by, first.reason, first.evidence) == ("", "WorkerCrash", ())
    core.handle(exited(1, code=1), T0)
    second = core.snapshot(T0).faults[1]
    assert (second.exit.by, second.reason) == ("", "WorkerCrash")
    assert second.evidence == ("kernel: the kernel's OOM killer ended python3",)


def test_what_the_kernel_said_of_an_older_generation_explains_nothing_later():
    """A pid is given again; its new owner would inherit the old one's death."""
    core = running()
    core.handle(note(), T0)
    core.handle(CommandReceived(command=stop()), T0)
    core.handle(WorkersGone(generation=1), T0)
    core.handle(CommandReceived(command=start(generation=2)), T0)
    core.handle(WorkersSpawned(generation=2, pids={0: 100}), T0)
    core.handle(exited(generation=2, signal=9), T0)
    (fault,) = core.snapshot(T0).faults
    assert fault.exit.by == ""


def test_all_workers_ending_cleanly_completes_the_node():
    """A finished node that looked running would be restarted for ever."""
    core = running(nproc=2)
    core.handle(exited(0, code=0), at(2))
    assert core.state is AgentState.RUNNING
    core.handle(exited(1, code=0), at(3))
    assert core.state is AgentState.COMPLETED


def test_a_stop_kills_then_reports_the_generation_stopped_and_a_fresh_port():
    """The coordinator starts the next generation on exactly this knowledge."""
    core = running()
    core.handle(exited(signal=9), at(2))
    effects = core.handle(CommandReceived(command=stop()), at(3))
    assert KillWorkers(generation=1, grace_s=0.0) in effects
    effects = core.handle(WorkersGone(generation=1), at(4))
    report = status_of(effects)
    assert (report.state, report.stopped_generation) == (AgentState.READY, 1)
    assert report.rendezvous_port == 0
    assert ReservePort() in effects
    report = status_of(core.handle(PortReserved(port=5000), at(4)))
    assert report.rendezvous_port == 5000
    assert report.faults == ()


def test_a_stop_before_any_start_is_legal():
    """A node that missed the start must still acknowledge the stop, or everybody waits for it."""
    core = ready()
    core.handle(CommandReceived(command=stop(generation=5)), at(1))
    core.handle(WorkersGone(generation=5), at(1))
    assert core.snapshot(at(2)).stopped_generation == 5


def test_a_stop_that_does_not_end_is_forced():
    """One worker that ignores a signal must not hold the whole job."""
    core = running()
    core.handle(CommandReceived(command=stop(grace_s=2.0)), at(3))
    due = at(3 + 2 + 5)
    assert core.next_deadline() <= due
    assert KillWorkers(generation=1, grace_s=0.0) in core.handle_timer(due)


def test_a_stop_for_an_older_generation_than_the_running_one_is_refused():
    """A stop that lingered in the network must not end the recovery that followed it."""
    core = running()
    core.handle(CommandReceived(command=stop()), at(2))
    core.handle(WorkersGone(generation=1), at(2))
    core.handle(PortReserved(port=1), at(2))
    core.handle(CommandReceived(command=start(2)), at(3))
    core.handle(CommandReceived(command=stop(generation=1)), at(4))
    assert core.state is AgentState.RUNNING


def test_messages_and_findings_of_an_older_generation_change_nothing():
    """A dying worker's last words must not convict the new generation."""
    core = running()
    core.handle(CommandReceived(command=stop()), at(2))
    core.handle(WorkersGone(generation=1), at(2))
    core.handle(PortReserved(port=1), at(2))
    core.handle(CommandReceived(command=start(2)), at(3))
    core.handle(exited(signal=9, generation=1), at(4))
    late = JobFault(local_rank=0, reason="Late")
    effects = core.handle(
        WorkerSpoke(
            connection=1, envelope=Envelope(client_id="c", seq=4, generation=1), message=late
        ),
        at(4),
    )
    assert isinstance(effects[0], AnswerWorker)
    assert isinstance(effects[0].reply, Refusal)
    assert core.state is AgentState.RUNNING
    assert core.snapshot(at(5)).faults == ()


def test_the_most_severe_restart_mode_asked_for_is_reported():
    """A rank that needs a job restart must not be outvoted by one that needs less."""
    core = running(nproc=2)
    for local_rank, mode in enumerate((RestartMode.JOB, RestartMode.IN_PROCESS)):
        core.handle(
            WorkerSpoke(
                connection=local_rank,
                envelope=Envelope(client_id="c", seq=1, generation=1),
                message=JobFault(local_rank=local_rank, reason="r", restart_mode=mode),
            ),
            at(2),
        )
    assert core.snapshot(at(2)).restart_mode is RestartMode.JOB


def test_a_stall_is_armed_by_the_first_step_and_cleared_by_the_next():
    """A slow first step is compilation, not a hang; a step after all is not a hang either."""
    core = running()

    def tick(step, age_s, now):
        seen = RankSnapshot(
            rank=1, node="n1", local_rank=0, step=step, progress_age_ns=round(age_s * SECOND)
        )
        core.handle(ProgressObserved(generation=1, ranks=(seen,)), now)
        return core.snapshot(now).ranks[0].stalled

    assert not tick(None, 100, at(100))
    assert not tick(7, 0, at(101))
    assert tick(7, 6, at(107))
    assert not tick(8, 0, at(108))


def test_the_first_step_is_told_at_once():
    """It ends a recovery: waiting for the next heartbeat would overstate every recovery time."""
    core = running()
    seen = RankSnapshot(rank=1, node="n1", local_rank=0, step=41, progress_age_ns=0)
    report = status_of(core.handle(ProgressObserved(generation=1, ranks=(seen,)), at(1.05)))
    assert report.ranks[0].step == 41


def test_a_confirmed_checkpoint_is_kept_over_a_restart_up_to_the_chosen_step():
    """Steps beyond the chosen one are written again; a mixture of two runs is no checkpoint."""
    core = running()
    for step in (10, 20, 30):
        core.handle(
            WorkerSpoke(
                connection=1,
                envelope=Envelope(client_id="c", seq=step, generation=1),
                message=CheckpointSaved(local_rank=0, prefix="p", step=step, path=f"/c/{step}"),
            ),
            at(2),
        )
    core.handle(CommandReceived(command=stop()), at(3))
    core.handle(WorkersGone(generation=1), at(3))
    core.handle(PortReserved(port=1), at(3))
    chosen = CheckpointPointer(prefix="p", step=20, path="/c/20")
    core.handle(CommandReceived(command=start(2, checkpoints=(chosen,))), at(4))
    assert [c.step for c in core.snapshot(at(4)).checkpoints] == [10, 20]
    effects = core.handle(
        WorkerSpoke(
            connection=1,
            envelope=Envelope(client_id="d", seq=1, generation=2),
            message=CheckpointQuery(local_rank=0, prefix="p"),
        ),
        at(5),
    )
    answer = CheckpointAnswer(prefix="p", step=20, path="/c/20", reply_to=1)
    assert effects[0] == AnswerWorker(connection=1, reply=answer)


def said(core, message, seq=1):
    """Return the core's answer to a worker's message."""
    envelope = Envelope(client_id="c", seq=seq, generation=1)
    event = WorkerSpoke(connection=1, envelope=envelope, message=message)
    (reply,) = (it.reply for it in core.handle(event, at(2)) if isinstance(it, AnswerWorker))
    return reply


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"step": -1}, "step -1 of p is no number of completed steps"),
        ({"step": -(1 << 70)}, "is no number of completed steps"),
        ({"step": 1 << 63}, "is no number of completed steps"),
        ({"path": "x" * 4097}, "the path of step 5 is none"),
        ({"path": "a\0b"}, "the path of step 5 is none"),
        ({"prefix": "p" * 257}, "at most 256 characters"),
    ],
)
def test_a_confirmation_of_what_cannot_be_is_refused_and_not_kept(more, words):
    """A step below zero would be chosen by no rule and repeated in every status."""
    core = running()
    fields = {"prefix": "p", "step": 5, "path": "/c"} | more
    reply = said(core, CheckpointSaved(local_rank=0, **fields))
    assert isinstance(reply, Refusal)
    assert words in reply.reason
    assert len(reply.reason) < 400
    assert core.snapshot(at(3)).checkpoints == ()


def test_labels_beyond_their_bounds_are_refused():
    """Each status repeats the labels of every rank: those of one must not fill it."""
    core = running()
    for labels in ({"dp": "x" * 257}, {"": "0"}, {str(it): "0" for it in range(65)}):
        assert isinstance(said(core, RankLabels(local_rank=0, labels=labels)), Refusal)
    assert isinstance(said(core, RankLabels(local_rank=0, labels={"dp": "3"})), Ack)
    assert core.snapshot(at(3)).ranks[0].labels == {"dp": "3"}


def test_a_start_from_the_beginning_forgets_every_confirmation():
    """What a given-up run saved in part would be made whole by files of the run that follows."""
    core = running()
    core.handle(
        WorkerSpoke(
            connection=1,
            envelope=Envelope(client_id="c", seq=1, generation=1),
            message=CheckpointSaved(local_rank=0, prefix="p", step=10, path="/c/10"),
        ),
        at(2),
    )
    core.handle(CommandReceived(command=stop()), at(3))
    core.handle(WorkersGone(generation=1), at(3))
    core.handle(PortReserved(port=1), at(3))
    core.handle(CommandReceived(command=start(2)), at(4))
    assert core.snapshot(at(4)).checkpoints == ()


def test_a_hardware_fault_outlives_the_generation():
    """A restart does not mend a device; a node that forgot would be given ranks again."""
    core = running()
    core.handle(HardwareFinding(gpu=0, reason="Xid79", message="fell off", line="l"), at(2))
    assert core.state is AgentState.FAULTED
    core.handle(CommandReceived(command=stop()), at(3))
    core.handle(WorkersGone(generation=1), at(3))
    fault = core.snapshot(at(4)).faults[0]
    assert (fault.kind, fault.gpu, fault.rank) == (FaultKind.GPU_FATAL, 0, 1)


@pytest.mark.parametrize("reason", ["Xid79", "TemperatureC"])
def test_a_device_that_recovered_is_spoken_against_until_its_stop_is_over_and_no_longer(reason):
    """A node that a person gives ranks again would be excluded for what was mended long ago."""
    core = running()
    core.handle(HardwareFinding(gpu=0, reason=reason, message="bad", line="l"), at(2))
    core.handle(HardwareFinding(gpu=1, reason=reason, message="bad", line="l"), at(2))
    well = HardwareRecovered(gpu=0, reason=reason.removesuffix("79"), message="well again")
    core.handle(well, at(3))
    assert core.state is AgentState.FAULTED
    assert len(core.snapshot(at(3)).faults) == 2, "the reason of the stop is kept"
    core.handle(CommandReceived(command=stop()), at(3))
    core.handle(WorkersGone(generation=1), at(3))
    assert [fault.gpu for fault in core.snapshot(at(4)).faults] == [1]
    core.handle(PortReserved(port=1), at(4))
    core.handle(replace(well, gpu=1), at(5))
    assert core.snapshot(at(5)).faults == ()


def lost(gpu, reason="Xid79", **more):
    return HardwareFinding(gpu=gpu, reason=reason, message="fell off", line="l", **more)


def test_one_hardware_fault_told_by_two_sources_is_one_fault():
    """The echo would stop the run that was started after it, and spend a second restart."""
    core = running()
    core.handle(lost(0), at(2))
    core.handle(CommandReceived(command=stop()), at(3))
    core.handle(WorkersGone(generation=1), at(3))
    core.handle(PortReserved(port=1), at(3))
    core.handle(CommandReceived(command=start(2)), at(4))
    core.handle(lost(0), at(6))
    assert core.state is AgentState.RUNNING
    assert len(core.snapshot(at(6)).faults) == 1
    core.handle(lost(0, reason="RemapFailure"), at(7))
    core.handle(lost(1), at(7))
    faults = core.snapshot(at(7)).faults
    assert [(f.gpu, f.reason) for f in faults] == [(0, "Xid79"), (0, "RemapFailure"), (1, "Xid79")]


def test_a_device_that_fails_again_much_later_is_a_fault_again():
    """A node that was kept for want of a spare would train on a dead device."""
    core = running()
    core.handle(lost(0), at(2))
    core.handle(CommandReceived(command=stop()), at(3))
    core.handle(WorkersGone(generation=1), at(3))
    core.handle(PortReserved(port=1), at(3))
    core.handle(CommandReceived(command=start(2)), at(4))
    core.handle(lost(0), at(600))
    assert core.state is AgentState.FAULTED


def test_a_hardware_fault_names_the_rank_that_used_the_device():
    """With CUDA_VISIBLE_DEVICES the rank of the device's number is somebody else."""

    def said(finding, nproc=4):
        core = running(nproc)
        core.handle(finding, at(2))
        (fault,) = core.snapshot(at(2)).faults
        return fault.rank, fault.local_rank, fault.message

    assert said(lost(3)) == (7, 3, "fell off")
    assert said(lost(6, local_ranks=(1,))) == (5, 1, "fell off")
    assert said(lost(0, local_ranks=())) == (None, None, "fell off")
    assert said(lost(0, local_ranks=(2, 3))) == (6, 2, "fell off (used by ranks 6, 7)")
    assert said(lost(None)) == (None, None, "fell off")


def test_log_rules_are_watched_from_the_moment_workers_run():
    """A rule that is never armed finds nothing."""
    core = ready()
    rules = ({"name": "r", "logPattern": "x"},)
    core.handle(CommandReceived(command=start(log_rules=rules)), at(1))
    effects = core.handle(WorkersSpawned(generation=1, pids={0: 100}), at(1))
    # Four nodes of one rank: a rule may be about the last one.
    assert WatchLogs(generation=1, rules=rules, world_size=4) in effects
    core.handle(
        LogFinding(
            generation=1,
            local_rank=0,
            kind=FaultKind.LOG_RULE,
            rule="NonFiniteLoss",
            message="m",
            line="loss nan",
            step=12,
        ),
        at(2),
    )
    fault = core.snapshot(at(2)).faults[0]
    assert (fault.reason, fault.step) == ("LogFault_NonFiniteLoss", 12)


def test_shutdown_kills_quits_and_ends_even_if_workers_do_not():
    """A daemon that cannot be ended has to be killed by a person at night."""
    core = running()
    effects = core.handle(CommandReceived(command=Shutdown(reason="done")), at(2))
    assert KillWorkers(generation=1, grace_s=0.0) in effects
    assert Quit(code=0, reason="shut down") in core.handle(WorkersGone(generation=1), at(3))
    stuck = running()
    stuck.handle(CommandReceived(command=Shutdown(reason="done")), at(2))
    effects = stuck.handle_timer(at(13))
    assert [e for e in effects if isinstance(e, Quit)]


def test_silence_is_broken_by_a_heartbeat():
    """Without it the coordinator cannot tell a healthy node from a lost one."""
    core = running()
    due = core.next_deadline()
    assert due is not None
    assert [e for e in core.handle_timer(due) if isinstance(e, Report)]
