"""``outrider explain``: one incident, told in the order in which a person asks.

What happened, who it was and how sure we are, what was done and why, from which checkpoint, who
moved, how long each part took, and the culprit's last words.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from coordinator.cli.arguments import add_json
from coordinator.cli.console import cell, clock, console, many, print_json, span, table
from coordinator.cli.errors import UserError
from coordinator.cli.incident_source import add_source, source_of
from coordinator.cli.incidents import OUTCOME_STYLES
from coordinator.evidence_text import process, shown_frames
from coordinator.history import milestones
from coordinator.incidents import Incident
from coordinator.positions import APART, CULPRIT, marks
from coordinator.wording import one_line, rank_list
from scout.verdict import Evidence

LINE_CHARS_MAX: Final = 2_000
"""Longest foreign line that is shown."""
TAIL_LINES_MAX: Final = 20
"""Last log lines shown of the culprit; ``--json`` has all that were kept."""

COLLECTIVES_MAX: Final = 4
"""Last recorded collectives shown of a rank."""
IN_WORDS: Final[Mapping[str, str]] = {
    "agree": "no rank stands out",
    "inconclusive": "the evidence is not enough",
    "attributed": "named",
}
"""What a comparison of peers came to."""
MARK_STYLES: Final[Mapping[str, str]] = {CULPRIT: "bold red", APART: "bold yellow"}

Section = Callable[[Incident], Iterable[RenderableType]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``outrider explain``."""
    parser.add_argument(
        "incident",
        metavar="INCIDENT",
        nargs="?",
        default="last",
        help="an id, any unique beginning of one, or `last` (default: last)",
    )
    add_source(parser)
    add_json(parser)
    parser.add_argument(
        "--markdown", action="store_true", help="print a Markdown page, for a postmortem"
    )


def run(args: argparse.Namespace) -> int:
    """Print the incident."""
    source = source_of(args)
    if args.markdown:
        sys.stdout.write(source.page(args.incident))
        return 0
    body = source.whole(args.incident)
    if args.json:
        print_json(body)
        return 0
    try:
        incident = msgspec.convert(body, Incident)
    except msgspec.ValidationError as error:
        raise UserError(
            f"the coordinator speaks of incidents in another way ({error}); use the outrider of"
            " its version, or --json"
        ) from error
    show(incident, console())
    return 0


def show(incident: Incident, out: Console) -> None:
    """Print ``incident`` on ``out``."""
    title = _line(f"incident {incident.id}", "bold").append(": ")
    out.print(title.append(_line(incident.outcome, OUTCOME_STYLES.get(incident.outcome, ""))))
    for heading, section in SECTIONS:
        body = list(section(incident))
        if body:
            out.print()
            out.print(_line(heading, "bold cyan"))
            for item in body:
                out.print(Padding(item, (0, 0, 0, 2), expand=False) if out.is_terminal else item)


def _what(incident: Incident) -> Iterable[RenderableType]:
    yield _line(incident.trigger)
    began = clock(incident.milestones[0].at_ns if incident.milestones else None)
    yield _line(
        f"at {began}, job {incident.job}, generation {incident.generation}, topology version"
        f" {incident.topology_version}, {many(len(incident.world), 'node')}"
    )
    if incident.steps_at_fault is not None:
        yield _line(f"the furthest rank had completed step {incident.steps_at_fault}")


def _who(incident: Incident) -> Iterable[RenderableType]:
    finding = incident.finding
    if finding is None:
        yield _line("nobody has been named yet" if incident.outcome == "open" else "nobody")
        return
    culprit = finding.culprit
    if culprit is None:
        yield _line(
            f"nobody is named ({IN_WORDS.get(finding.outcome, finding.outcome)}): {finding.why}",
            "yellow",
        )
    else:
        where = [f"node {culprit.node}"] if culprit.node else ["a person"]
        where += [] if culprit.rank is None else [f"rank {culprit.rank}"]
        where += [] if culprit.local_rank is None else [f"local rank {culprit.local_rank}"]
        where += [] if culprit.gpu is None else [f"GPU {culprit.gpu}"]
        yield _line(f"{', '.join(where)}: {culprit.kind}, {culprit.reason}", "bold red")
        yield _line(f"because {finding.why} ({finding.basis} evidence)")
        yield _line(f"confidence: {finding.confidence}")
    yield from _evidence("for it", finding.evidence)
    yield from _evidence("against it", finding.dissent)


def _evidence(title: str, items: Iterable[Evidence]) -> Iterable[RenderableType]:
    for item in items:
        about = rank_list(item.ranks) if item.ranks else "no rank"
        yield _line(f"{title}: [{item.surface}] {about}: {item.detail}")


def _decision(incident: Incident) -> Iterable[RenderableType]:
    decision = incident.decision
    if decision is None:
        yield _line("nothing has been decided yet")
        return
    over = "the job is ended" if incident.outcome == "stopped" else "the job is given up"
    mode = over if decision.mode is None else decision.mode
    yield _line(f"{mode}, because {decision.reason}")
    if decision.exclude_nodes:
        yield _line(f"no rank any more for {', '.join(decision.exclude_nodes)}")
    if decision.backoff_s:
        yield _line(f"after a pause of {span(decision.backoff_s)}")
    if incident.steps_lost is not None:
        yield _line(f"{many(incident.steps_lost, 'step')} to be trained again")


def _checkpoints(incident: Incident) -> Iterable[RenderableType]:
    for choice in incident.checkpoints:
        what = "none" if choice.step is None else f"step {choice.step}"
        what += f" at {choice.path}" if choice.path else ""
        what += ", where the job began" if choice.step == 0 else ""
        yield _line(f"{choice.prefix}: {what}, because {choice.reason}")


def _moves(incident: Incident) -> Iterable[RenderableType]:
    for move in incident.moves:
        yield _line(
            f"group rank {move.group_rank}: {move.from_node} -> {move.to_node}, because"
            f" {move.reason}"
        )
    if incident.decision is not None and incident.decision.mode and not incident.moves:
        yield _line("every node keeps its rank")


def _timeline(incident: Incident) -> Iterable[RenderableType]:
    reached = milestones(incident)
    if not reached:
        return
    shown = table("", ("after#", "took#", "reached"))
    start_ns = before_ns = reached[0][1]
    for phase, at_ns in reached:
        after, took = span((at_ns - start_ns) / 1e9), span((at_ns - before_ns) / 1e9)
        shown.add_row(cell(f"+{after}"), cell(took), cell(phase.replace("_", " ")))
        before_ns = at_ns
    yield shown


def _reports(incident: Incident) -> Iterable[RenderableType]:
    if not incident.faults:
        return
    shown = table("", ("node", "rank#", "gpu#", "kind", "reason", "message"))
    for fault in incident.faults:
        report = fault.report
        shown.add_row(
            cell(fault.node or None),
            cell(report.rank),
            cell(report.gpu),
            cell(report.kind),
            cell(report.reason),
            cell(report.message),
        )
    yield shown


def _positions(incident: Incident) -> Iterable[RenderableType]:
    if not incident.snapshots:
        return
    columns = ("", "rank#", "node", "step#", "phase", "collective#", "last progress#", "process")
    shown, marked = table("", columns), marks(incident)
    for rank in incident.snapshots:
        age = rank.progress_age_ns
        mark = marked.get(rank.rank, "")
        shown.add_row(
            cell(mark, MARK_STYLES.get(mark, "")),
            cell(rank.rank),
            cell(rank.node),
            cell(rank.step),
            cell(rank.phase.name.lower()),
            cell(rank.collective_seq),
            cell("-" if age is None else f"{span(age / 1e9)} ago"),
            cell(rank.process_state),
        )
    yield shown


def _stacks(incident: Incident) -> Iterable[RenderableType]:
    if incident.stack_groups:
        shown = table("", ("", "ranks", "innermost frame first"))
        for group in incident.stack_groups:
            frames = Text("\n").join(cell(frame) for frame in shown_frames(group))
            mark = cell("odd" if group.odd else "", "bold yellow")
            shown.add_row(mark, cell(rank_list(group.ranks)), frames)
        yield shown
    for rank, seen in incident.evidence.items():
        if seen.process is not None:
            yield _line(f"rank {rank}: {process(seen.process)}")
        for collective in seen.flight_record[-COLLECTIVES_MAX:]:
            yield _line(f"rank {rank} recorded {collective}", "dim")
    for text in incident.evidence_missing:
        yield _line(f"missing: {text}", "yellow")


def _last_words(incident: Incident) -> Iterable[RenderableType]:
    culprit = None if incident.finding is None else incident.finding.culprit
    if culprit is None or culprit.rank is None:
        return
    for text in incident.log_tails.get(str(culprit.rank), ())[-TAIL_LINES_MAX:]:
        yield _line(text, "dim")


def _line(text: str, style: str = "") -> Text:
    return Text(one_line(text, LINE_CHARS_MAX), style)


SECTIONS: Final[tuple[tuple[str, Section], ...]] = (
    ("what happened", _what),
    ("who", _who),
    ("what was decided", _decision),
    ("checkpoint", _checkpoints),
    ("ranks", _moves),
    ("timeline", _timeline),
    ("what the nodes reported", _reports),
    ("where every rank stood", _positions),
    ("what they did before the stop", _stacks),
    ("the culprit's last lines", _last_words),
)
