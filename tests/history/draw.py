"""Draws a dashboard as SVG from its own JSON and the answers of a Prometheus.

It is no Grafana: it draws what the README shows.  Layout, titles, queries, colours and names are
the dashboard's; numbers are what the queries answer.
"""

from collections.abc import Callable, Iterable
from html import escape
from typing import Any

CELL_W, CELL_H = 50, 30
INK, DIM, PANEL, PAGE, LINE = "#d8dee6", "#8b96a3", "#181d24", "#0f1317", "#2a323c"
COLORS = {
    "green": "#4c9f5e", "blue": "#4a7fc1", "orange": "#d9822b", "red": "#d04437",
    "dark-red": "#8f1f17", "text": "#6b7683", "super-light-blue": "#b9d4f5",
}  # fmt: skip
SERIES = ("#7fb0f0", "#e0a458", "#7cc28d", "#d07fb8", "#c9c46a", "#8d8ff0", "#e07a70", "#6cc7c7")
SERIES_MAX = 8
HIDDEN = {"__name__", "instance", "job", "cluster", "training_job", "value"}

Ask = Callable[[str, bool], list[dict[str, Any]]]
"""Expression, over time or not -> Prometheus' result."""


def dashboard(page: dict[str, Any], ask: Ask, rows_max: int) -> str:
    """Return the upper part of a dashboard as SVG."""
    shown = [it for it in page["panels"] if it["gridPos"]["y"] + it["gridPos"]["h"] <= rows_max]
    height = max(it["gridPos"]["y"] + it["gridPos"]["h"] for it in shown) * CELL_H
    body = "".join(_panel(it, ask) for it in shown)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {24 * CELL_W} {height + 40}" '
        f'font-family="system-ui, DejaVu Sans, sans-serif">'
        f'<rect width="100%" height="100%" fill="{PAGE}"/>'
        f"{_text(14, 26, page['title'], 18, INK, bold=True)}"
        f'<g transform="translate(0 40)">{body}</g></svg>\n'
    )


def _panel(panel: dict[str, Any], ask: Ask) -> str:
    grid = panel["gridPos"]
    x, y = grid["x"] * CELL_W, grid["y"] * CELL_H
    w, h = grid["w"] * CELL_W, grid["h"] * CELL_H
    if panel["type"] == "row":
        return _text(x + 8, y + 20, panel["title"], 14, INK, bold=True)
    draw = {"stat": _stat, "table": _table, "state-timeline": _states}.get(panel["type"], _lines)
    return (
        f'<g transform="translate({x + 3} {y + 3})">'
        f'<rect width="{w - 6}" height="{h - 6}" rx="3" fill="{PANEL}" stroke="{LINE}"/>'
        f"{_text(8, 18, panel['title'], 12, DIM)}{draw(panel, ask, w - 6, h - 6)}</g>"
    )


def _text(x: float, y: float, words: str, size: int, color: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}"{weight}>'
        f"{escape(words)}</text>"
    )


def _named(panel: dict[str, Any], value: float) -> tuple[str, str]:
    """Return how a value is shown, and its colour."""
    defaults = panel["fieldConfig"]["defaults"]
    for mapping in defaults.get("mappings", []):
        found = mapping["options"].get(f"{value:g}")
        if found:
            return found["text"], COLORS.get(found["color"], COLORS["text"])
    color = COLORS["text"]
    for step in (defaults.get("thresholds") or {}).get("steps", []):
        if step["value"] is None or value >= step["value"]:
            color = COLORS.get(step["color"], COLORS["text"])
    unit = defaults["unit"]
    shown = (
        f"{value:.1%}"
        if unit == "percentunit"
        else f"{value:g}"
        if unit != "s"
        else (f"{value:.0f} s")
    )
    return shown, color


def _stat(panel: dict[str, Any], ask: Ask, w: float, h: float) -> str:
    result = ask(panel["targets"][0]["expr"], False)
    empty = panel["fieldConfig"]["defaults"]["noValue"]
    words, color = _named(panel, float(result[0]["value"][1])) if result else (empty, "none")
    size = 24 if len(words) < 8 else 16 if len(words) < 20 else 11
    box = f'<rect y="26" width="{w}" height="{h - 26}" rx="3" fill="{color}" opacity="0.85"/>'
    return box + (
        f'<text x="{w / 2}" y="{h / 2 + 20}" font-size="{size}" text-anchor="middle" '
        f'fill="#fff" font-weight="600">{escape(words)}</text>'
    )


def _table(panel: dict[str, Any], ask: Ask, w: float, h: float) -> str:
    result = ask(panel["targets"][0]["expr"], False)
    if not result:
        return _text(w / 2 - 40, h / 2 + 10, panel["fieldConfig"]["defaults"]["noValue"], 13, DIM)
    if any(step["id"] == "groupingToMatrix" for step in panel.get("transformations", [])):
        return _matrix(panel, result, w, h)
    columns = _columns(panel, result)
    wide = w / max(1, len(columns))
    out = [_text(8 + place * wide, 40, name, 11, DIM) for place, name in enumerate(columns)]
    for line, row in enumerate(result[: int((h - 50) // 20)]):
        out += [
            _text(
                8 + place * wide, 60 + line * 20, _cut(row["metric"].get(name, ""), wide), 12, INK
            )
            for place, name in enumerate(columns)
        ]
    return "".join(out)


def _columns(panel: dict[str, Any], result: list[dict[str, Any]]) -> list[str]:
    order: dict[str, int] = {}
    for step in panel.get("transformations", []):
        order |= step["options"].get("indexByName", {})
    names = [name for name in result[0]["metric"] if name not in HIDDEN]
    return sorted(names, key=lambda name: order.get(name, len(order)))[:8]


def _cut(words: str, wide: float) -> str:
    room = int(wide / 7.2)
    return words if len(words) <= room else words[: room - 1] + "\u2026"


def _matrix(panel: dict[str, Any], result: list[dict[str, Any]], w: float, h: float) -> str:
    cells = {(it["metric"]["node"], it["metric"]["gpu"]): float(it["value"][1]) for it in result}
    nodes, gpus = sorted({node for node, _ in cells}), sorted({gpu for _, gpu in cells})
    high, wide = (h - 44) / len(nodes), (w - 90) / len(gpus)
    out = [
        _text(90 + place * wide + wide / 2 - 16, 38, f"GPU {gpu}", 10, DIM)
        for place, gpu in enumerate(gpus)
    ]
    for line, node in enumerate(nodes):
        top = 42 + line * high
        out.append(_text(10, top + high - 3, node, 10, INK))
        for place, gpu in enumerate(gpus):
            words, color = _named(panel, cells.get((node, gpu), 1.0))
            out.append(
                f'<rect x="{90 + place * wide + 1:.0f}" y="{top:.1f}" width="{wide - 2:.0f}" '
                f'height="{high - 1.5:.1f}" fill="{color}"/>'
            )
            if words != "healthy":
                out.append(_text(90 + place * wide + 8, top + high - 3, words, 10, "#fff"))
    return "".join(out)


def _span(result: Iterable[dict[str, Any]]) -> tuple[float, float]:
    times = [float(at) for it in result for at, _ in it["values"]]
    return (min(times), max(times)) if times else (0.0, 1.0)


def _states(panel: dict[str, Any], ask: Ask, w: float, h: float) -> str:
    result = ask(panel["targets"][0]["expr"], True)
    begin, end = _span(result)
    scale, high = (w - 24) / max(1.0, end - begin), (h - 50) / max(1, len(result))
    out: list[str] = []
    for line, it in enumerate(result):
        values = [(float(at), float(value)) for at, value in it["values"]]
        start = 0
        for place in range(1, len(values) + 1):
            if place < len(values) and values[place][1] == values[start][1]:
                continue
            until = values[place][0] if place < len(values) else end
            words, color = _named(panel, values[start][1])
            x, wide = 12 + (values[start][0] - begin) * scale, (until - values[start][0]) * scale
            out.append(
                f'<rect x="{x:.1f}" y="{32 + line * high:.1f}" width="{max(1.5, wide):.1f}" '
                f'height="{high - 4:.1f}" fill="{color}"/>'
            )
            if wide > 9 * len(words):
                out.append(_text(x + 6, 32 + line * high + high / 2 + 3, words, 12, "#fff"))
            start = place
    return "".join(out)


def _lines(panel: dict[str, Any], ask: Ask, w: float, h: float) -> str:
    result = [it for target in panel["targets"] for it in ask(target["expr"], True)]
    result.sort(key=lambda it: -max(float(value) for _, value in it["values"]))
    result = result[:SERIES_MAX]
    if not result:
        return _text(w / 2 - 30, h / 2, panel["fieldConfig"]["defaults"]["noValue"], 13, DIM)
    begin, end = _span(result)
    top = max(float(value) for it in result for _, value in it["values"]) or 1.0
    sx, sy = (w - 24) / max(1.0, end - begin), (h - 50) / top
    out = [_text(12, 34, f"{top:g}", 10, DIM)]
    for place, it in enumerate(result):
        points = " ".join(
            f"{12 + (float(at) - begin) * sx:.1f},{h - 12 - float(value) * sy:.1f}"
            for at, value in it["values"]
        )
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{SERIES[place]}" stroke-width="1.5"/>'
        )
    return "".join(out)
