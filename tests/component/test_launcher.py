"""The launcher with real processes, files, pages and ports."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from scout.progress import PageWriter
from sidecar.api import ExitCause, Start
from sidecar.events import SpawnFailed, WorkerExited, WorkersGone, WorkersSpawned
from sidecar.workers.command import CommandError, WorkerCommand
from sidecar.workers.launch import LaunchSettings
from sidecar.workers.launcher import Launcher, LauncherEvent
from sidecar.workers.pages import ProgressPages
from sidecar.workers.ports import reserve_port
from sidecar.workers.processes import ProcessInfo, read_process, signal_process

pytestmark = pytest.mark.component

PATIENCE_S = 30.0
REPOSITORY = Path(__file__).parents[2]
INHERITED = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def start_of(generation: int = 1, **changes: object) -> Start:
    fields = {
        "generation": generation,
        "topology_version": 1,
        "group_rank": 1,
        "nnodes": 3,
        "master_addr": "127.0.0.1",
        "master_port": 29511,
        "fault_count": 4,
        "node_hosts": ("127.0.0.1",) * 3,
    }
    return Start(**{**fields, **changes})


class Node:
    """A launcher with its pages, and every event it put."""

    def __init__(self, tmp_path: Path, script: str, nproc: int = 2, **settings: object) -> None:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        self.events: list[LauncherEvent] = []
        self.pages = ProgressPages(job="job", node="n1", identity=str(tmp_path))
        self.pages.claim()
        self.output = tmp_path / "logs"
        self.launcher = Launcher(
            LaunchSettings(
                job="job",
                node="n1",
                nproc=nproc,
                command=WorkerCommand(argv=(str(path),)).resolve(),
                output=self.output,
                socket_path=str(tmp_path / "s"),
                inherited=INHERITED,
                **settings,
            ),
            self.pages,
            self.events.append,
        )

    def seen(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def log(self, rank: int, stream: str = "stdout", generation: int = 1) -> str:
        return (self.output / f"gen_{generation}" / f"rank_{rank}" / f"{stream}.log").read_text()

    async def wait(self, condition: Callable[[], object]) -> None:
        await until(condition)

    async def close(self) -> None:
        assert await self.launcher.close(PATIENCE_S)
        self.pages.close()


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    info = read_process(pid)
    return info is None or info.state in "XZ"


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable:
    return asyncio.run if request.param == "asyncio" else uvloop.run


def test_a_worker_finds_the_environment_that_torchrun_would_give_it(tmp_path, monkeypatch):
    """A script written for torchrun would compute wrong ranks or never meet its peers."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    async def scenario() -> None:
        node = Node(tmp_path, "import json, os; print(json.dumps(dict(os.environ)))")
        node.launcher.spawn(start_of(env={"EXTRA": "1"}))
        await node.wait(lambda: len(node.seen(WorkerExited)) == 2)
        env = json.loads(node.log(rank=3))
        wanted = {
            "RANK": "3",
            "LOCAL_RANK": "1",
            "GROUP_RANK": "1",
            "ROLE_RANK": "3",
            "ROLE_NAME": "default",
            "WORLD_SIZE": "6",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_WORLD_SIZE": "3",
            "ROLE_WORLD_SIZE": "6",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511",
            "TORCHELASTIC_RESTART_COUNT": "4",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "OUTRIDER_GENERATION": "1",
            "EXTRA": "1",
        }
        assert {name: env.get(name) for name in wanted} == wanted
        PageWriter.open(env["OUTRIDER_PROGRESS_PAGE"], int(env["OUTRIDER_PROGRESS_TOKEN"])).close()
        await node.close()
        assert not os.path.exists(env["OUTRIDER_PROGRESS_PAGE"])  # noqa: ASYNC240, PTH110

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        ("sys.exit(0)", ExitCause(code=0)),
        ("sys.exit(1)", ExitCause(code=1)),
        ("sys.exit(3)", ExitCause(code=3)),
        ("os._exit(137)", ExitCause(code=137)),
        ("os.kill(os.getpid(), signal.SIGKILL)", ExitCause(signal=9)),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ExitCause(signal=11)),
    ],
)
def test_an_exit_is_reported_with_its_true_cause(tmp_path, run, ending, cause):
    """A policy keyed on exit codes would treat a configuration error as a hardware fault."""

    async def scenario() -> None:
        script = f"""
            import os, resource, signal, sys
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            print("last words", file=sys.stderr)
            {ending}
            """
        node = Node(tmp_path, script, nproc=1)
        node.launcher.spawn(start_of())
        await node.wait(lambda: node.seen(WorkerExited))
        (exited,) = node.seen(WorkerExited)
        assert exited.cause == cause
        assert exited.last_lines == ("last words",)
        assert exited.pid == node.seen(WorkersSpawned)[0].pids[0]
        await node.close()

    run(scenario())


def test_a_stop_ends_workers_and_every_descendant_even_one_in_its_own_session(tmp_path, run):
    """A survivor would hold the GPU's memory and fight the next generation for it."""
    script = """
        import os, subprocess, sys, time
        plain = subprocess.Popen(["sleep", "600"])
        apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
        orphan = subprocess.check_output(
            ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"])
        print("pids", plain.pid, apart.pid, int(orphan), flush=True)
        time.sleep(600)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=1)
        bystander = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220
        try:
            node.launcher.spawn(start_of())
            await node.wait(lambda: node.log(rank=1).endswith("\n"))
            children = [int(word) for word in node.log(rank=1).split()[1:]]
            assert not any(map(gone, children))
            node.launcher.kill(1, grace_s=0.0)
            await node.wait(lambda: node.seen(WorkersGone))
            assert all(map(gone, children))
            assert bystander.poll() is None
            kinds = [type(event) for event in node.events]
            assert kinds == [WorkersSpawned, WorkerExited, WorkersGone]
        finally:
            bystander.kill()
            bystander.wait()
            await node.close()

    run(scenario())


def test_a_crash_takes_the_workers_children_with_it(tmp_path):
    """A data loader left behind by a crashed rank would keep files and memory for hours."""
    script = """
        import os, signal, subprocess
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=1)
        node.launcher.spawn(start_of())
        await node.wait(lambda: node.seen(WorkerExited))
        child = int(node.log(rank=1))
        await node.wait(lambda: gone(child))
        assert [exited.cause for exited in node.seen(WorkerExited)] == [ExitCause(signal=9)]
        assert not node.seen(WorkersGone), "the child went without being stopped"
        await node.close()

    asyncio.run(scenario())


def test_a_polite_stop_lets_a_worker_finish_and_a_stopped_one_does_not_hold_it_up(tmp_path):
    """A SIGSTOPped rank would make every recovery wait for the whole grace."""
    script = """
        import os, signal, sys, time
        def leave(*_):
            print("saved", flush=True)
            sys.exit(7)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=2)
        node.launcher.spawn(start_of())
        await node.wait(lambda: all("ready" in node.log(rank) for rank in (2, 3)))
        pids = node.seen(WorkersSpawned)[0].pids
        os.kill(pids[1], signal.SIGSTOP)
        await node.wait(lambda: read_process(pids[1]).state == "T")
        node.launcher.kill(1, grace_s=600.0)
        await node.wait(lambda: node.seen(WorkersGone))
        causes = {event.local_rank: event.cause for event in node.seen(WorkerExited)}
        assert causes == {0: ExitCause(code=7), 1: ExitCause(signal=9)}
        assert "saved" in node.log(rank=2)
        await node.close()

    asyncio.run(scenario())


def test_a_worker_that_handles_sigusr1_may_save_and_one_that_does_not_gets_sigterm(tmp_path):
    """Half of an hour's work is lost for want of a signal that the script waits for."""
    script = """
        import os, signal, sys, time
        def leave(number, _):
            print("asked by", number, flush=True)
            sys.exit(0 if number == signal.SIGUSR1 else 7)
        if os.environ["LOCAL_RANK"] == "0":
            signal.signal(signal.SIGUSR1, leave)
        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=2)
        node.launcher.spawn(start_of())
        await node.wait(lambda: all("ready" in node.log(rank) for rank in (2, 3)))
        node.launcher.kill(1, grace_s=600.0)
        await node.wait(lambda: node.seen(WorkersGone))
        causes = {event.local_rank: event.cause for event in node.seen(WorkerExited)}
        assert causes == {0: ExitCause(code=0), 1: ExitCause(code=7)}
        assert f"asked by {int(signal.SIGUSR1)}" in node.log(rank=2)
        assert f"asked by {int(signal.SIGTERM)}" in node.log(rank=3)
        await node.close()

    asyncio.run(scenario())


def test_after_half_of_the_time_sigterm_follows_and_then_the_kill(tmp_path):
    """A save that hangs must not hold the whole fleet for ever."""
    script = """
        import signal, time
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, _: print("heard", number, flush=True))
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=1)
        node.launcher.spawn(start_of())
        rank = start_of().group_rank
        await node.wait(lambda: "ready" in node.log(rank))
        node.launcher.kill(1, grace_s=3.0)
        await node.wait(lambda: node.seen(WorkersGone))
        heard = [line for line in node.log(rank).splitlines() if line.startswith("heard")]
        assert heard == [f"heard {int(signal.SIGUSR1)}", f"heard {int(signal.SIGTERM)}"]
        assert node.seen(WorkerExited)[0].cause == ExitCause(signal=9)
        await node.close()

    asyncio.run(scenario())


def test_the_table_of_addresses_stands_whole_before_a_worker_starts(tmp_path):
    """A script that reads half a table, or yesterday's, dials a node that is gone."""
    folder = tmp_path / "input" / "config"
    script = f"""
        print(open({str(folder / "pod_resourceconfig.json")!r}).read(), flush=True)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=1, resource_config=folder)
        start = start_of(node_hosts=("10.0.0.1", "10.0.0.2", "10.0.0.3"))
        node.launcher.spawn(start)
        await node.wait(lambda: node.seen(WorkerExited))
        assert json.loads(node.log(start.group_rank)) == {
            "ips": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
            "current_pod_ip": "10.0.0.2",
            "ips_timestamp": str(start.topology_version),
        }
        assert [path.name for path in folder.iterdir()] == ["pod_resourceconfig.json"]
        await node.close()

    asyncio.run(scenario())


def test_a_harsher_stop_cuts_the_grace_of_one_under_way(tmp_path):
    """An operator could not force a stop that a worker ignores."""
    script = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(600)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=1)
        node.launcher.spawn(start_of())
        await node.wait(lambda: "ready" in node.log(rank=1))
        node.launcher.kill(1, grace_s=600.0)
        await asyncio.sleep(0.1)
        assert not node.seen(WorkersGone)
        node.launcher.kill(2, grace_s=0.0)
        await node.wait(lambda: node.seen(WorkersGone))
        assert node.seen(WorkersGone) == [WorkersGone(generation=2)]
        await node.close()

    asyncio.run(scenario())


# Holds a process at its exit, where no signal reaches it: as long as this one runs.
HOLDING = """
import ctypes, sys, time
trace = ctypes.CDLL(None, use_errno=True).ptrace
trace.argtypes = [ctypes.c_long] * 4
seize, stop_at_exit = 0x4206, 0x40
print(trace(seize, int(sys.argv[1]), 0, stop_at_exit), flush=True)
time.sleep(600)
"""


def test_c78_a_worker_that_outlives_sigkill_is_named_and_its_stop_is_not_called_done(
    tmp_path, monkeypatch, caplog
):
    """A node whose worker hangs in the kernel would be given the next generation on top of it."""
    monkeypatch.setattr("sidecar.workers.launcher.STUCK_WARNING_S", 0.2)
    script = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(600)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=2)
        node.launcher.spawn(start_of())
        await node.wait(lambda: all("ready" in node.log(rank) for rank in (2, 3)))
        pids = node.seen(WorkersSpawned)[0].pids
        command = [sys.executable, "-c", HOLDING, str(pids[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:  # noqa: ASYNC220
            try:
                if holder.stdout.readline() != b"0\n":
                    pytest.skip("this machine lets no process be traced")
                node.launcher.kill(1, grace_s=0.3)
                await node.wait(lambda: f"[{pids[1]}] outlive SIGKILL" in caplog.text)
                # The other one was killed after its grace; this one is not said to be gone.
                assert [event.local_rank for event in node.seen(WorkerExited)] == [0]
                assert node.seen(WorkersGone) == []
                assert not await node.launcher.close(0.1)
                node.launcher.spawn(start_of(generation=2))
                (refused,) = node.seen(SpawnFailed)
                assert "generation 1 is still being stopped" in refused.reason
            finally:
                holder.kill()
        await node.wait(lambda: node.seen(WorkersGone))
        assert {event.cause for event in node.seen(WorkerExited)} == {ExitCause(signal=9)}
        await node.close()

    asyncio.run(scenario())


def test_c80_a_number_that_another_process_has_by_now_is_never_signalled():
    """A fast restart gives pids anew; the stop of the last one would hit a stranger."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        try:
            info = read_process(stranger.pid)
            for started in (info.started - 1, info.started + 1):
                signal_process(replace(info, started=started), signal.SIGKILL)
            assert not gone(stranger.pid)
            signal_process(info, signal.SIGKILL)
            assert stranger.wait() == -signal.SIGKILL
        finally:
            stranger.kill()
    signal_process(info, signal.SIGKILL)  # and one of nobody is none


HIDING = """
import subprocess, time
hidden = subprocess.check_output(
    ["env", "-i", "setsid", "sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"])
ended = subprocess.check_output(["sh", "-c", "setsid true >/dev/null 2>&1 & echo $!"])
print(int(hidden), int(ended), flush=True)
time.sleep(600)
"""
ADOPTING = """
import asyncio, sys
from pathlib import Path
folder, script, *sys.path[:0] = sys.argv[1:]
from test_launcher import Node, gone, read_process, start_of
from sidecar.events import WorkersGone

async def main():
    node = Node(Path(folder), script, nproc=1, sole_parent=True)
    node.launcher.spawn(start_of())
    await node.wait(lambda: node.log(1).endswith("\\n"))
    hidden, ended = map(int, node.log(1).split())
    await node.wait(lambda: read_process(ended).state == "Z")
    node.launcher.kill(1, 0.0)
    await node.wait(lambda: node.seen(WorkersGone))
    print(gone(hidden), read_process(ended))
    await node.close()

asyncio.run(main())
"""


def test_a_sidecar_of_its_own_knows_even_an_orphan_that_hides(tmp_path):
    """A daemon that cleared its environment would keep the GPU, and zombies would pile up."""
    paths = [str(Path(__file__).parent), str(REPOSITORY)]
    done = subprocess.run(
        [sys.executable, "-c", ADOPTING, str(tmp_path), HIDING, *paths],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stderr, done.stdout) == ("", "True None\n")


def test_c76_workers_die_with_a_sidecar_that_is_killed(tmp_path):
    """Workers of a dead sidecar would train on under a generation nobody can stop."""
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    host = f"""
        import asyncio, sys
        from pathlib import Path
        sys.path[:0] = {[str(Path(__file__).parent), str(REPOSITORY)]!r}
        from test_launcher import Node, start_of
        async def main():
            node = Node(Path({str(tmp_path)!r}), {script!r}, nproc=8)
            node.launcher.spawn(start_of())
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    sidecar = subprocess.Popen([sys.executable, "-c", textwrap.dedent(host)])
    folder = tmp_path / "logs" / "gen_1"
    logs = [folder / f"rank_{rank}" / "stdout.log" for rank in range(8, 16)]
    try:
        for log in logs:
            asyncio.run(until(lambda log=log: log.exists() and log.read_text().endswith("\n")))
        workers = [read_process(int(log.read_text())) for log in logs]
        assert all(info is not None and info.parent == sidecar.pid for info in workers)
    finally:
        sidecar.kill()
        sidecar.wait()
    for info in workers:

        def ended(info: ProcessInfo = info) -> bool:
            now = read_process(info.pid)
            return now is None or now.state in "XZ" or now.started != info.started

        asyncio.run(until(ended))
    # The next sidecar on this machine, whoever it is, clears what that one left.
    left = ProgressPages(job="job", node="n1", identity=str(tmp_path)).folder
    assert len(list(left.glob("generation-*"))) == 8
    other = ProgressPages(job="job", node="n2", identity=str(tmp_path))
    other.claim()
    assert not left.exists()
    assert other.folder.exists()
    other.close()
    assert not other.folder.exists()


def test_a_spawn_that_fails_says_why_and_leaves_nothing_running(tmp_path):
    """A node that cannot start its workers would be waited for without end."""

    async def scenario() -> None:
        node = Node(tmp_path, "")
        (tmp_path / "logs").write_text("a file where a folder should be")
        node.launcher.spawn(start_of())
        (failed,) = node.events
        assert isinstance(failed, SpawnFailed)
        assert "cannot start a worker" in failed.reason
        assert node.pages.snapshots(0) == ()
        await node.close()

    asyncio.run(scenario())


def test_a_page_tells_step_and_process_state_without_the_workers_help(tmp_path):
    """A frozen rank could not be told from one that computes."""
    script = """
        import os, time
        from scout.progress import PageWriter
        page = PageWriter.open(
            os.environ["OUTRIDER_PROGRESS_PAGE"], int(os.environ["OUTRIDER_PROGRESS_TOKEN"]))
        page.publish(41)
        time.sleep(600)
        """

    async def scenario() -> None:
        node = Node(tmp_path, script, nproc=1)
        node.launcher.spawn(start_of())
        pid = node.seen(WorkersSpawned)[0].pids[0]
        await node.wait(lambda: node.pages.snapshots(time.monotonic_ns())[0].step == 41)
        os.kill(pid, signal.SIGSTOP)
        await node.wait(lambda: node.pages.snapshots(0)[0].process_state == "T")
        (snapshot,) = node.pages.snapshots(time.monotonic_ns())
        assert (snapshot.rank, snapshot.node, snapshot.local_rank) == (1, "n1", 0)
        assert snapshot.progress_age_ns >= 0
        await node.close()

    asyncio.run(scenario())


def test_a_second_run_of_a_generation_does_not_read_the_lines_of_the_first(tmp_path):
    """An old `loss: nan` would convict a healthy run."""

    async def scenario() -> None:
        node = Node(tmp_path, "print('run')", nproc=1)
        for count in (1, 2):
            node.launcher.spawn(start_of())
            await node.wait(lambda count=count: len(node.seen(WorkerExited)) == count)
        assert node.log(rank=1) == "run\n"
        await node.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (WorkerCommand(argv=()), "no training script"),
        (WorkerCommand(argv=("missing.py",)), "'missing.py' does not exist"),
        (WorkerCommand(argv=("no.such.module",), module=True), "not importable"),
        (WorkerCommand(argv=("no-such-program",), no_python=True), "not on PATH"),
    ],
)
def test_a_command_that_cannot_run_is_refused_before_anything_starts(command, words):
    """A typo would become a crash loop of every node."""
    with pytest.raises(CommandError, match=words):
        command.resolve()


def test_a_command_runs_as_script_module_or_program(tmp_path):
    """A script that runs under torchrun would not run here."""
    script = tmp_path / "train.py"
    script.touch()
    python = sys.executable
    assert WorkerCommand(argv=(str(script), "--lr", "1")).resolve() == (
        python,
        "-u",
        str(script),
        "--lr",
        "1",
    )
    assert WorkerCommand(argv=("json.tool",), module=True).resolve()[:4] == (
        python,
        "-u",
        "-m",
        "json.tool",
    )
    assert Path(WorkerCommand(argv=("sh", "-c"), no_python=True).resolve()[0]).is_absolute()


RESERVE = """
import sys
from sidecar.workers.ports import reserve_port
held = [reserve_port() for _ in range(50)]
print(*(port.number for port in held), flush=True)
sys.stdin.readline()
"""


def test_a_reserved_port_is_nobody_elses_and_still_lets_the_store_listen():
    """Two jobs on one machine would meet at one rendezvous, or rank 0 could not listen."""
    helpers = [
        subprocess.Popen(
            [sys.executable, "-c", RESERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=INHERITED,
        )
        for _ in range(2)
    ]
    numbers = [number for helper in helpers for number in helper.stdout.readline().split()]
    for helper in helpers:
        helper.communicate(b"done\n", timeout=PATIENCE_S)
    assert len(set(numbers)) == 100

    port = reserve_port()
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    store.bind(("0.0.0.0", port.number))
    store.listen()
    client = socket.create_connection(("127.0.0.1", port.number), timeout=PATIENCE_S)
    client.close()
    store.close()
    port.release()


def test_torchs_own_store_listens_on_a_reserved_port():
    """The assumption about torch that the reservation stands on would fail in a job first."""
    distributed = pytest.importorskip("torch.distributed")
    port = reserve_port()
    store = distributed.TCPStore("127.0.0.1", port.number, 1, is_master=True)
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    port.release()


def test_c82_what_one_generation_left_in_its_store_is_not_in_the_next_ones():
    """An id of the last run's communicator would be taken for this one's: nobody ever meets."""
    distributed = pytest.importorskip("torch.distributed")

    def store_of(port: int) -> object:
        return distributed.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)

    first = reserve_port()
    old = store_of(first.number)
    old.set("nccl_unique_id", "generation 7")
    first.release()  # the sidecar reserves another for every generation
    second = reserve_port()
    # An orphan may serve the old store on: the new one has another place.
    assert second.number != first.number
    new = store_of(second.number)
    assert not new.check(["nccl_unique_id"])
    assert old.check(["nccl_unique_id"])
    del old, new
    second.release()
