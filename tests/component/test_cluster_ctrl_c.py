"""Ctrl-C in the middle of the demo leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.component.waiting import await_that

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

WITHIN_S = 120.0


def processes_naming(folder: Path) -> dict[int, str]:
    """Return the processes whose command line names ``folder``: all that the demo starts do."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if str(folder) in command:
                    found[int(entry.name)] = command
    return found


def pages() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("outrider-demo-*")}


@pytest.mark.parametrize("moment", ["reference", "training"])
def test_ctrl_c_ends_the_whole_local_cluster_and_leaves_nothing(tmp_path, moment):
    """What is left behind holds ports, memory and cores until somebody wonders why."""
    folder, before = tmp_path / "demo", pages()
    demo = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "demo", "--only", "hang", "--keep", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        if moment == "reference":
            pattern = "reference/checkpoints/*.pt"
        else:
            pattern = "outrider/checkpoints/*.pt"
        await_that(f"checkpoints of the {moment}", lambda: any(folder.glob(pattern)))
        assert processes_naming(folder)
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=WITHIN_S)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130
    assert b"Traceback" not in errors
    await_that("the last process", lambda: not processes_naming(folder))
    assert not [path for path in folder.glob("node-*/run/**/*") if path.is_socket()]
    await_that("the progress pages", lambda: not pages() - before)
