"""A demo whose training cannot run says why: its folder is gone with it."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


def test_a_script_that_fails_by_itself_is_quoted(tmp_path):
    """Who is sent to a log that was removed can only try again."""
    script = tmp_path / "train.py"
    script.write_text("raise RuntimeError('no data here')\n")
    command = [sys.executable, "-m", "coordinator.cli", "demo", "--only", "kill"]
    done = subprocess.run(
        [*command, "--script", str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("outrider: error: ")
    assert done.stderr.count("\n") == 1
    assert "RuntimeError: no data here" in done.stderr
    assert "--keep DIR" in done.stderr
