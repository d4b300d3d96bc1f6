"""What workers have put into sessions of their own ends with a sidecar that is killed.

Real sidecars, killed by SIGKILL; real children: detached commands, a daemon, and the workers of a
torch DataLoader that lead sessions of their own.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.workers.guardian import MODULE, draw_mark
from sidecar.workers.marks import SIDECAR_MARK_ENV, SidecarMark, end_marked
from sidecar.workers.processes import (
    all_processes,
    become_subreaper,
    descendants,
    process_state,
    read_process,
    reap,
)
from sidecar.workers.warm_pool import WarmPool

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

WITHIN_S = 120.0
DETACHING = """
import json, os, pathlib, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
child = subprocess.Popen(sleep)
apart = subprocess.Popen(sleep, start_new_session=True)
reading, writing = os.pipe()
if os.fork() == 0:  # a daemon: its parent ends, it leads a session, it keeps no file open
    os.setsid()
    daemon = os.fork()
    if daemon:
        os.write(writing, str(daemon).encode())
        os._exit(0)
    time.sleep(3600)
os.wait()
pids = {"worker": os.getpid(), "child": child.pid, "apart": apart.pid}
pids["daemon"] = int(os.read(reading, 64))
draft = pathlib.Path(sys.argv[1], "draft")
draft.write_text(json.dumps(pids))
draft.rename(pathlib.Path(sys.argv[1], "pids"))
time.sleep(3600)
"""
LOADING = """
import json, os, pathlib, sys, time
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 1 << 30
    def __getitem__(self, index):
        return os.getpid()

def leave(_):
    os.setsid()

if __name__ == "__main__":
    loader = DataLoader(
        Numbers(), num_workers=2, batch_size=1, worker_init_fn=leave,
        multiprocessing_context=sys.argv[2], prefetch_factor=2)
    batches = iter(loader)
    loaders = {int(next(batches)) for _ in range(4)}
    pids = {"worker": os.getpid(), **{f"loader {pid}": pid for pid in loaders}}
    draft = pathlib.Path(sys.argv[1], "draft")
    draft.write_text(json.dumps(pids))
    draft.rename(pathlib.Path(sys.argv[1], "pids"))
    # Held here: a loader whose parent is gone would otherwise notice within seconds by itself.
    for pid in loaders:
        os.kill(pid, 19)
    pathlib.Path(sys.argv[1], "held").touch()
    time.sleep(3600)
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    return process_state(pid) in "XZ"


@pytest.fixture
def sidecars(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start standalone jobs, each in a session of its own; end all of them afterwards."""
    running = []

    def start(name: str, script: str, *arguments: str, node: str = "here") -> subprocess.Popen:
        path = tmp_path / f"{name}.py"
        path.write_text(script)
        (tmp_path / name).mkdir()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "coordinator.cli", "run", "--standalone"),
                *("--job", "orphans", "--node-name", node, "--log-dir", str(tmp_path / "logs")),
                *(str(path), str(tmp_path / name), *arguments),
            ],
            stderr=(tmp_path / f"{name}.err").open("wb"),
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def started(folder: Path) -> dict[str, int]:
    """Return the processes that the script says it has started, once it has."""
    until((folder / "pids").exists)
    pids = json.loads((folder / "pids").read_text())
    assert {name for name, pid in pids.items() if gone(pid)} == set()
    return pids


def guardian_of(sidecar: subprocess.Popen) -> int:
    def is_guardian(pid: int) -> bool:
        return MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")

    (pid,) = filter(is_guardian, descendants(sidecar.pid, all_processes()))
    return pid


def bystander(mark: SidecarMark | None = None) -> subprocess.Popen:
    environment = {**os.environ, **({} if mark is None else mark.environment)}
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def test_a_killed_sidecar_leaves_none_of_its_workers_detached_children(tmp_path, sidecars):
    """A daemon of a dead worker would hold the GPU's memory until somebody finds it."""
    sidecar = sidecars("first", DETACHING)
    pids = started(tmp_path / "first")
    stranger = bystander()
    try:
        guardian = guardian_of(sidecar)
        sidecar.kill()
        sidecar.wait()
        until(lambda: all(map(gone, pids.values())))
        until(lambda: gone(guardian))
        assert stranger.poll() is None
        told = (tmp_path / "first.err").read_text()
        assert f"the sidecar (process {sidecar.pid}) is gone" in told
        assert f"{pids['daemon']} (" in told
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_killed_sidecar_leaves_no_data_loader(tmp_path, sidecars, way):
    """A loader that hangs in a read keeps its files and gigabytes of shared memory for hours."""
    sidecar = sidecars("loading", LOADING, way)
    pids = started(tmp_path / "loading")
    assert len(pids) == 3
    until((tmp_path / "loading" / "held").exists)
    sidecar.kill()
    sidecar.wait()
    until(lambda: all(map(gone, pids.values())))


def test_the_next_sidecar_ends_what_one_left_that_was_killed_with_its_guardian(tmp_path, sidecars):
    """An OOM killer that takes both would leave two owners of one GPU."""
    elsewhere = sidecars("elsewhere", DETACHING, node="there")
    spared = started(tmp_path / "elsewhere")
    first = sidecars("first", DETACHING)
    left = started(tmp_path / "first")
    guardian = guardian_of(first)
    environ = Path(f"/proc/{left['daemon']}/environ").read_bytes().split(b"\0")
    name = f"{SIDECAR_MARK_ENV}="
    (text,) = (it.decode()[len(name) :] for it in environ if it.startswith(name.encode()))
    dead = SidecarMark.parse(text)
    assert dead is not None
    assert (dead.pid, dead.started) == (first.pid, read_process(first.pid).started)
    alive = replace(
        dead, token="0" * 32, pid=os.getpid(), started=read_process(os.getpid()).started
    )
    strangers = [
        bystander(),
        bystander(alive),  # the same node's, and its sidecar is there
        bystander(replace(dead, node="0" * 32)),  # another node's dead sidecar
        bystander(replace(dead, counted_in="1-2")),  # seen from another container
    ]
    try:
        os.kill(guardian, signal.SIGKILL)
        first.kill()
        first.wait()
        until(lambda: gone(left["worker"]))
        assert not gone(left["daemon"])
        assert not gone(left["apart"])
        sidecars("second", DETACHING)
        new = started(tmp_path / "second")
        assert all(map(gone, left.values()))
        assert {name for name, pid in {**new, **spared}.items() if gone(pid)} == set()
        assert [one.poll() for one in strangers] == [None] * len(strangers)
        assert elsewhere.poll() is None
        told = (tmp_path / "second.err").read_text()
        assert "ended what a killed sidecar of this node had left" in told
    finally:
        for one in strangers:
            one.kill()
            one.wait()


def test_a_sidecar_whose_guardian_was_ended_starts_another(tmp_path, sidecars):
    """One stray kill would take the protection away for the rest of a month's run."""
    sidecar = sidecars("first", DETACHING)
    pids = started(tmp_path / "first")
    guardian = guardian_of(sidecar)
    os.kill(guardian, signal.SIGKILL)
    (tmp_path / "first" / "pids").unlink()
    os.kill(pids["worker"], signal.SIGKILL)
    again = started(tmp_path / "first")
    assert again["worker"] != pids["worker"]
    assert guardian_of(sidecar) != guardian


def test_what_a_warm_worker_forked_carries_its_sidecars_mark_too(tmp_path):
    """A restarted job's loaders show the environment of the process they were forked from."""
    become_subreaper()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(3600)\n"
    )
    mark = draw_mark("job", "here")
    inherited = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **mark.environment}

    async def run() -> int:
        pool = WarmPool((sys.executable, "-u", str(script)), inherited)
        try:
            pool.begin(("colorsys",))
            deadline = time.monotonic() + WITHIN_S
            while not pool.ready:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            with (tmp_path / "out").open("wb") as out:
                files = (out.fileno(), out.fileno())
                return pool.fork(dict(os.environ), files, str(tmp_path))
        finally:
            pool.close()

    worker = asyncio.run(run())
    os.waitpid(worker, 0)

    def orphans() -> list[int]:
        below = descendants(os.getpid(), all_processes())
        return [pid for pid in below if not gone(pid) and os.getsid(pid) == pid]

    until(orphans)
    (orphan,) = orphans()
    ended = end_marked(lambda other: other.token == mark.token, limit_s=WITHIN_S)
    assert orphan in ended.killed
    assert ended.left == ()
    assert gone(orphan)
    until(lambda: reap(orphan) is not None)
