"""An incident as a page for a browser: whole, without scripts, and without anything from elsewhere.

It words what the incident holds; every text in it may come from a training script, and all of it
passes `coordinator.html`, which escapes whatever is not an element.
"""

from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import quote

from coordinator import html
from coordinator.evidence_text import POSITIONS_SHOWN_MAX, process, shown_frames, stack_title
from coordinator.html import Element, element
from coordinator.incident_drawing import legend, position, span, strip, timeline
from coordinator.incident_style import SHEET
from coordinator.incident_text import (
    FAULTS_SHOWN_MAX,
    PHASES,
    TAIL_LINES_MAX,
    TAIL_RANKS_MAX,
    clock,
    ending,
    summary,
)
from coordinator.incidents import Finding, Incident, IncidentPhase, Outcome
from coordinator.positions import marks
from coordinator.wording import natural_key, rank_list
from scout.verdict import Evidence

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Even a text that slipped through could load nothing and run nothing."""


def page(incident: Incident) -> str:
    """Return the whole page of one incident."""
    sections = (
        _header(incident),
        _facts(incident),
        _section("How it went", timeline(incident), _milestones(incident)),
        _finding(incident),
        _decision(incident),
        _positions(incident),
        _stacks(incident),
        _tails(incident),
        _reports(incident),
        _missing(incident),
        _footer(incident),
    )
    return html.document(f"Incident {incident.id}", SHEET, element("main", *sections))


def listing(job: str, incidents: Sequence[Incident]) -> str:
    """Return the page that leads to every incident of a job, newest first."""
    rows = [
        (
            element("a", it.id, href=f"/incidents/{quote(it.id)}"),
            clock(it.at(IncidentPhase.FAULT) or 0),
            _badge(it.outcome),
            summary(it).removeprefix(f"{it.id}: "),
        )
        for it in reversed(incidents)
    ]
    body = (
        _table(("Incident", "UTC", "Outcome", "What"), rows)
        if rows
        else element("p", "Nothing has stopped the job so far.")
    )
    title = f"Incidents of {job}"
    return html.document(title, SHEET, element("main", element("h1", title), body))


# --- the top: what must be read in thirty seconds -----------------------------------------------


def _header(incident: Incident) -> Element:
    return element(
        "header",
        element("h1", f"Incident {incident.id} ", _badge(incident.outcome)),
        element("p", f"Job {incident.job}, generation {incident.generation}", class_="sub"),
        element("p", summary(incident).removeprefix(f"{incident.id}: "), class_="lead"),
    )


def _badge(outcome: Outcome) -> Element:
    return element("span", outcome.value, class_=f"badge {outcome.value}")


def _facts(incident: Incident) -> Element:
    took = incident.span_s(IncidentPhase.FAULT, IncidentPhase.FIRST_STEP)
    culprit = None if incident.finding is None else incident.finding.culprit
    who = "nobody named" if culprit is None else culprit.node
    if culprit is not None and culprit.rank is not None:
        who = f"rank {culprit.rank} on {culprit.node}"
    what = culprit.kind.value if culprit is not None else incident.trigger
    gpu = "" if culprit is None or culprit.gpu is None else f", GPU {culprit.gpu}"
    cards = (
        ("Who", who + gpu),
        ("What", what.replace("_", " ")),
        ("Done", (incident.depth or "not decided yet").replace("_", " ")),
        ("Recovered in", "not yet" if took is None else span(took)),
        ("Steps lost", "unknown" if incident.steps_lost is None else str(incident.steps_lost)),
    )
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", value)) for name, value in cards),
        class_="cards",
    )


# --- sections -----------------------------------------------------------------------------------


def _milestones(incident: Incident) -> Element | None:
    stones = sorted(incident.milestones, key=lambda it: it.at_ns)
    if not stones:
        return None
    begun = stones[0].at_ns
    rows = [
        (f"+{(it.at_ns - begun) / 1e9:.3f} s", clock(it.at_ns), PHASES[it.phase]) for it in stones
    ]
    return _fold("Milestones", _table(("After", "UTC", "What"), rows))


def _finding(incident: Incident) -> Element | None:
    finding = incident.finding
    if finding is None:
        return _section("Who it was", element("p", "Nothing has been judged yet."))
    basis = f" on {finding.basis} evidence" if finding.basis else ""
    sure = "" if finding.confidence == "none" else f", confidence {finding.confidence}"
    return _section(
        "Who it was",
        element("p", element("strong", f"{finding.outcome}{basis}{sure}"), f": {finding.why}."),
        _evidence("What speaks for it", finding.evidence),
        _evidence("What speaks for somebody else", finding.dissent),
        _reason(finding),
    )


def _reason(finding: Finding) -> Element | None:
    culprit = finding.culprit
    if culprit is None:
        return None
    return element("p", element("b", "Reason: "), culprit.reason)


def _evidence(title: str, items: Sequence[Evidence]) -> Element | None:
    if not items:
        return None
    shown = [
        (item.surface, rank_list(item.ranks) if item.ranks else "", item.detail)
        for item in items[:FAULTS_SHOWN_MAX]
    ]
    more = len(items) - FAULTS_SHOWN_MAX
    rest = element("p", f"and {more} more") if more > 0 else None
    return html.join(element("h3", title), _table(("Surface", "Ranks", "Observation"), shown), rest)


def _decision(incident: Incident) -> Element | None:
    decision = incident.decision
    if decision is None:
        return None
    mode = incident.depth or "the job ends"
    left_out = ", ".join(decision.exclude_nodes)
    return _section(
        "What was done, and why so",
        element("p", element("strong", mode), f": {decision.reason}."),
        element("p", f"Left out from now on: {left_out}.") if left_out else None,
        _choices(incident),
        _moves(incident),
        element("p", f"{ending(incident)}.".capitalize()),
    )


def _choices(incident: Incident) -> Element | None:
    rows = [
        (it.prefix, "none" if it.step is None else it.step, it.path or "", it.reason)
        for it in incident.checkpoints
    ]
    return _table(("Checkpoint", "Step", "Path", "Why"), rows) if rows else None


def _moves(incident: Incident) -> Element | None:
    rows = [(it.group_rank, it.from_node, it.to_node, it.reason) for it in incident.moves]
    return _table(("Group rank", "From", "To", "Why"), rows) if rows else None


def _positions(incident: Incident) -> Element | None:
    if not incident.snapshots:
        return None
    marked = marks(incident)
    ordered = sorted(incident.snapshots, key=lambda it: (it.rank not in marked, it.rank))
    rows = [
        (
            element("b", marked[it.rank], class_=marked[it.rank]) if it.rank in marked else "",
            it.rank,
            it.node,
            position(it),
            "" if it.progress_age_ns is None else span(it.progress_age_ns / 1e9),
            it.process_state or "",
        )
        for it in ordered[:POSITIONS_SHOWN_MAX]
    ]
    more = len(ordered) - len(rows)
    columns = ("", "Rank", "Node", "Position", "Silent for", "Process")
    return _section(
        "Where every rank stood",
        strip(incident),
        legend(),
        _fold("As a table, the odd ones first", _table(columns, rows)),
        element("p", f"And {more} more ranks that nothing sets apart.") if more > 0 else None,
    )


def _stacks(incident: Incident) -> Element | None:
    if not incident.stack_groups and not incident.evidence:
        return None
    groups = [
        _fold(
            f"{stack_title(group)}: {group.frames[0] if group.frames else 'no frame'}",
            _code(shown_frames(group)),
            opened=group.odd,
        )
        for group in incident.stack_groups
    ]
    processes = [
        (rank, process(seen.process))
        for rank, seen in incident.evidence.items()
        if seen.process is not None
    ]
    flights = [
        _fold(f"Last collectives of rank {rank}", _code(seen.flight_record))
        for rank, seen in incident.evidence.items()
        if seen.flight_record
    ]
    table = _table(("Rank", "Process"), processes) if processes else None
    return _section("Where their code stood", *groups, table, *flights)


def _tails(incident: Incident) -> Element | None:
    tails = {rank: lines for rank, lines in incident.log_tails.items() if lines}
    shown = sorted(tails, key=natural_key)[:TAIL_RANKS_MAX]
    if not shown:
        return None
    more = len(tails) - len(shown)
    return _section(
        "Last output",
        *(_fold(f"Rank {rank}", _code(tails[rank][-TAIL_LINES_MAX:])) for rank in shown),
        element("p", f"And {more} more ranks.") if more > 0 else None,
    )


def _reports(incident: Incident) -> Element | None:
    if not incident.faults:
        return None
    rows = [
        (clock(it.at_ns), it.node, it.report.kind.value, it.report.message or it.report.reason)
        for it in incident.faults[:FAULTS_SHOWN_MAX]
    ]
    more = len(incident.faults) - len(rows)
    return _section(
        "What was reported",
        _table(("UTC", "Node", "Kind", "Report"), rows),
        element("p", f"And {more} more reports.") if more > 0 else None,
    )


def _missing(incident: Incident) -> Element | None:
    if not incident.evidence_missing:
        return None
    return _section(
        "What could not be had",
        element("ul", *(element("li", it) for it in incident.evidence_missing)),
    )


def _footer(incident: Incident) -> Element:
    base = f"/v1/incidents/{quote(incident.id)}"
    return element(
        "footer",
        element("a", "All incidents", href="/incidents"),
        " \u00b7 ",
        element("a", "JSON", href=base),
        " \u00b7 ",
        element("a", "Markdown", href=f"{base}?format=markdown"),
    )


# --- leaves -------------------------------------------------------------------------------------


def _section(title: str, *content: html.Child) -> Element | None:
    shown = [item for item in content if item is not None]
    return element("section", element("h2", title), *shown) if shown else None


def _fold(title: str, content: Element, *, opened: bool = False) -> Element:
    summary_line = element("summary", title)
    return element("details", summary_line, content, open="" if opened else None)


def _table(columns: Sequence[str], rows: Iterable[Sequence[html.Child]]) -> Element:
    head = element("tr", *(element("th", name, scope="col") for name in columns))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    whole = element("table", element("thead", head), element("tbody", *body))
    return element("div", whole, class_="scroll")


def _code(lines: Iterable[str]) -> Element:
    return element("pre", Element("\n".join(html.text(line) for line in lines)))
