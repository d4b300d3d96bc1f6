"""State folders in which a coordinator cannot work: one line, and nothing in them is touched."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.component

NO_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
"""Root without root's way around permissions."""


def refused(state_dir: Path | str, *prefix: str) -> str:
    """Return the one line that a coordinator with this state folder ends with."""
    line = [sys.executable, "-m", "coordinator.cli", "coordinator", "--job", "j", "--nnodes", "1"]
    done = subprocess.run(
        [*prefix, *line, "--port", "0", "--state-dir", str(state_dir)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("outrider: error: "), done.stderr
    assert done.stderr.count("\n") == 1
    assert str(state_dir) in done.stderr
    assert "--state-dir" in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "name", ["coordinator.url", "coordinator.new", "journal.sqlite", "journal.sqlite.lock"]
)
def test_a_folder_in_place_of_a_file_is_one_line_and_stays(tmp_path, name):
    """A volume that was mounted one level too deep leaves such a folder."""
    (tmp_path / name / "inside").mkdir(parents=True)
    refused(tmp_path)
    assert (tmp_path / name / "inside").is_dir()


def test_a_state_folder_that_is_none_is_one_line(tmp_path):
    """The path of a file, of a device, of nothing that can be made, and one that is too long."""
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/below"):
        refused(tmp_path / place)
    refused("/dev/null")
    refused("/proc/nothing")
    refused(tmp_path / ("x" * 300))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux has no setpriv here")
@pytest.mark.parametrize("mode", [0o000, 0o555, 0o666])
def test_a_state_folder_without_rights_is_one_line(tmp_path, mode):
    """It was made by root, and the service runs as somebody else."""
    place = tmp_path / "state"
    place.mkdir()
    place.chmod(mode)
    try:
        refused(place, *(NO_RIGHTS if os.getuid() == 0 else ()))
    finally:
        place.chmod(0o700)
    assert list(place.iterdir()) == []
