"""What `outrider explain` shows of an incident, to the word."""

import io
import re

from rich.console import Console

from coordinator.cli.console import clock
from coordinator.cli.explain import show
from coordinator.culprit import judge
from coordinator.incident_text import markdown, recovered
from coordinator.incidents import (
    CheckpointChoice,
    Decision,
    Incident,
    IncidentPhase,
    NodeFault,
    Outcome,
)
from coordinator.own_faults import operator_asked


def shown(incident: Incident) -> str:
    out = io.StringIO()
    show(incident, Console(file=out, width=200, highlight=False, markup=False, soft_wrap=True))
    return out.getvalue()


def stopped() -> Incident:
    fault = NodeFault(node="", at_ns=10**18, report=operator_asked("stop", "mia asked to stop: x"))
    incident = Incident(
        id="j-0001",
        job="j",
        generation=1,
        topology_version=1,
        trigger="mia asked to stop: x",
        world=("a",),
        faults=(fault,),
        outcome=Outcome.STOPPED,
        finding=judge((fault,), (), ("a",), 1, 10**9),
        decision=Decision(mode=None, reason="mia asked to stop: x"),
        checkpoints=(CheckpointChoice(prefix="model", step=0, path="", reason="it is the newest"),),
    )
    return incident.reached(IncidentPhase.FAULT, 10**18)


def test_a_persons_order_names_no_empty_node_and_no_failure():
    """Blanks where a name should be make people doubt the rest of the page."""
    text = shown(stopped())
    assert "incident j-0001: stopped" in text
    assert "a person: operator" in text
    assert "node ," not in text
    assert "node :" not in text
    assert "the job is ended, because mia asked to stop: x" in text
    reports = text.partition("what the nodes reported")[2].splitlines()
    assert reports[2].split()[:4] == ["-", "-", "-", "operator"]
    page = markdown(stopped())
    assert "| : operator" not in page
    assert "the job is stopped" in page
    assert "| node |  |" not in page


def test_step_0_is_told_as_where_the_job_began():
    """`step 0 at` nothing reads like a lost path."""
    assert "model: step 0, where the job began, because it is the newest" in shown(stopped())
    assert "resumed from step 0, where the job began (incident j-0001)" in recovered(stopped())


def test_a_time_carries_its_zone():
    """Two people in two countries read two logs of one night."""
    assert re.fullmatch(r"2001-09-0\d \d\d:\d\d:40[+-]\d{4}", clock(10**18))
