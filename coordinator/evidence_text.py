"""The last look at every rank in words and on a page: positions, stacks, processes.

It only words what an incident holds; what is foreign is made harmless before it is written.
"""

from typing import Final

from coordinator.incidents import Incident, StackGroup
from coordinator.markdown import code, safe, table
from coordinator.positions import marks
from coordinator.wording import rank_list
from scout.hang import RankSnapshot
from sidecar.rank_evidence import ProcessFacts

POSITIONS_SHOWN_MAX: Final = 64
"""Rows of the vector of positions; the marked ones are always among them."""
FRAMES_SHOWN_MAX: Final = 12
"""Innermost frames shown of a stack; the incident's JSON has all that were kept."""


def positions_page(incident: Incident) -> list[str]:
    """Return the Markdown lines that say where every rank stood."""
    if not incident.snapshots:
        return []
    marked = marks(incident)
    ordered = sorted(incident.snapshots, key=lambda it: (it.rank not in marked, it.rank))
    shown = sorted(ordered[:POSITIONS_SHOWN_MAX], key=lambda it: it.rank)
    rows = [_position(it, marked.get(it.rank, "")) for it in shown]
    more = len(ordered) - len(shown)
    rest = ["", f"And {more} more ranks that nothing sets apart."] if more > 0 else []
    head = ["## Where every rank stood", ""]
    columns = ("", "Rank:", "Node", "Step:", "Collective:", "Phase", "Silent for:", "Process")
    return [*head, *table(columns, rows), *rest]


def evidence_page(incident: Incident) -> list[str]:
    """Return the Markdown lines that say what the last look at the ranks showed."""
    lines: list[str] = []
    if incident.stack_groups:
        rows = (
            (
                "odd" if group.odd else "",
                rank_list(group.ranks),
                safe(group.frames[0] if group.frames else ""),
            )
            for group in incident.stack_groups
        )
        lines += table(("", "Ranks", "Innermost frame"), rows)
        for group in incident.stack_groups:
            lines += ["", f"{stack_title(group)}:", "", *code(shown_frames(group))]
    for rank, seen in incident.evidence.items():
        if seen.process is not None:
            lines += ["", f"Process of rank {safe(rank)}: {safe(process(seen.process))}."]
        if seen.flight_record:
            lines += ["", f"Last collectives of rank {safe(rank)}:", ""]
            lines += code(seen.flight_record[-FRAMES_SHOWN_MAX:])
        if seen.environment:
            lines += ["", f"Environment of rank {safe(rank)}:", ""]
            lines += code(f"{name}={value}" for name, value in seen.environment.items())
    if incident.evidence_missing:
        lines += ["", "What is missing:", ""]
        lines += [f"- {safe(text)}" for text in incident.evidence_missing]
    return ["## Before the stop", "", *_trimmed(lines)] if lines else []


def stack_title(group: StackGroup) -> str:
    """Return who stood there, in words that a list of frames follows."""
    title = rank_list(group.ranks)
    return f"{title[:1].upper()}{title[1:]}" + (", apart from the others" if group.odd else "")


def shown_frames(group: StackGroup) -> tuple[str, ...]:
    """Return the innermost frames, and how many stand around them."""
    more = len(group.frames) - FRAMES_SHOWN_MAX
    rest = (f"... and {more} outer frames",) if more > 0 else ()
    return (*group.frames[:FRAMES_SHOWN_MAX], *rest)


def process(facts: ProcessFacts) -> str:
    """Return the kernel's facts as one clause; what is not known is left out."""
    parts = [f"state {facts.state}"]
    if facts.waits_in is not None:
        parts.append(f"asleep in {facts.waits_in}")
    if facts.threads is not None:
        parts.append(f"{facts.threads} threads")
    if facts.open_files is not None:
        parts.append(f"{facts.open_files} open files")
    if facts.resident_bytes is not None:
        parts.append(f"{_size(facts.resident_bytes)} resident")
    if facts.memory_used_bytes is not None:
        limit = facts.memory_limit_bytes
        of = " and no limit" if limit is None else f" of {_size(limit)}"
        parts.append(f"its control group uses {_size(facts.memory_used_bytes)}{of}")
    return ", ".join(parts)


def _position(it: RankSnapshot, mark: str) -> tuple[object, ...]:
    age = "" if it.progress_age_ns is None else f"{it.progress_age_ns / 1e9:.1f} s"
    return (
        f"**{mark}**" if mark else "",
        it.rank,
        safe(it.node),
        "" if it.step is None else it.step,
        "" if it.collective_seq is None else it.collective_seq,
        it.phase.name.lower(),
        age,
        safe(it.process_state or ""),
    )


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def _trimmed(lines: list[str]) -> list[str]:
    return lines[1:] if lines[:1] == [""] else lines
