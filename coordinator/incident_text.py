"""An incident as people read it: one line for a list, one page for a postmortem.

It only words what the incident holds.  Every text in it may come from a training script, so all
of it is made harmless for terminals and for Markdown before it is written down.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from coordinator.evidence_text import evidence_page, positions_page
from coordinator.incidents import Finding, Incident, IncidentPhase, Outcome
from coordinator.markdown import code, safe, table
from coordinator.wording import natural_key, one_line
from scout.verdict import Evidence

SUMMARY_CHARS_MAX: Final = 400
"""A summary stays one line of a wide terminal or of a chat message."""

FAULTS_SHOWN_MAX: Final = 40
"""Reports written out in the timeline; the first ones convict, later ones repeat."""

TAIL_LINES_MAX: Final = 20
TAIL_RANKS_MAX: Final = 16
"""Last lines shown of a rank, and ranks whose lines are shown."""

_DONE: Final = {
    Outcome.OPEN: "still open",
    Outcome.RECOVERED: "recovered",
    Outcome.SUPERSEDED: "superseded by another fault before the first step",
    Outcome.FAILED: "the job failed",
    Outcome.STOPPED: "the job was stopped",
}
PHASES: Final = {
    IncidentPhase.FAULT: "the fault happened",
    IncidentPhase.DETECTED: "it was detected",
    IncidentPhase.LOCALIZED: "the culprit was judged",
    IncidentPhase.CAPTURED: "every rank was looked at once more",
    IncidentPhase.STOPPED: "every worker had stopped",
    IncidentPhase.DECIDED: "the restart was decided",
    IncidentPhase.ASSIGNED: "ranks were given out",
    IncidentPhase.STARTED: "workers were started",
    IncidentPhase.FIRST_STEP: "the first step was completed",
}


def summary(incident: Incident) -> str:
    """Return what happened, what was done and how it ended, in one line."""
    what = incident.finding.why if incident.finding is not None else incident.trigger
    parts = [what, *_resumed(incident), ending(incident)]
    return one_line(f"{incident.id}: {'; '.join(parts)}", SUMMARY_CHARS_MAX)


def recovered(incident: Incident) -> str:
    """Return what is said when the job trains again, in one line."""
    took = incident.span_s(IncidentPhase.FAULT, IncidentPhase.FIRST_STEP)
    how_soon = "recovered" if took is None else f"recovered in {took:.1f} s"
    text = f"{how_soon}, resumed from {_origin(incident)} (incident {incident.id})"
    return one_line(text, SUMMARY_CHARS_MAX)


def markdown(incident: Incident) -> str:
    """Return the whole incident as a Markdown page that ends with a line feed."""
    sections = [
        [
            f"# Incident {safe(incident.id)} of job {safe(incident.job)}",
            "",
            safe(summary(incident)),
        ],
        _facts(incident),
        _timeline(incident),
        _finding(incident.finding),
        _decision(incident),
        _checkpoints(incident),
        _moves(incident),
        ["## Outcome", "", safe(ending(incident)) + "."],
        positions_page(incident),
        evidence_page(incident),
        _tails(incident),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


# --- one line -----------------------------------------------------------------------------------


def _resumed(incident: Incident) -> list[str]:
    if incident.decision is None or incident.decision.mode is None:
        return []
    moved = "".join(f", {move.to_node} for {move.from_node}" for move in incident.moves)
    return [f"{incident.decision.mode} from {_origin(incident)}{moved}"]


def _origin(incident: Incident) -> str:
    steps = [choice.step for choice in incident.checkpoints if choice.step is not None]
    if not steps:
        return "the beginning"
    return f"step {max(steps)}" if max(steps) else "step 0, where the job began"


def ending(incident: Incident) -> str:
    """Return how it ended, how long that took and what was lost, as one clause."""
    text = _DONE[incident.outcome]
    over = incident.outcome in (Outcome.FAILED, Outcome.STOPPED)
    if over and incident.decision is not None:
        return f"{text}: {incident.decision.reason}"
    took = incident.span_s(IncidentPhase.FAULT, IncidentPhase.FIRST_STEP)
    if took is not None:
        text += f" in {took:.1f} s"
    if incident.steps_lost is not None:
        noun = "step" if incident.steps_lost == 1 else "steps"
        text += f", {incident.steps_lost} {noun} lost"
    return text


# --- sections -----------------------------------------------------------------------------------


def _facts(incident: Incident) -> list[str]:
    rows = {
        "Generation that broke": str(incident.generation),
        "Topology version": str(incident.topology_version),
        "Trigger": incident.trigger,
        "Furthest step": "unknown"
        if incident.steps_at_fault is None
        else str(incident.steps_at_fault),
        "Nodes by group rank": ", ".join(incident.world) or "none",
    }
    return table(("", ""), ((name, safe(value)) for name, value in rows.items()))


def _timeline(incident: Incident) -> list[str]:
    events = [(item.at_ns, PHASES[item.phase], True) for item in incident.milestones]
    faults = sorted(incident.faults, key=lambda fault: fault.at_ns)
    for fault in faults[:FAULTS_SHOWN_MAX]:
        who = f"{fault.node}: " if fault.node else ""
        text = f"{who}{fault.report.kind}: {fault.report.message or fault.report.reason}"
        events.append((fault.at_ns, text, False))
    if not events:
        return []
    origin = min(at_ns for at_ns, _, _ in events)
    rows = [
        (f"{(at_ns - origin) / 1e9:+.3f} s", clock(at_ns), _strong(safe(text), milestone))
        for at_ns, text, milestone in sorted(events, key=lambda event: event[0])
    ]
    more = len(faults) - FAULTS_SHOWN_MAX
    if more > 0:
        rows.append(("", "", f"and {more} more reports"))
    return ["## Timeline", "", *table(("Offset:", "UTC", "Event"), rows)]


def _finding(finding: Finding | None) -> list[str]:
    if finding is None:
        return ["## Finding", "", "Nothing has been judged yet."]
    basis = f", on {finding.basis} evidence" if finding.basis else ""
    lines = [
        "## Finding",
        "",
        f"**{safe(finding.outcome)}{safe(basis)}**: {safe(finding.why)}.",
    ]
    if (culprit := finding.culprit) is not None:
        told = {
            "kind": culprit.kind,
            "node": culprit.node or None,
            "rank": culprit.rank,
            "local rank": culprit.local_rank,
            "GPU": culprit.gpu,
            "reason": culprit.reason,
        }
        rows = ((name, safe(str(value))) for name, value in told.items() if value is not None)
        lines += ["", *table(("Culprit", ""), rows)]
    lines += _evidence("Evidence", finding.evidence)
    return lines + _evidence("What speaks for somebody else", finding.dissent)


def _evidence(title: str, items: Sequence[Evidence]) -> list[str]:
    if not items:
        return []
    shown = [f"- {safe(item.surface)}: {safe(item.detail)}" for item in items[:FAULTS_SHOWN_MAX]]
    more = len(items) - FAULTS_SHOWN_MAX
    return ["", f"{title}:", "", *shown, *([f"- and {more} more"] if more > 0 else [])]


def _decision(incident: Incident) -> list[str]:
    decision = incident.decision
    if decision is None:
        return ["## Decision", "", "Nothing has been decided yet."]
    over = "the job is stopped" if incident.outcome is Outcome.STOPPED else "the job ends as failed"
    mode = over if decision.mode is None else decision.mode.value
    lines = ["## Decision", "", f"**{safe(mode)}**: {safe(decision.reason)}."]
    if decision.exclude_nodes:
        lines += ["", f"Left out from now on: {safe(', '.join(decision.exclude_nodes))}."]
    return lines


def _checkpoints(incident: Incident) -> list[str]:
    if not incident.checkpoints:
        return []
    rows = (
        (
            safe(choice.prefix),
            "none" if choice.step is None else choice.step,
            safe(choice.path or ""),
            safe(choice.reason),
        )
        for choice in incident.checkpoints
    )
    return ["## Checkpoint", "", *table(("Prefix", "Step:", "Path", "Why"), rows)]


def _moves(incident: Incident) -> list[str]:
    if not incident.moves:
        return []
    rows = (
        (move.group_rank, safe(move.from_node), safe(move.to_node), safe(move.reason))
        for move in incident.moves
    )
    return ["## Rank moves", "", *table(("Group rank:", "From", "To", "Why"), rows)]


def _tails(incident: Incident) -> list[str]:
    tails = {rank: lines for rank, lines in incident.log_tails.items() if lines}
    if not tails:
        return []
    shown = sorted(tails, key=natural_key)[:TAIL_RANKS_MAX]
    text = ["## Last output"]
    for rank in shown:
        text += ["", f"Rank {safe(rank)}:", "", *code(tails[rank][-TAIL_LINES_MAX:])]
    more = len(tails) - len(shown)
    return [*text, *(["", f"And {more} more ranks."] if more > 0 else [])]


# --- leaves -------------------------------------------------------------------------------------


def _strong(text: str, strong: bool) -> str:
    return f"**{text}**" if strong else text


def clock(at_ns: int) -> str:
    """Return the wall clock time, or the bare number where no calendar reaches."""
    try:
        moment = datetime.fromtimestamp(at_ns // 1_000_000_000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return str(at_ns)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{at_ns // 1_000_000 % 1000:03d}"
