"""A worker says through its page that it evaluates; the rules over its output wait for it."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidecar.api import FaultKind
from sidecar.drive import monotonic
from sidecar.events import LogFinding, ProgressObserved
from sidecar.logs.tail import LogWatcher
from sidecar.workers.pages import ProgressPages, tick_pages
from worker_shim.messages import (
    GENERATION_ENV,
    PROGRESS_PAGE_ENV,
    PROGRESS_TOKEN_ENV,
    SOCKET_ENV,
)

pytestmark = pytest.mark.component

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
WORKER = """
import sys, time, worker_shim
worker_shim.attach()
def step():
    print("step 1", flush=True)
for limit in (600.0, 1.0):
    sys.stdin.readline()
    step()
    with worker_shim.phase("evaluate", limit_s=limit):
        sys.stdin.readline()
    sys.stdin.readline()
"""
STEP = {"name": "Step", "logPattern": "step", "expectedRecurringFrequencyInSeconds": 5.0}


def test_a_phase_that_the_script_declares_keeps_its_rank_from_being_called_hung(tmp_path):
    """A good job would be stopped in each of its evaluations, and a bad one in none."""
    during, after = asyncio.run(declared_and_left(tmp_path))
    assert during == []
    first, second = after[:2]
    assert (first.kind, first.rule) == (FaultKind.LOG_HANG, "Step")
    assert "phase" not in first.message
    assert "evaluate (declared)" in second.message  # nobody leaves the second one


async def declared_and_left(folder: Path) -> tuple[list[LogFinding], list[LogFinding]]:
    """Return what was found during the first phase, and after it."""
    findings: list[LogFinding] = []
    pages = ProgressPages(job="j", node="n", identity=str(folder))
    pages.claim()
    page = pages.create(1, 0, 0)
    watcher = LogWatcher(findings.append, monotonic)
    watcher.watch(1, [STEP], {0: (folder / "out", folder / "err")})
    seen: list[ProgressObserved] = []

    def saw(event: ProgressObserved) -> None:
        seen.append(event)
        watcher.saw_progress(event.generation, event.ranks)

    ticking = asyncio.create_task(tick_pages(pages, saw))
    place = {
        SOCKET_ENV: str(folder / "nobody"),
        PROGRESS_PAGE_ENV: str(page.path),
        PROGRESS_TOKEN_ENV: str(page.token),
        GENERATION_ENV: "1",
        "LOCAL_RANK": "0",
    }
    with (folder / "out").open("wb") as out:
        worker = subprocess.Popen(  # noqa: ASYNC220 - it starts at once
            [sys.executable, "-c", WORKER],
            cwd=ROOT,
            env=os.environ | place,
            stdin=subprocess.PIPE,
            stdout=out,
            text=True,
        )
    assert worker.stdin is not None

    def say() -> None:
        worker.stdin.write("\n")
        worker.stdin.flush()

    def limited() -> bool:
        return bool(seen) and seen[-1].ranks[0].phase_limit_ns is not None

    try:
        say()
        await until(limited)
        await asyncio.sleep(8.0)  # longer than the rule allows without the phase
        during = list(findings)
        say()
        await until(lambda: findings)
        say()
        say()
        await until(lambda: len(findings) > 1)
        return during, findings
    finally:
        worker.kill()
        worker.wait()
        worker.stdin.close()
        ticking.cancel()
        watcher.close()
        pages.close()


async def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.02)
