"""What `outrider status`, `incidents`, `explain` and `wait` say about a served job."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from coordinator.cli.main import main
from coordinator.incidents import (
    CheckpointChoice,
    Culprit,
    Decision,
    Finding,
    Incident,
    IncidentPhase,
    NodeFault,
    Outcome,
    RankMove,
    StackGroup,
)
from coordinator.journal import Journal
from coordinator.journal_format import DurableState
from coordinator.phases import JobPhase
from scout.hang import Phase, RankSnapshot
from scout.verdict import Evidence
from sidecar.api import CheckpointPointer, FaultKind, FaultReport, Scope
from sidecar.rank_evidence import ProcessFacts, RankEvidence
from worker_shim.messages import RestartMode

pytestmark = pytest.mark.component

DEADLINE_S = 60.0
FIRST_LINE = "outrider: coordinator listening on "
SPEC = """
name: job
nprocPerNode: 1
replicaSpecs: [{name: workers, replicas: 2}]
nodePolicy: {leaseSeconds: 86400}  # its nodes never come: no second incident while tests look
"""
HOSTILE = "\x1b]0;owned\x07\x1b[2Jwiped\x9b31m\u202e"


def told_incident() -> Incident:
    """Return a recovered hang of rank 1 with everything that an incident may hold."""
    incident = Incident(
        id="job-0001",
        job="job",
        generation=1,
        topology_version=1,
        trigger=f"no progress for 20 s {HOSTILE}",
        world=("a", "b"),
        outcome=Outcome.RECOVERED,
        faults=(
            NodeFault(
                node="b",
                at_ns=0,
                report=FaultReport(
                    fault_id=1,
                    kind=FaultKind.PROCESS_STALL,
                    scope=Scope.RANK,
                    reason="stalled",
                    message=f"rank 1 {HOSTILE}",
                    age_ns=0,
                    rank=1,
                ),
            ),
        ),
        snapshots=(
            RankSnapshot(rank=0, node="a", local_rank=0, step=41, phase=Phase.BACKWARD,
                         collective_seq=90, progress_age_ns=2 * 10**9, process_state="S"),
            RankSnapshot(rank=1, node="b", local_rank=0, step=41, phase=Phase.FORWARD,
                         collective_seq=89, process_state="T"),
        ),
        log_tails={"0": ("a victim's line",), "1": ("step 41", f"last words {HOSTILE}")},
        finding=Finding(
            outcome="attributed",
            basis="causal",
            why="everybody waits for rank 1",
            culprit=Culprit(kind=FaultKind.PROCESS_STALL, node="b", rank=1, local_rank=0, gpu=3,
                            reason=f"process is stopped {HOSTILE}"),
            evidence=(Evidence(surface="position", ranks=(1,), detail="one collective behind"),),
            dissent=(Evidence(surface="log", ranks=(0,), detail="timeout printed first"),),
        ),
        stack_groups=(StackGroup(ranks=(1,), frames=(f"read (data.py:7) {HOSTILE}",), odd=True),
                      StackGroup(ranks=(0,), frames=("all_reduce (d.py:1)",), odd=False)),
        evidence={"1": RankEvidence(process=ProcessFacts(state="T", waits_in=HOSTILE))},
        evidence_missing=("rank 1: no Flight Recorder",),
        decision=Decision(mode=RestartMode.PROCESS, reason="first hang of this kind",
                          exclude_nodes=("b",), backoff_s=1.5),
        checkpoints=(CheckpointChoice(prefix="model", step=40, path="/ckpt/40",
                                      reason="newest that both ranks confirmed"),),
        moves=(RankMove(group_rank=1, from_node="b", to_node="c", reason="b is left out"),),
        steps_at_fault=41,
        steps_lost=1,
    )  # fmt: skip
    at_ns = 1_700_000_000 * 10**9
    for number, phase in enumerate(IncidentPhase):
        at_ns += number * 250_000_000
        incident = incident.reached(phase, at_ns)
    return incident


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a job that ran, was repaired once, and has another incident of the same beginning."""
    state_dir = tmp_path_factory.mktemp("state")
    incident = told_incident()
    nobody = replace(
        incident,
        id="job-0002",
        finding=Finding(outcome="inconclusive", basis=None, why="two against two", culprit=None),
        moves=(),
    )
    state = DurableState(
        job="job",
        phase=JobPhase.RUNNING,
        generation=3,
        topology_version=2,
        world=("a", "c"),
        excluded={"b": f"stopped {HOSTILE}"},
        complete_checkpoints=(CheckpointPointer(prefix="model", step=40, path="/ckpt/40"),),
        next_incident=3,
    )

    async def write() -> None:
        journal = Journal.open(state_dir / "journal.sqlite")
        await journal.commit(state, incident, nobody)
        await journal.close()

    asyncio.run(write())
    spec = state_dir / "job.yaml"
    spec.write_text(SPEC)
    command = [sys.executable, "-m", "coordinator.cli", "coordinator"]
    process = subprocess.Popen(
        [*command, "--job-spec", str(spec), "--port", "0", "--state-dir", str(state_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix(FIRST_LINE).strip()
    finally:
        process.kill()
        process.communicate()


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what a command that must succeed printed, checked to be harmless."""
    status = main(argv)
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    assert not set(captured.out) & {"\x1b", "\x9b", "\x07", "\u202e"}
    return captured.out


def test_status_shows_the_job_and_every_node(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever is called at night asks this first."""
    text = said(capsys, "status", "--coordinator", url)
    assert text.startswith("job: running")
    for words in ("generation:", "3 (topology version 2)", "model at step 40", "2 ranks on 2"):
        assert words in text
    rows = {line.split()[0]: line for line in text.splitlines() if line[:2] in ("a ", "b ", "c ")}
    assert "unreachable" in rows["a"]
    assert "unreachable" in rows["c"]


def test_ledger_tells_where_the_time_went(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever pays asks what share of the machines' time was worth it."""
    text = said(capsys, "ledger", "--coordinator", url)
    for words in ("job:", "wall clock:", "goodput:", "ETTR:", "not judged yet"):
        assert words in text
    found = json.loads(said(capsys, "ledger", "--coordinator", url, "--json"))
    assert found["job"] == "job"
    assert set(found) >= {"accounts_s", "held_s", "wall_s", "lost_gpu_hours", "goodput", "ettr"}


def test_incidents_lists_who_and_what_was_done(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A list that does not name anybody sends people to every node."""
    lines = said(capsys, "incidents", "--coordinator", url).splitlines()
    first = next(line for line in lines if line.startswith("job-0001"))
    for words in ("process_stall", " b ", "process is stopped", "process_level_restart", "9.0 s"):
        assert words in first
    second = next(line for line in lines if line.startswith("job-0002"))
    assert "nobody named: two against two" in second
    only = said(capsys, "incidents", "--coordinator", url, "--limit", "1")
    assert "job-0001" not in only


def test_explain_tells_everything_in_order(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An explanation without its dissent and its reasons is only an assertion."""
    text = said(capsys, "explain", "job-0001", "--coordinator", url)
    position = -1
    for words in (
        "incident job-0001: recovered",
        "no progress for 20 s",
        "had completed step 41",
        "node b, rank 1, local rank 0, GPU 3: process_stall",
        "everybody waits for rank 1 (causal evidence)",
        "for it: [position] rank 1: one collective behind",
        "against it: [log] rank 0: timeout printed first",
        "process_level_restart, because first hang of this kind",
        "no rank any more for b",
        "after a pause of 1.5 s",
        "1 step to be trained again",
        "model: step 40 at /ckpt/40, because newest that both ranks confirmed",
        "group rank 1: b -> c, because b is left out",
        "detected",
        "+9.0 s",
        "where every rank stood",
        "culprit",
        "what they did before the stop",
        "odd  rank 1  read (data.py:7)",
        "rank 0  all_reduce (d.py:1)",
        "rank 1: state T, asleep in ",
        "missing: rank 1: no Flight Recorder",
        "the culprit's last lines",
        "last words",
    ):
        found = text.find(words, position + 1)
        assert found > position, words
        position = found
    assert "a victim's line" not in text


def test_last_and_unique_beginnings_name_an_incident(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody copies ids by hand during an outage."""
    assert "nobody is named (the evidence is not enough): two against two" in said(
        capsys, "explain", "--coordinator", url
    )
    assert main(["explain", "job-", "--coordinator", url]) == 2
    assert "fits 2 incidents" in capsys.readouterr().err
    assert main(["explain", "nope", "--coordinator", url]) == 2
    assert "no incident 'nope'" in capsys.readouterr().err


def test_explain_as_markdown_is_a_page_about_that_incident(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A postmortem starts from this page; the wrong incident in it misleads a whole meeting."""
    page = said(capsys, "explain", "job-0001", "--markdown", "--coordinator", url)
    assert page.startswith("# Incident job-0001 of job job\n")
    assert "everybody waits for rank 1" in page


@pytest.mark.parametrize("command", ["status", "incidents", "explain"])
def test_json_is_json_and_harmless(
    url: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A program that pipes it on must not pass a terminal sequence on either."""
    text = said(capsys, command, "--json", "--coordinator", url)
    assert text.isascii()
    body = json.loads(text)
    if command == "status":
        assert body["job"]["generation"] == 3
        assert [node["node"] for node in body["nodes"]] == ["a", "c"]
    elif command == "incidents":
        assert [line["id"] for line in body] == ["job-0001", "job-0002"]
    else:
        assert body["id"] == "job-0002"


def test_wait_returns_when_the_goal_is_reached_or_time_is_up(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that takes "running" for "ended" deletes the job's data."""
    assert said(capsys, "wait", "--for", "running", "--coordinator", url) == "running\n"
    assert main(["wait", "--timeout", "0.3", "--coordinator", url]) == 4
    assert "has not ended in time" in capsys.readouterr().err
