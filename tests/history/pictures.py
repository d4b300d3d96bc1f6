"""Makes the README's pictures from the hour of history: `make pictures`.

The overview is drawn from its own JSON and a real Prometheus' answers, half a minute after a GPU
broke; the incident's page is what Chromium shows of it.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from coordinator.incident_page import page
from dashboards.build import render
from dashboards.overview import overview
from tests.fixtures.incident_story import story
from tests.history.draw import dashboard
from tests.history.past import Past, served

PICTURES = Path(__file__).resolve().parents[2] / "docs/pictures"
MINUTE = 27.5
ROWS_MAX = 29
"""Grid rows that are drawn: what a person sees first."""


def draw_overview(past: Past) -> str:
    """Return the overview half a minute after the fault, with half an hour before it."""

    def ask(expr: str, over_time: bool) -> list[dict[str, Any]]:
        if over_time:
            return past.over(expr, 20, MINUTE)
        return past.instant(expr, MINUTE)

    return dashboard(json.loads(render(overview)), ask, ROWS_MAX)


def shoot_incident(folder: Path) -> bytes:
    """Return the page of an incident as Chromium shows it, in dark."""
    source, shot = folder / "page.html", folder / "page.png"
    source.write_text(page(story()), encoding="utf-8")
    subprocess.run(
        ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         f"--user-data-dir={folder / 'profile'}", "--window-size=1060,1500", "--hide-scrollbars",
         "--blink-settings=preferredColorScheme=0", f"--screenshot={shot}", source.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return shot.read_bytes()


def main() -> None:
    """Write both."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (PICTURES / "incident.png").write_bytes(shoot_incident(folder))
        with served(folder) as past:
            (PICTURES / "overview.svg").write_text(draw_overview(past), encoding="utf-8")
    print("wrote docs/pictures/overview.svg and docs/pictures/incident.png")


if __name__ == "__main__":
    main()
