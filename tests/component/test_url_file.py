"""The file from which scripts learn where a coordinator listens, under other hands."""

import shutil
import signal
from pathlib import Path

import pytest

from coordinator.listening import CoordinatorError
from coordinator.url_file import UrlFile
from tests.component.test_coordinator_daemon import OUTRIDER, finished, served
from tests.component.waiting import await_that

pytestmark = pytest.mark.component

URL = "http://127.0.0.1:1234"
OTHER = "http://127.0.0.1:4321\n"


@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_deleted_address_is_told_again_with_the_next_decision(tmp_path, whole_folder):
    """A cleaner of old files runs at night; the script that wants the port runs at noon."""
    state_dir = tmp_path / "state"
    address = state_dir / "coordinator.url"
    with served(state_dir, "--linger", "100") as process:
        told = address.read_text()
        if whole_folder:
            shutil.rmtree(state_dir)
        else:
            address.unlink()
        order = ["stop", "--coordinator", process.url, "--why", "a decision like any other"]
        assert finished([*OUTRIDER, *order]).returncode == 0
        await_that("the address", address.exists)
        assert address.read_text() == told
        process.popen.send_signal(signal.SIGTERM)
        process.ended()
    assert not address.exists()


def test_the_address_of_another_coordinator_is_left_alone(tmp_path: Path) -> None:
    """Who comes after the folder was deleted tells its own; the elder must not take it away."""
    ours = UrlFile(tmp_path)
    ours.write(URL)
    (tmp_path / "coordinator.url").write_text(OTHER)
    ours.keep()
    ours.withdraw()
    assert (tmp_path / "coordinator.url").read_text() == OTHER


def test_nothing_is_told_before_it_is_written_nor_after_it_is_withdrawn(tmp_path: Path) -> None:
    """An address where nobody listens is worse than none."""
    ours = UrlFile(tmp_path)
    ours.keep()
    ours.write(URL)
    ours.withdraw()
    ours.keep()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_not_made_again_by_the_address_alone(tmp_path, caplog):
    """The journal makes it, if anybody does; where something stands in the way it is said once."""
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    ours = UrlFile(state_dir)
    ours.write(URL)
    shutil.rmtree(state_dir)
    ours.keep()
    assert not state_dir.exists()
    (state_dir / "coordinator.new").mkdir(parents=True)
    ours.keep()
    ours.keep()
    assert caplog.text.count("coordinator.new cannot be written") == 1
    with pytest.raises(CoordinatorError, match="--state-dir"):
        ours.write(URL)
