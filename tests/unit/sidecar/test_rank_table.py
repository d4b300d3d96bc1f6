"""The node's table of hosts: who may change it, from what, and who is told."""

from dataclasses import replace

from sidecar.agent import AgentCore
from sidecar.agent_config import AgentConfig
from sidecar.api import RankHost, Start, Stop, Update
from sidecar.events import (
    AnswerWorker,
    CommandReceived,
    KeepTable,
    Orders,
    PortReserved,
    Reply,
    SpawnWorkers,
    WorkersGone,
    WorkerSpoke,
    WorkersSpawned,
)
from sidecar.rank_table import RankTable, digest_of
from worker_shim.messages import (
    AtBarrier,
    Envelope,
    JobData,
    JobRankInfo,
    JobStart,
    PastBarrier,
    Refusal,
    RestartMode,
)

START = Start(
    generation=1,
    topology_version=3,
    group_rank=1,
    nnodes=2,
    master_addr="a",
    master_port=29500,
    fault_count=0,
    node_hosts=("a", "b"),
)
UPDATE = Update(
    generation=2,
    topology_version=4,
    base_topology_version=3,
    group_rank=1,
    nnodes=2,
    master_addr="c",
    master_port=29501,
    fault_count=1,
    changed=(RankHost(rank=0, host="c"),),
)
SHORT = replace(
    START, generation=2, topology_version=4, master_addr="c", node_hosts=(), hosts_known=True
)


class Node:
    """A node of one worker that has a re-executable block, driven by hand."""

    def __init__(self) -> None:
        config = AgentConfig(job="j", node="n", incarnation="1", nproc_per_node=1)
        self.core = AgentCore(config, 0)
        self.put(PortReserved(port=4000))

    def put(self, event):
        return list(self.core.handle(event, 0))

    def command(self, command):
        return self.put(CommandReceived(command=command, request_id=1))

    def says(self, kind, generation, **fields):
        envelope = Envelope(client_id="c", seq=7, generation=generation)
        message = kind(local_rank=0, **fields)
        return self.put(WorkerSpoke(connection=5, envelope=envelope, message=message))

    def run(self) -> None:
        self.command(START)
        self.put(WorkersSpawned(generation=1, pids={0: 10}))
        self.says(AtBarrier, 1, epoch=0)
        self.says(PastBarrier, 1, epoch=1)

    def stop(self, mode: RestartMode) -> None:
        self.command(Stop(generation=1, restart_mode=mode, reason="r"))
        in_process = mode is RestartMode.IN_PROCESS
        self.put(WorkersGone(generation=1, kept=frozenset({0} if in_process else ())))
        if in_process:
            self.says(AtBarrier, 1, epoch=1)
        self.put(PortReserved(port=4001))


def status_of(effects):
    return next(it.status for it in effects if isinstance(it, Reply))


def test_an_update_is_kept_written_down_and_told_to_who_waits_at_the_barrier():
    """A framework that prepares its groups would prepare them for the peers of before."""
    node = Node()
    node.run()
    node.stop(RestartMode.IN_PROCESS)
    asked = node.command(UPDATE)
    assert status_of(asked) == 200
    table = RankTable(hosts=("c", "b"), version=4)
    assert [it for it in asked if isinstance(it, KeepTable)] == [
        KeepTable(table=table, group_rank=1)
    ]
    (told,) = [it for it in asked if isinstance(it, AnswerWorker)]
    assert isinstance(told.reply, JobRankInfo)
    assert (told.connection, told.reply.reply_to) == (5, 7)
    assert told.reply.worker_envs["MASTER_ADDR"] == "c"
    assert told.reply.worker_envs["RANK"] == "1"
    report = node.core.snapshot(0)
    assert (report.table_version, report.table_digest) == (4, digest_of(("c", "b")))
    assert report.topology_version == 3  # that of the last start


def test_the_question_at_the_barrier_stays_open_after_an_update():
    """The worker would have its place and wait for a start that was answered already."""
    node = Node()
    node.run()
    node.stop(RestartMode.IN_PROCESS)
    node.command(UPDATE)
    asked = node.command(SHORT)
    assert [it.start.node_hosts for it in asked if isinstance(it, SpawnWorkers)] == [("c", "b")]
    asked = node.put(WorkersSpawned(generation=2, pids={0: 10}, carried={0: Orders()}))
    (start,) = [it.reply for it in asked if isinstance(it, AnswerWorker)]
    assert isinstance(start, JobStart)
    assert start.generation == 2


def test_a_start_without_a_table_needs_the_very_version_here():
    """Workers would open their store at a host that left the job."""
    node = Node()
    node.run()
    node.stop(RestartMode.PROCESS)
    asked = node.command(SHORT)
    assert status_of(asked) == 409
    assert not [it for it in asked if isinstance(it, SpawnWorkers)]
    assert node.core.snapshot(0).generation == 1  # a whole one for the same generation is obeyed
    assert status_of(node.command(replace(SHORT, node_hosts=("c", "b"), hosts_known=False))) == 200


def test_an_update_from_another_table_or_for_a_generation_that_is_over_changes_nothing():
    """Two operators, or one and its own late message, would each have half of the table."""
    node = Node()
    node.run()
    before = node.core.hosts
    for stale in (
        replace(UPDATE, base_topology_version=2),
        replace(UPDATE, topology_version=2, base_topology_version=None),
        replace(UPDATE, generation=0),
        replace(UPDATE, nnodes=3),
    ):
        assert status_of(node.command(stale)) == 409
        assert node.core.hosts == before
    assert status_of(node.command(UPDATE)) == 200
    assert status_of(node.command(UPDATE)) == 200  # told twice, done once
    assert node.core.hosts.version == 4


def test_a_job_restart_throws_the_table_away():
    """What the sidecar holds may be what was wrong."""
    node = Node()
    node.run()
    node.stop(RestartMode.JOB)
    report = node.core.snapshot(0)
    assert (report.table_version, report.table_digest) == (0, "")


def test_what_a_waiting_rank_says_is_shown_until_it_runs_and_comes_back_from_the_operator():
    """In the HyperPod protocol ranks exchange what they need over the operator."""
    node = Node()
    node.run()
    node.stop(RestartMode.IN_PROCESS)
    node.says(JobData, 1, data="address of my store")
    assert node.core.worker_data() == {"1": "address of my store"}
    node.command(replace(START, generation=2, topology_version=4, worker_data=["x", "y"]))
    asked = node.put(WorkersSpawned(generation=2, pids={0: 10}, carried={0: Orders()}))
    (start,) = [it.reply for it in asked if isinstance(it, AnswerWorker)]
    assert start.aggregate_worker_data == {
        "rank_ips": ["a", "b"],
        "aggregate_worker_data": ["x", "y"],
    }
    node.says(PastBarrier, 2, epoch=2)
    assert node.core.worker_data() == {}
    (answer,) = [it.reply for it in node.says(JobData, 2, data="x" * 5000) if _answers(it)]
    assert isinstance(answer, Refusal)


def _answers(effect) -> bool:
    return isinstance(effect, AnswerWorker)
