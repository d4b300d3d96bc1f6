"""Outputs that are full, closed or unread, folders that are gone: one line, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.component

RULES = "- {name: one, logPattern: 'loss is (?P<loss>.*)'}\n"
PRINTING = (
    "--help",
    "--version",
    "status --help",
    "rules list",
    "rules test $RULES $LOG --json",
)
NAMES_NOTHING = "outrider: error: "


@pytest.fixture
def shell(tmp_path: Path):
    """Run one shell line with `outrider` and its example files in the environment."""
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "job.log").write_text("iteration 1 | loss: 2.5\n" * 50)
    (tmp_path / "train.py").write_text("print('hello')\n")

    def run(line: str) -> "subprocess.CompletedProcess[str]":
        places = {
            "outrider": f"{sys.executable} -m coordinator.cli",
            "RULES": str(tmp_path / "rules.yaml"),
            "LOG": str(tmp_path / "job.log"),
            "SCRIPT": str(tmp_path / "train.py"),
            "PYTHONPATH": str(Path.cwd()),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **places},
            check=False,
        )

    return run


def is_one_line(text: str) -> bool:
    return text.startswith(NAMES_NOTHING) and text.count("\n") == 1


@pytest.mark.parametrize("command", PRINTING)
def test_an_output_that_cannot_be_written_is_an_error_and_an_unread_one_is_none(shell, command):
    """A report that a full disk swallowed must not count as written; `| head` is no mistake."""
    full = shell(f"$outrider {command} >/dev/full")
    assert full.returncode == 2
    assert is_one_line(full.stderr), full.stderr
    assert "output cannot be written (No space left on device)" in full.stderr
    closed = shell(f"$outrider {command} >&-")
    assert closed.returncode == 2
    assert "output cannot be written (Bad file descriptor)" in closed.stderr
    assert is_one_line(closed.stderr), closed.stderr
    unread = shell(f"$outrider {command} | true")
    assert (unread.returncode, unread.stderr) == (0, "")


def test_an_error_that_cannot_be_told_still_has_its_exit_status(shell):
    """A script without a terminal goes by the status alone."""
    for streams in ("2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
        assert shell(f"$outrider rules check /nonexistent {streams}").returncode == 2


def test_a_closed_standard_input_is_said(shell):
    """`-` for a log that nobody sends would be an attribute error of None."""
    done = shell("$outrider rules suggest - <&-")
    assert done.returncode == 2
    assert is_one_line(done.stderr), done.stderr


def test_a_coordinator_whose_first_line_is_lost_says_so(shell, tmp_path):
    """Scripts learn the port from that line: a job that nobody can find must not run."""
    line = "$outrider coordinator --job j --nnodes 1 --port 0"
    done = shell(f"{line} --state-dir {tmp_path}/s >/dev/full")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("outrider: error: the first line cannot be written to standard")
    assert "Traceback" not in done.stderr


def test_a_coordinator_whose_output_was_closed_on_purpose_serves(shell, tmp_path):
    """Who closes the output of a daemon does not ask for its first line."""
    done = shell(
        f"cd {tmp_path}; $outrider coordinator --job j --nnodes 1 --port 0 --state-dir s >&- &"
        " until test -s s/coordinator.url || ! kill -0 $!; do sleep 0.1; done; kill -TERM $!;"
        " wait $!"
    )
    assert done.returncode == 0
    assert "training goes on" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "run --standalone $SCRIPT",
        "run -m json",
        "coordinator --job-spec job.yaml",
        "coordinator --job j --nnodes 1 --state-dir s",
        "demo --only kill --keep here",
        "sidecar --config node.yaml",
    ],
)
def test_a_working_folder_that_is_gone_is_one_line(shell, tmp_path, command):
    """A cleaned-up scratch folder is an everyday thing on a cluster."""
    gone = tmp_path / "gone"
    gone.mkdir()
    done = shell(f"cd {gone}; rmdir {gone}; $outrider {command}")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith(NAMES_NOTHING)]
    assert len(errors) == 1, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "rules list",
        "rules test $RULES $LOG",
        "coordinator --job j --nnodes 1 --port 0 --state-dir $XDG_STATE_HOME",
        "run --standalone $SCRIPT",
        "status --coordinator http://127.0.0.1:1",
    ],
)
@pytest.mark.parametrize("files", [10, 60])
def test_too_few_open_files_are_one_line(shell, tmp_path, command, files):
    """A limit that is too low names itself, or people search for the wrong fault."""
    done = shell(f"cd {tmp_path}; ulimit -n {files}; exec timeout -s INT 30 $outrider {command}")
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode not in (0, 130):
        assert done.stderr.splitlines()[-1].startswith(NAMES_NOTHING), done.stderr
