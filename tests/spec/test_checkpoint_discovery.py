"""Section 7.2 of the orchestration article: one test per sentence that demands something.

Two real agent cores and the real ledger; what travels between them is a status as it is sent.
"""

from coordinator.checkpoint_choice import CheckpointLedger
from sidecar.agent import AgentCore
from sidecar.agent_config import AgentConfig
from sidecar.api import Start
from sidecar.events import CommandReceived, PortReserved, WorkerSpoke
from sidecar.http_bodies import status_body
from sidecar.rank_table import RankTable
from worker_shim.messages import CheckpointInit, CheckpointSaved, Envelope

NPROC = 2


def an_agent(group_rank: int) -> AgentCore:
    """Return a node's agent that runs generation 1."""
    node = f"node-{group_rank}"
    agent = AgentCore(AgentConfig(job="j", node=node, incarnation="1", nproc_per_node=NPROC), now=0)
    agent.handle(PortReserved(port=4000), 0)
    start = Start(
        generation=1,
        topology_version=1,
        group_rank=group_rank,
        nnodes=2,
        master_addr="h",
        master_port=1,
        fault_count=0,
        node_hosts=("h", "i"),
    )
    agent.handle(CommandReceived(command=start), 0)
    return agent


def says(agent: AgentCore, message) -> None:
    envelope = Envelope(client_id="c", seq=1, generation=1)
    agent.handle(WorkerSpoke(connection=1, envelope=envelope, message=message), 0)


def saves(agent: AgentCore, local_rank: int, *steps: int) -> None:
    for step in steps:
        path = f"/ckpt/{step}"
        says(agent, CheckpointSaved(local_rank=local_rank, prefix="run", step=step, path=path))


def job_wide(*agents: AgentCore):
    ledger = CheckpointLedger()
    for agent in agents:
        for item in agent.snapshot(0).checkpoints:
            ledger.confirm(item.prefix, item.step, item.ranks, item.paths)
    (choice,) = ledger.choose(2 * NPROC)
    return choice


def test_workers_report_checkpoints_and_the_agent_aggregates_them():
    """Without the aggregate every operator would have to ask every rank."""
    agent = an_agent(0)
    saves(agent, 0, 10, 20)
    saves(agent, 1, 10)
    told = {item.step: item.ranks for item in agent.snapshot(0).checkpoints}
    assert told == {10: (0, 1), 20: (0,)}


def test_the_operator_can_query_each_agents_status():
    """An HTTP client that was written for the other agent finds its field."""
    agent = an_agent(0)
    saves(agent, 0, 10, 20)
    saves(agent, 1, 10)
    body = status_body(agent.snapshot(0), {}, agent_version="1", spare=False, table=RankTable())
    assert body["progress"] == {"run": {"progressCount": 10, "progressData": "/ckpt/10"}}


def test_the_latest_step_is_one_at_which_all_workers_confirmed_a_successful_write():
    """Some stages at step N and others at N-1 are two models in one job."""
    first, second = an_agent(0), an_agent(1)
    for local_rank in range(NPROC):
        saves(first, local_rank, 10, 20, 30)
        saves(second, local_rank, 10, 30)
    saves(second, 0, 20)
    assert job_wide(first, second).step == 30
    again = an_agent(1)
    saves(again, 0, 10, 20, 30)
    saves(again, 1, 10, 20)
    choice = job_wide(first, again)
    assert choice.step == 20
    assert "rank 3 has not confirmed it" in choice.reason


def test_no_single_workers_local_view_is_trusted():
    """One rank's word for a step would have all others load what they never wrote."""
    first, second = an_agent(0), an_agent(1)
    saves(first, 0, 10, 20, 30, 40)
    assert job_wide(first, second).step is None


def test_a_client_that_opens_late_resets_nothing():
    """Announcing a prefix again must not erase what was valid under it."""
    agent = an_agent(0)
    for local_rank in range(NPROC):
        saves(agent, local_rank, 10)
    says(agent, CheckpointInit(local_rank=1, prefix="run", checkpoint_types={}))
    says(
        agent,
        CheckpointInit(local_rank=1, prefix="run", checkpoint_types={"model_checkpoint": NPROC}),
    )
    assert [item.step for item in agent.snapshot(0).checkpoints] == [10]
