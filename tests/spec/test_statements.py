"""INDEX.md against the tests that it names, and the statements that no other test stands for."""

import ast
import re
from pathlib import Path

from scout.clock import SECOND, Instant
from sidecar.agent import AgentCore
from sidecar.agent_config import AgentConfig
from sidecar.api import AgentState, FaultKind, Start
from sidecar.events import CommandReceived, LogFinding, PortReserved, WorkersSpawned
from sidecar.http_bodies import status_body
from sidecar.logs.evaluator import LogEvaluator
from sidecar.logs.rules import parse_rules
from sidecar.rank_table import RankTable
from worker_shim.messages import SIDECAR_REPLIES, WORKER_MESSAGES

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([\d.]+) \| (.+) \| `(\S+?)::(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((TESTS / "spec" / "INDEX.md").read_text(encoding="utf-8"))
SECTIONS = ("3.1", "3.2", "4.2", "5.1", "5.2", "5.3", "7.1", "7.2", "7.3", "7.4", "7.5")
PIPELINE = ("8.1", "8.2", "8.3", "8.4")


def test_every_statement_has_a_number_of_its_own_and_a_test_that_exists():
    """A statement whose test was renamed or dropped is held by nobody."""
    numbers = [number for number, *_ in ROWS]
    assert len(numbers) == len(set(numbers)) > 50
    for number, _, path, name in ROWS:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        names = {it.name for it in ast.walk(tree) if isinstance(it, ast.FunctionDef)}
        assert name in names, f"{number}: {path} has no {name}"


def test_every_section_is_covered_without_a_gap_in_its_numbers():
    """What was left out of the page would look as if it had never been demanded."""
    for section in (*SECTIONS, *PIPELINE):
        counted = [int(it.rpartition(".")[2]) for it, *_ in ROWS if it.startswith(f"{section}.")]
        assert counted == list(range(1, len(counted) + 1)) != [], section


def test_7_3_the_protocols_message_types_go_their_ways():
    """A client that was written for the protocol says and hears these words."""
    said = {
        "init",
        "at_rcb_barrier",
        "past_rcb_barrier",
        "job_fault",
        "job_data",
        "rank_labels",
        "ckpt_init",
        "ckpt_info_update",
        "ckpt_info_get",
    }
    assert said <= set(WORKER_MESSAGES)
    assert {"job_start", "job_fault", "job_rank_info", "ckpt_info_get"} <= set(SIDECAR_REPLIES)


RULE = {
    "name": "LossSpikeDetection",
    "logPattern": r"training_loss_step (\d+(?:\.\d+)?)",
    "metricThreshold": 2.0,
    "operator": "gt",
    "metricEvaluationDataPoints": 5,
}


def test_8_3_a_slow_loss_is_told_by_state_reason_and_message():
    """An operator that acts on the reason's form would take the job for healthy."""
    evaluator = LogEvaluator(parse_rules([RULE]), Instant(0))
    lines = [f"training_loss_step {value}" for value in (2.5, 2.5, 1.0, 3, 3, 3, 3, 3)]
    found = [evaluator.line(text, Instant(at)) for at, text in enumerate(lines)]
    assert [bool(it) for it in found] == [False] * 7 + [True]
    (verdict,) = found[-1]
    assert verdict.kind is FaultKind.LOG_SLOW
    agent = AgentCore(AgentConfig(job="j", node="n", incarnation="1", nproc_per_node=1), Instant(0))
    agent.handle(PortReserved(port=4000), Instant(0))
    start = Start(
        generation=1,
        topology_version=1,
        group_rank=0,
        nnodes=1,
        master_addr="h",
        master_port=1,
        fault_count=0,
        node_hosts=("h",),
    )
    agent.handle(CommandReceived(command=start), Instant(0))
    agent.handle(WorkersSpawned(generation=1, pids={0: 10}), Instant(0))
    slow = LogFinding(
        generation=1,
        local_rank=0,
        kind=verdict.kind,
        rule=verdict.rule,
        message=verdict.message,
        line=lines[-1],
    )
    agent.handle(slow, Instant(SECOND))
    assert agent.state is AgentState.FAULTED
    body = status_body(
        agent.snapshot(Instant(SECOND)), {}, agent_version="1", spare=False, table=RankTable()
    )
    assert (body["status"], body["reason"]) == ("faulted", "LogSlow_LossSpikeDetection")
    assert body["message"]
