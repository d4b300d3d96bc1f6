"""Warm workers are real processes: children of the sidecar, and like cold ones to their script."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidecar.workers.processes import become_subreaper, read_process
from sidecar.workers.warm_pool import WarmPool, WarmStartError
from sidecar.workers.worker import exit_cause

pytestmark = pytest.mark.component

WITHIN_S = 60.0
TELL = """
import json, os, sys, random
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "rank": os.environ.get("RANK"), "gone": os.environ.get("ONLY_BEFORE"), "cwd": os.getcwd(),
    "pid": os.getpid(), "session": os.getsid(0), "parent": os.getppid(),
    "random": random.random(), "warm": {"colorsys", "worker_shim.attachment"} <= set(sys.modules),
    "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""


def warm(script: Path, *arguments: str, modules=("colorsys",), environment=None):
    """Run one warm worker to its end; return its wait status and its output."""
    become_subreaper()
    command = (sys.executable, "-u", str(script), *arguments)
    inherited = {**os.environ, "ONLY_BEFORE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}

    async def run():
        pool = WarmPool(command, inherited)
        try:
            pool.begin(modules)
            deadline = time.monotonic() + WITHIN_S
            while not pool.ready:
                assert time.monotonic() < deadline, "the zygote never got ready"
                await asyncio.sleep(0.01)
            out, err = script.with_suffix(".out"), script.with_suffix(".err")
            with out.open("wb") as stdout, err.open("wb") as stderr:
                variables = environment or {"RANK": "3", "PATH": os.environ["PATH"]}
                outputs = (stdout.fileno(), stderr.fileno())
                pid = pool.fork(variables, outputs, str(script.parent))
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)  # works for a child only
            return pid, status, out.read_text(), err.read_text()
        finally:
            pool.close()

    return asyncio.run(run())


def test_a_warm_worker_looks_to_its_script_like_a_cold_one(tmp_path):
    """A script that behaves differently after a restart is a fault we made ourselves."""
    script = tmp_path / "script.py"
    script.write_text(TELL)
    pid, status, out, _ = warm(script, "--steps", "3")
    told = json.loads(out)
    assert exit_cause(status).clean
    assert told["argv"] == [str(script), "--steps", "3"]
    assert told["path"] == str(tmp_path)
    assert (told["name"], told["file"], told["main"]) == ("__main__", str(script), True)
    assert (told["rank"], told["gone"]) == ("3", None)
    assert told["cwd"] == str(tmp_path)
    assert (told["pid"], told["session"], told["parent"]) == (pid, pid, os.getpid())
    assert told["warm"]


def test_two_warm_workers_draw_different_random_numbers(tmp_path):
    """Ranks that shuffle alike would train on the same samples."""
    script = tmp_path / "script.py"
    script.write_text(TELL)
    first, second = (json.loads(warm(script)[2])["random"] for _ in range(2))
    assert first != second


def test_a_traceback_and_an_exit_status_are_those_of_the_script(tmp_path):
    """The last lines of standard error convict; ours among them would mislead."""
    script = tmp_path / "script.py"
    script.write_text("def train():\n    raise RuntimeError('CUDA out of memory')\ntrain()\n")
    _, status, _, err = warm(script)
    assert exit_cause(status).code == 1
    assert err.splitlines()[-1] == "RuntimeError: CUDA out of memory"
    assert "zygote" not in err
    assert f'File "{script}", line 3' in err
    script.write_text("import sys\nsys.exit(7)\n")
    assert exit_cause(warm(script)[1]).code == 7
    script.write_text("import os\nos.kill(os.getpid(), 11)\n")
    assert exit_cause(warm(script)[1]).signal == 11


def test_a_module_runs_warm_as_well(tmp_path, monkeypatch):
    """`outrider run -m` must not be the slow way."""
    (tmp_path / "trainer.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    script = tmp_path / "unused.py"
    script.write_text("")
    become_subreaper()
    command = (sys.executable, "-u", "-m", "trainer", "--lr", "1")

    async def run():
        pool = WarmPool(command, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
        try:
            pool.begin(("json",))
            deadline = time.monotonic() + WITHIN_S
            while not pool.ready:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            out = tmp_path / "out"
            with out.open("wb") as file:
                pid = pool.fork(dict(os.environ), (file.fileno(), file.fileno()), str(tmp_path))
            await asyncio.to_thread(os.waitpid, pid, 0)
            return out.read_text()
        finally:
            pool.close()

    assert asyncio.run(run()) == "__main__ ['--lr', '1']\n"


def test_a_large_environment_arrives_whole(tmp_path):
    """A cluster's environment is long, and a cut one starts a different job."""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(len(os.environ['LONG']))\n")
    environment = {"LONG": "x" * 120_000, "PATH": os.environ["PATH"]}
    assert warm(script, environment=environment)[2] == "120000\n"


def test_imports_that_cannot_be_forked_leave_workers_cold(tmp_path):
    """A lost thread deadlocks a worker at a time nobody connects with the restart."""
    threaded = tmp_path / "threaded.py"
    threaded.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    script = tmp_path / "script.py"
    script.write_text("")
    inherited = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}

    async def run():
        pool = WarmPool((sys.executable, "-u", str(script)), inherited)
        sys.path.insert(0, str(tmp_path))
        try:
            pool.begin(("threaded",))
            pid = next(iter(pool.pids))
            deadline = time.monotonic() + WITHIN_S
            while pool.pids:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert read_process(pid) is None
            with pytest.raises(WarmStartError):
                pool.fork({}, (1, 2), str(tmp_path))
        finally:
            sys.path.remove(str(tmp_path))
            pool.close()

    asyncio.run(run())


def test_a_killed_zygote_is_an_answer_and_not_a_hang(tmp_path):
    """A restart that waits for a dead helper waits for ever."""
    script = tmp_path / "script.py"
    script.write_text("")

    async def run():
        pool = WarmPool(
            (sys.executable, "-u", str(script)),
            {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            pool.begin(("json",))
            deadline = time.monotonic() + WITHIN_S
            while not pool.ready:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            os.kill(next(iter(pool.pids)), signal.SIGKILL)
            with pytest.raises(WarmStartError):
                pool.fork({}, (1, 2), str(tmp_path))
            assert not pool.ready
        finally:
            pool.close()

    asyncio.run(run())


def test_a_warm_worker_dies_with_its_sidecar(tmp_path):
    """A worker that nobody watches runs on under a generation that is over."""
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import asyncio, os, sys\n"
        "from sidecar.workers.processes import become_subreaper\n"
        "from sidecar.workers.warm_pool import WarmPool\n"
        "async def main():\n"
        "    become_subreaper()\n"
        f"    pool = WarmPool((sys.executable, '-u', {str(script)!r}), dict(os.environ))\n"
        "    pool.begin(('json',))\n"
        "    while not pool.ready:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(pool.fork(dict(os.environ), (1, 2), '/'), flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    sidecar = subprocess.Popen(
        [sys.executable, str(parent)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        lines = sorted(sidecar.stdout.readline().strip() for _ in range(2))
        pid = int(lines[0])
        assert lines[1] == "up"
    finally:
        sidecar.kill()
        sidecar.wait()
        sidecar.stdout.close()
    deadline = time.monotonic() + WITHIN_S
    while (info := read_process(pid)) is not None and info.state != "Z":
        assert time.monotonic() < deadline, "the worker outlived its sidecar"
        time.sleep(0.01)
