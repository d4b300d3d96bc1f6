"""A sidecar that has no descriptor left: it waits and says so, and takes nobody for gone."""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.workers.orphans import Family, find_strays, kill_orphans
from sidecar.workers.processes import (
    UNSEEN,
    all_processes,
    ancestors,
    carries_mark,
    process_state,
    read_process,
)

pytestmark = pytest.mark.component

PATIENCE_S = 60.0
OUTRIDER = (sys.executable, "-m", "coordinator.cli")


@contextlib.contextmanager
def no_descriptor() -> Iterator[None]:
    """Let this process open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def await_that(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.1)


def test_a_look_that_cannot_be_taken_finds_nobody_gone():
    """Taken for gone, a living worker of the last generation would write beside the next one."""
    family = Family(
        marks={}, running=frozenset(), keep=frozenset(), sidecar_mark=None, sole_parent=True
    )
    us = os.getpid()
    with no_descriptor():
        assert process_state(us) == UNSEEN
        assert list(ancestors(us)) == [us]
        for look in (read_process, lambda pid: carries_mark(pid, "A", ["b"])):
            with pytest.raises(OSError, match="Too many open files"):
                look(us)
        with pytest.raises(OSError, match="Too many open files"):
            all_processes()
        left = kill_orphans(family)
        assert find_strays(family) == ()
    assert not left.nobody
    assert "cannot be seen (Too many open files)" in left.told([])


TRAIN = """
import os, sys, time
from pathlib import Path
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    sys.exit(7)
"""


def test_training_outlives_a_sidecar_without_descriptors_and_is_repaired_once_it_has_some(tmp_path):
    """A leak anywhere in the process would end the training that it is there to guard."""
    script, crash, errors = tmp_path / "train.py", tmp_path / "crash", tmp_path / "errors"
    script.write_text(TRAIN)
    place = ["--log-dir", tmp_path / "logs", "--run-dir", tmp_path / "run", "--no-warm-workers"]
    with errors.open("wb") as log:
        node = subprocess.Popen(
            [*OUTRIDER, "run", "--standalone", *place, "--", script, crash],
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )
    try:
        await_that("the worker", lambda: any((tmp_path / "logs").rglob("stdout.log")))
        time.sleep(1.0)  # what a start opens only for a moment is closed by then
        soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (3, hard))
        crash.touch()
        await_that("a word of it", lambda: "cannot be seen" in errors.read_text())
        assert node.poll() is None
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert node.wait(PATIENCE_S) == 0
    finally:
        node.kill()
        node.wait()
    told = errors.read_text()
    assert "Traceback" not in told, told
    assert "process restart: " in told
