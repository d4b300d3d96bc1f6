"""Sections 3.2, 5 and 7.5 of the orchestration article, a test per sentence that demands something.

A real agent core; what its shells would do is answered by hand.
"""

from coordinator.journal_format import Restart
from coordinator.restart_depth import LevelBudgets, depth
from sidecar.agent import AgentCore
from sidecar.agent_config import AgentConfig
from sidecar.api import AgentState, ExitCause, Start, Stop
from sidecar.events import (
    AnswerWorker,
    CommandReceived,
    KillWorkers,
    Orders,
    PortReserved,
    SpawnWorkers,
    WorkerExited,
    WorkersGone,
    WorkerSpoke,
    WorkersSpawned,
)
from worker_shim.messages import (
    AtBarrier,
    Envelope,
    JobFault,
    JobHalt,
    JobStart,
    PastBarrier,
    RestartMode,
)

SECOND = 1_000_000_000


class Node:
    """An agent of two workers, driven by hand."""

    def __init__(self) -> None:
        config = AgentConfig(job="j", node="n", incarnation="1", nproc_per_node=2)
        self.agent = AgentCore(config, now=0)
        self.put(PortReserved(port=4000))

    def put(self, event, now=0):
        """Give the agent an event; return what it asks for."""
        return list(self.agent.handle(event, now))

    def start(self, generation, carried=()):
        """Command a start and report its processes; return all that was asked for."""
        command = Start(
            generation=generation,
            topology_version=1,
            group_rank=0,
            nnodes=1,
            master_addr="h",
            master_port=1,
            fault_count=0,
            node_hosts=("h",),
        )
        asked = self.put(CommandReceived(command=command))
        orders = {local: Orders(envs={"RANK": str(local)}) for local in carried}
        spawned = WorkersSpawned(generation=generation, pids={0: 10, 1: 11}, carried=orders)
        return asked + self.put(spawned)

    def stop(self, generation, mode=RestartMode.IN_PROCESS):
        """Command a stop; return what was asked for."""
        return self.put(
            CommandReceived(command=Stop(generation=generation, restart_mode=mode, reason="r"))
        )

    def says(self, local_rank, message_type, generation, **fields):
        """Let a worker speak; return what the agent asks for."""
        envelope = Envelope(client_id="c", seq=1, generation=generation)
        message = message_type(local_rank=local_rank, **fields)
        return self.put(WorkerSpoke(connection=local_rank, envelope=envelope, message=message))

    def inside(self, generation):
        """Bring both workers past the barrier of ``generation``."""
        for local_rank in (0, 1):
            self.says(local_rank, AtBarrier, generation, epoch=0)
            self.says(local_rank, PastBarrier, generation, epoch=generation)


def replies(effects, kind):
    return [it.reply for it in effects if isinstance(it, AnswerWorker) and type(it.reply) is kind]


def test_5_1_the_agent_does_not_start_workers_upon_initialization():
    """It transitions to READY and waits for the start with the rank assignment."""
    node = Node()
    assert node.agent.state is AgentState.READY
    assert any(isinstance(it, SpawnWorkers) for it in node.start(1))


def test_5_1_on_stop_the_agent_kills_its_workers_and_resets_to_ready():
    """The next start would find the old workers on their devices."""
    node = Node()
    node.start(1)
    asked = node.stop(1, RestartMode.PROCESS)
    assert [it.keep for it in asked if isinstance(it, KillWorkers)] == [frozenset()]
    node.put(WorkersGone(generation=1))
    node.put(PortReserved(port=4001))
    assert node.agent.state is AgentState.READY


def test_5_2_a_stop_in_process_tells_workers_to_return_to_the_barrier_and_kills_none():
    """Their memory, interpreters and device contexts are what in-process restart is for."""
    node = Node()
    node.start(1)
    node.inside(1)
    asked = node.stop(1)
    assert len(replies(asked, JobHalt)) == 2
    assert [it.keep for it in asked if isinstance(it, KillWorkers)] == [frozenset({0, 1})]


def test_5_2_on_start_the_agent_pushes_the_new_environment_to_the_waiting_workers():
    """A rank that kept its old environment would join another group than its peers."""
    node = Node()
    node.start(1)
    node.inside(1)
    node.stop(1)
    node.put(WorkersGone(generation=1, kept=frozenset({0, 1})))
    for local_rank in (0, 1):
        node.says(local_rank, AtBarrier, 1, epoch=1)
    assert node.agent.state is AgentState.READY
    asked = node.start(2, carried=(0, 1))
    assert [it.keep for it in asked if isinstance(it, SpawnWorkers)] == [frozenset({0, 1})]
    starts = replies(asked, JobStart)
    assert [(it.generation, it.worker_envs) for it in starts] == [
        (2, {"RANK": "0"}),
        (2, {"RANK": "1"}),
    ]


def test_5_2_a_worker_that_crashes_rather_than_returning_falls_back_to_a_process_restart():
    """And the agent goes through INIT, as the in-process state machine has it."""
    node = Node()
    node.start(1)
    node.inside(1)
    node.stop(1)
    ended = WorkerExited(generation=1, local_rank=1, pid=11, cause=ExitCause(signal=9))
    asked = node.put(ended)
    assert [it.keep for it in asked if isinstance(it, KillWorkers)] == [frozenset({0})]
    node.says(0, AtBarrier, 1, epoch=1)
    node.put(WorkersGone(generation=1, kept=frozenset({0})))
    assert AgentState.INIT in node.agent.transitions
    node.put(PortReserved(port=4001))
    asked = node.start(2, carried=(0,))
    assert [it.keep for it in asked if isinstance(it, SpawnWorkers)] == [frozenset({0})]


def test_5_2_when_the_barrier_timeout_expires_it_falls_back_too():
    """One rank that never leaves its block would hold all others for ever."""
    node = Node()
    node.start(1)
    node.inside(1)
    node.stop(1)
    node.says(0, AtBarrier, 1, epoch=1)
    asked = node.agent.handle_timer(11 * SECOND)
    assert [it.keep for it in asked if isinstance(it, KillWorkers)] == [frozenset({0})]


def test_7_5_of_several_modes_the_agent_reports_the_most_severe():
    """The recovery must match the worst failure of all workers."""
    node = Node()
    node.start(1)
    node.says(0, JobFault, 1, reason="a", restart_mode=RestartMode.IN_PROCESS)
    node.says(1, JobFault, 1, reason="b", restart_mode=RestartMode.JOB)
    assert node.agent.snapshot(0).restart_mode is RestartMode.JOB


def test_3_2_process_restarts_escalate_to_the_job_and_its_restarts_are_bounded():
    """`numRestartBeforeFullJobRestart` within `evalPeriodSeconds`, then `maxFullJobRestarts`."""
    budgets = LevelBudgets(before_job_max=2, job_max=1, window_s=100)
    mild = [
        Restart(at_ns=it * SECOND, mode=RestartMode.PROCESS, node="n", cause=f"c:{it}@{it}")
        for it in (1, 2)
    ]
    wanted = depth(budgets, mild, "d:n@3", RestartMode.PROCESS, 3 * SECOND)
    assert wanted.mode is RestartMode.JOB
    done = Restart(at_ns=3 * SECOND, mode=RestartMode.JOB, node="n", cause="d:n@3")
    again = [
        *mild,
        done,
        *[Restart(at_ns=4 * SECOND, mode=it.mode, node="n", cause=f"{it.cause}9") for it in mild],
    ]
    assert depth(budgets, again, "e:n@9", RestartMode.PROCESS, 5 * SECOND).mode is None
