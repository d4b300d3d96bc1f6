import re
import unicodedata
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from coordinator.incident_text import SUMMARY_CHARS_MAX, TAIL_LINES_MAX, markdown, summary
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
from scout.hang import RankSnapshot
from scout.verdict import Evidence
from sidecar.api import FaultKind, FaultReport, Scope
from sidecar.rank_evidence import ProcessFacts, RankEvidence
from worker_shim.messages import RestartMode

NOW = 1_800_000_000 * 1_000_000_000
MS = 1_000_000


def an_incident(text="rank 1 on node-1 was killed by SIGKILL (signal 9)") -> Incident:
    """Return a recovered incident whose foreign texts all hold ``text``."""
    report = FaultReport(
        fault_id=1, kind=FaultKind.CRASH, scope=Scope.RANK, reason="r", message=text, age_ns=0
    )
    culprit = Culprit(
        kind=FaultKind.CRASH, node="node-1", rank=1, local_rank=0, gpu=None, reason=text
    )
    incident = Incident(
        id="job-3",
        job="job",
        generation=4,
        topology_version=2,
        trigger="a worker crashed",
        world=("node-0", "node-1"),
        outcome=Outcome.RECOVERED,
        faults=(NodeFault(node="node-1", at_ns=NOW, report=report),),
        snapshots=(
            RankSnapshot(rank=0, node=text, local_rank=0, step=47, collective_seq=9),
            RankSnapshot(rank=1, node=text, local_rank=0, step=47, collective_seq=8),
        ),
        stack_groups=(
            StackGroup(ranks=(1,), frames=(text, *("outer",) * 40), odd=True),
            StackGroup(ranks=(0,), frames=("all_reduce (d.py:1)",), odd=False),
        ),
        evidence={
            "1": RankEvidence(
                process=ProcessFacts(state="T", waits_in=text, memory_used_bytes=3 << 30),
                environment={"NCCL_DEBUG": text},
                flight_record=(text,),
            )
        },
        evidence_missing=(f"node-9: {text}",),
        log_tails={"10": ("late",), "9": tuple(f"{text} {n}" for n in range(50))},
        finding=Finding(
            outcome="attributed",
            basis="direct",
            why=text,
            culprit=culprit,
            evidence=(Evidence(surface="exit", ranks=(1,), detail=text),),
            dissent=(Evidence(surface="exit", ranks=(0,), detail="lost its peer"),),
        ),
        decision=Decision(
            mode=RestartMode.PROCESS, reason=f"process restart: {text}", exclude_nodes=("node-1",)
        ),
        checkpoints=(
            CheckpointChoice(prefix="model", step=40, path="/ckpt/40", reason=f"newest {text}"),
        ),
        moves=(RankMove(group_rank=1, from_node="node-1", to_node="node-9", reason=text),),
        steps_at_fault=47,
        steps_lost=7,
    )
    for index, phase in enumerate(IncidentPhase):
        incident = incident.reached(phase, NOW + index * 250 * MS)
    return incident


def test_the_summary_says_what_was_done_and_what_it_cost():
    """The one line that a person reads at three in the morning."""
    assert summary(an_incident()) == (
        "job-3: rank 1 on node-1 was killed by SIGKILL (signal 9); process_level_restart from "
        "step 40, node-9 for node-1; recovered in 2.0 s, 7 steps lost"
    )


def test_a_failed_job_says_why():
    """'failed' without the reason sends people to the logs of every node."""
    failed = replace(
        an_incident(),
        outcome=Outcome.FAILED,
        decision=Decision(mode=None, reason="the budget is used up"),
    )
    assert summary(failed).endswith("; the job failed: the budget is used up")


def test_a_fresh_incident_can_be_shown():
    """A person looks while the job is still down."""
    fresh = Incident(
        id="job-1", job="job", generation=1, topology_version=1, trigger="node-2 fell silent"
    )
    assert summary(fresh) == "job-1: node-2 fell silent; still open"
    page = markdown(fresh)
    assert "Nothing has been judged yet." in page
    assert "Nothing has been decided yet." in page


def test_the_page_holds_every_part_of_a_postmortem():
    """What the page leaves out nobody will look up afterwards."""
    page = markdown(an_incident())
    for part in (
        "# Incident job-3 of job job",
        "| +0.000 s | 2027-01-15 08:00:00.000 | **the fault happened** |",
        "| +2.000 s | 2027-01-15 08:00:02.000 | **the first step was completed** |",
        "**attributed, on direct evidence**: rank 1 on node-1 was killed by SIGKILL",
        "| reason | rank 1 on node-1 was killed",
        "What speaks for somebody else:\n\n- exit: lost its peer",
        r"**process\_level\_restart**: process restart: ",
        "Left out from now on: node-1.",
        "| model | 40 | /ckpt/40 | newest ",
        "| 1 | node-1 | node-9 | ",
        "| **culprit** | 1 | rank 1 on node-1 was killed",
        "| odd | rank 1 | rank 1 on node-1 was killed",
        "Rank 1, apart from the others:\n\n    rank 1 on node-1 was killed",
        "    ... and 29 outer frames\n",
        "Rank 0:\n\n    all_reduce (d.py:1)\n",
        "its control group uses 3.0 GiB and no limit.",
        "    NCCL_DEBUG=rank 1 on node-1 was killed",
        "What is missing:\n\n- node-9: rank 1 on node-1",
        "## Outcome\n\nrecovered in 2.0 s, 7 steps lost.",
        "    rank 1 on node-1 was killed by SIGKILL (signal 9) 49\n",
    ):
        assert part in page, part
    assert page.index("Rank 9:") < page.index("Rank 10:")
    assert len(re.findall(r"^    rank 1 .* \d+$", page, re.MULTILINE)) == TAIL_LINES_MAX


def test_foreign_text_cannot_act_on_its_reader():
    """A training script must not be able to forge a report or drive a terminal."""
    page = markdown(an_incident("\x1b[2J| x |\n# Fake\n```\n<script>alert(1)</script> [a](b)"))
    assert "\x1b" not in page
    assert "\n# Fake" not in page
    for line in page.splitlines():
        live = "" if line.startswith("    ") else re.sub(r"\\.", "", line)
        assert not any(mark in live for mark in ("<script", "](", "`", "# Fake")), line


@given(st.text())
def test_any_text_leaves_the_shape_of_the_page_alone(text):
    """One line too many in a table breaks everything below it."""
    incident = an_incident(text)
    assert len(summary(incident)) <= SUMMARY_CHARS_MAX
    assert len(summary(incident).splitlines()) <= 1
    page = markdown(incident)
    usual = markdown(an_incident())
    assert page.count("\n") == usual.count("\n")
    assert not any(unicodedata.category(char) == "Cc" and char != "\n" for char in page)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    bars = [line for line in usual.splitlines() if line.startswith("|")]
    assert [row.replace("\\|", "").count("|") for row in rows] == [row.count("|") for row in bars]
