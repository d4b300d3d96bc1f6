"""torchrun from an installed wheel is told its place by the sidecar and trains on two nodes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
WITHIN_S = 200.0
SCRIPT = """\
import os
import torch
import torch.distributed as dist
import worker_shim.rendezvous
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
place = os.path.dirname(worker_shim.rendezvous.__file__)
line = f"rank {dist.get_rank()} of {dist.get_world_size()} sum {total.item()} {place}\\n"
os.write(1, line.encode())  # in one piece: both ranks of a node write into one pipe
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel's content, as pip puts it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    plain = ["--no-deps", "--no-build-isolation"]
    source = folder / "source"
    subprocess.run(
        ["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={source}/"], check=True
    )
    subprocess.run([*pip, "wheel", *plain, "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", *plain, "--target", str(site), str(wheel)], check=True)
    return site


def environment(site: Path) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_")}
    return {**plain, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}


def begin(site: Path, folder: Path, *arguments: str) -> subprocess.Popen:
    with (folder / "out.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "coordinator.cli", *arguments],
            cwd=folder,
            env=environment(site),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def test_torchrun_is_told_its_place_and_both_nodes_train(installed, tmp_path):
    """A backend that works from the tree only is found by nobody who installed it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    job = ("--job", "j", "--nnodes", "2", "--nproc-per-node", "1")
    state = ("--port", "0", "--state-dir", "state", "--linger", "0")
    started = [begin(installed, tmp_path, "coordinator", *job, *state)]
    try:
        address = tmp_path / "state" / "coordinator.url"
        deadline = time.monotonic() + WITHIN_S
        while not address.exists():
            assert time.monotonic() < deadline, (tmp_path / "out.log").read_text()
            time.sleep(0.1)
        for node in ("a", "b"):
            run = ("run", "--coordinator", address.read_text().strip(), *job)
            own = ("--node-name", node, "--host", "127.0.0.1", "--http-port", "0")
            files = ("--log-dir", f"logs-{node}", "--run-dir", f"run-{node}")
            torchrun = ("-m", "--", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2")
            told = ("--rdzv-backend=outrider", "--rdzv-endpoint=unix:", "script.py")
            started.append(begin(installed, tmp_path, *run, *own, *files, *torchrun, *told))
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    lines = [
        line
        for log in tmp_path.glob("logs-*/**/stdout.log")
        for line in log.read_text().splitlines()
        if line.startswith("rank ")
    ]
    assert codes == [0, 0, 0], (tmp_path / "out.log").read_text()[-4000:]
    assert sorted(" ".join(line.split()[:6]) for line in lines) == [
        f"rank {rank} of 4 sum 10.0" for rank in range(4)
    ]
    assert all(str(installed) in line for line in lines)


def test_torchrun_outside_of_a_sidecar_says_what_to_do(installed, tmp_path):
    """An election that waits ten minutes for nobody is what this replaces."""
    command = ["-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
    command += ["--rdzv-backend=outrider", "--rdzv-endpoint=unix:", "x.py"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert done.returncode != 0
    assert "start torchrun as a worker of `outrider run`, one per node" in done.stderr
