"""What an incident's page draws: the phases as bars over time, the ranks as a strip of cells."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from coordinator.history import milestones
from coordinator.html import Element, element, join
from coordinator.incidents import Incident, IncidentPhase
from coordinator.positions import marks
from coordinator.wording import one_line
from scout.snapshot import RankSnapshot

DOING: Final = {
    IncidentPhase.DETECTED: "noticing",
    IncidentPhase.LOCALIZED: "judging",
    IncidentPhase.CAPTURED: "last look",
    IncidentPhase.STOPPED: "stopping",
    IncidentPhase.DECIDED: "deciding",
    IncidentPhase.ASSIGNED: "waiting for nodes",
    IncidentPhase.STARTED: "starting",
    IncidentPhase.FIRST_STEP: "loading, first step",
}
"""Milestone -> what went on until it was reached."""
WIDTH: Final = 960
LABELS: Final = 170
"""Room for the names at the left, and half of it for the durations at the right."""
ROW: Final = 26
BAR: Final = 16
REPORTS_MAX: Final = 40
CELL: Final = 16
CELLS_A_ROW: Final = 56
RANKS_MAX: Final = 2_048
"""Cells drawn; the marked ranks are always among them."""


def timeline(incident: Incident) -> Element | None:
    """Return the phases of a recovery as bars, and the reports as ticks above them."""
    stones = milestones(incident)
    if not stones:
        return None
    reports = [fault.at_ns for fault in incident.faults[:REPORTS_MAX]]
    begun = min([stones[0][1], *reports])
    ended = max([stones[-1][1], *reports])
    scale = (WIDTH - LABELS * 1.5) / max(1, ended - begun)

    def at(ns: int) -> float:
        return round(LABELS + (ns - begun) * scale, 1)

    rows = [_ticks(incident, 12, begun, scale)] if reports else []
    top = ROW if reports else 4
    spans = list(pairwise(stones))
    for place, ((_, start), (phase, end)) in enumerate(spans):
        rows.append(_bar(top + place * ROW, at(start), at(end), DOING[phase], (end - start) / 1e9))
    height = top + len(spans) * ROW + 22
    axis = _axis(height - 12, at(begun), at(ended), (ended - begun) / 1e9)
    return element(
        "svg",
        element("title", "What the recovery did, and for how long"),
        *rows,
        axis,
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        class_="timeline",
    )


def _bar(y: float, left: float, right: float, name: str, took_s: float) -> Element:
    width = max(2.0, round(right - left, 1))
    return element(
        "g",
        element("text", name, x=LABELS - 10, y=y + 13, text_anchor="end"),
        element(
            "rect",
            x=left,
            y=y,
            width=width,
            height=BAR,
            rx=2,
            class_=f"bar {name.split(',', maxsplit=1)[0].replace(' ', '-')}",
        ),
        element("text", span(took_s), x=round(left + width + 6, 1), y=y + 13, class_="took"),
    )


def _ticks(incident: Incident, y: float, begun: int, scale: float) -> Element:
    ticks = [
        element(
            "circle",
            cx=round(LABELS + (fault.at_ns - begun) * scale, 1),
            cy=y,
            r=5,
            class_="report",
        )
        for fault in incident.faults[:REPORTS_MAX]
    ]
    return element(
        "g", element("text", "reports", x=LABELS - 10, y=y + 4, text_anchor="end"), *ticks
    )


def _axis(y: float, left: float, right: float, whole_s: float) -> Element:
    line = element("line", x1=left, x2=max(right, left + 2), y1=y - 8, y2=y - 8, class_="axis")
    return element(
        "g",
        line,
        element("text", "0 s", x=left, y=y + 6, class_="took"),
        element("text", span(whole_s), x=right, y=y + 6, class_="took", text_anchor="end"),
    )


def strip(incident: Incident) -> Element | None:
    """Return one cell a rank, the odd ones marked; hovering tells where it stood."""
    if not incident.snapshots:
        return None
    marked = marks(incident)
    ordered = sorted(incident.snapshots, key=lambda it: (it.rank not in marked, it.rank))
    shown = sorted(ordered[:RANKS_MAX], key=lambda it: it.rank)
    rows = -(-len(shown) // CELLS_A_ROW)
    return element(
        "svg",
        element("title", "Where every rank stood, the odd ones marked"),
        *_cells(shown, marked),
        viewBox=f"0 0 {CELLS_A_ROW * CELL} {rows * CELL}",
        role="img",
        class_="strip",
    )


def _cells(shown: Iterable[RankSnapshot], marked: dict[int, str]) -> Iterable[Element]:
    for place, it in enumerate(shown):
        x, y = place % CELLS_A_ROW * CELL, place // CELLS_A_ROW * CELL
        mark = marked.get(it.rank, "")
        told = f"rank {it.rank} on {one_line(it.node)}: {position(it)}" + (mark and f", {mark}")
        box = {"x": x + 1, "y": y + 1, "width": CELL - 2, "height": CELL - 2, "rx": 2}
        shape = element("rect", **box, class_=f"cell {mark or 'same'}")
        yield element("g", element("title", told), shape)


def position(it: RankSnapshot) -> str:
    """Return where a rank stood, in words."""
    parts = ["step unknown" if it.step is None else f"step {it.step}"]
    if it.collective_seq is not None:
        parts.append(f"collective {it.collective_seq}")
    parts.append(it.phase.name.lower())
    return ", ".join(parts)


def span(value_s: float) -> str:
    """Return a duration for people."""
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 120:  # noqa: PLR2004 - two minutes are still counted in seconds
        return f"{value_s:.1f} s"
    minutes, rest = divmod(round(value_s), 60)
    return f"{minutes} min {rest:02d} s"


def legend() -> Element:
    """Return what the cells' colours mean."""
    return element(
        "p",
        *(
            join(element("span", class_=f"key {name}"), f" {words} ")
            for name, words in (
                ("same", "with the others"),
                ("apart", "apart"),
                ("culprit", "the culprit"),
            )
        ),
        class_="legend",
    )
