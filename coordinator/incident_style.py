"""The style sheet of the incident pages: light and dark by the reader's choice, nothing loaded."""

from typing import Final

SHEET: Final = """
:root { --bg: #fff; --fg: #1c2128; --dim: #5b6470; --line: #d8dee4; --panel: #f6f8fa;
  --red: #c62828; --amber: #b26a00; --green: #1b7f3b; --blue: #3b6fb6; --cell: #b9c9de; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #14181d; --fg: #e4e8ed; --dim: #9aa4b0; --line: #303841; --panel: #1c222a;
    --red: #ff6b62; --amber: #ffb74d; --green: #5cc97f; --blue: #7fb0f0; --cell: #3c4c61; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 10px; border-bottom: 1px solid var(--line);
  padding-bottom: 4px; }
h3 { font-size: 15px; margin: 18px 0 6px; }
.sub { color: var(--dim); margin: 2px 0 10px; overflow-wrap: anywhere; }
.lead { font-size: 17px; margin: 0 0 16px; overflow-wrap: anywhere; }
.badge { font-size: 13px; font-weight: 600; vertical-align: middle; padding: 3px 9px;
  border-radius: 10px; border: 1px solid currentColor; color: var(--dim); }
.badge.recovered { color: var(--green); }
.badge.failed { color: var(--red); }
.badge.open { color: var(--amber); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 10px;
  margin: 0; }
.cards div { background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  padding: 8px 12px; }
.cards dt { color: var(--dim); font-size: 13px; }
.cards dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 0 0 14px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--dim); font-weight: 500; white-space: nowrap; }
td { font-variant-numeric: tabular-nums; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; margin: 6px 0;
  padding: 10px 12px; overflow-x: auto; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono",
  monospace; }
details { margin: 6px 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; margin: 8px 0; }
svg text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: var(--fg); }
svg text.took { fill: var(--dim); }
.axis { stroke: var(--line); }
.report { fill: var(--red); }
.bar { fill: var(--blue); }
.bar.noticing, .bar.judging { fill: var(--red); }
.bar.last-look, .bar.stopping, .bar.deciding { fill: var(--amber); }
.bar.waiting-for-nodes { fill: var(--dim); }
.bar.loading { fill: var(--green); }
.cell.same { fill: var(--cell); }
.cell.apart { fill: var(--amber); }
.cell.culprit { fill: var(--red); }
b.culprit { color: var(--red); }
b.apart { color: var(--amber); }
.legend { color: var(--dim); font-size: 13px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-left: 12px; }
.key:first-child { margin-left: 0; }
.key.same { background: var(--cell); }
.key.apart { background: var(--amber); }
.key.culprit { background: var(--red); }
a { color: var(--blue); }
footer { margin-top: 40px; color: var(--dim); }
"""
