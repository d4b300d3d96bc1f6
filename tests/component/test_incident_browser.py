"""The incident pages in a real browser, served by the real API."""

import asyncio
import re
import shutil
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.incident_page import page
from coordinator.incidents import Incident
from coordinator.journal_format import DurableState
from tests.component.test_operator_api import Desk, visit
from tests.fixtures.incident_story import story
from tests.unit.coordinator.test_incident_page import Reader

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.component,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
DARK, LIGHT = "0", "1"


async def browse(folder: Path, url: str, *flags: str) -> tuple[str, str]:
    """Return the page's DOM, unless ``flags`` ask for something else, and the complaints."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr",
        "--window-size=1100,1600", *(flags or ["--dump-dom"]), url,
        stdout=PIPE, stderr=PIPE,
    )  # fmt: skip
    dom, complaints = await asyncio.wait_for(process.communicate(), 120)
    told = [line for line in complaints.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return dom.decode(), "\n".join(told)


def at_the_page(folder: Path, *flags: str, text: str = "Xid 79") -> tuple[str, str]:
    """Return DOM and complaints of the newest incident's page."""
    found: list[tuple[str, str]] = []

    async def scene(desk: Desk) -> None:
        await desk.journal.commit(DurableState(job="job"), in_job(text))
        found.append(await browse(folder, f"{desk.url}/incidents/last", *flags))

    visit(folder, scene, deadline_s=150)
    return found[0]


def in_job(text: str) -> Incident:
    return replace(story(text), job="job")


def test_a_browser_shows_the_page_and_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    """A page that the browser blocks half of looks whole to a test that reads its source."""
    dom, complaints = at_the_page(tmp_path)
    assert complaints == ""
    assert "<title>Incident llama-0007</title>" in dom
    assert dom.count('class="cell ') == 128
    assert dom.count('class="cell culprit"') == 1


def test_hostile_text_stays_text_in_a_browser(tmp_path: Path) -> None:
    """A training script would act with the rights of whoever reads its incident."""
    dom, complaints = at_the_page(tmp_path, text=EVIL)
    assert "<title>Incident llama-0007</title>" in dom
    assert "owned" in dom
    assert not re.search(r"<(img|script)\b", dom)
    assert complaints == ""


def picture(folder: Path, name: str, *flags: str) -> bytes:
    """Return a picture of the page, as PNG."""
    shot = folder / name / "page.png"
    shot.parent.mkdir()
    at_the_page(shot.parent, f"--screenshot={shot}", *flags)
    data = shot.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000, "an empty page"
    return data


def test_no_script_has_a_part_in_the_page(tmp_path: Path) -> None:
    """Where scripts are switched off, the incident would be a blank page."""
    dom, _ = at_the_page(tmp_path)
    source, shown = Reader(page(in_job("Xid 79"))), Reader(dom)
    assert "script" not in source.tags
    assert sorted(shown.tags) == sorted(source.tags), "what is shown is what was sent"
    assert shown.text == source.text


def test_dark_and_light_differ(tmp_path: Path) -> None:
    """A white page at three in the morning is closed before it is read."""
    dark, light = (
        picture(tmp_path, name, f"--blink-settings=preferredColorScheme={name}")
        for name in (DARK, LIGHT)
    )
    assert dark != light
