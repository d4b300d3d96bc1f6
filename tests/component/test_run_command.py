"""`outrider run` and `outrider sidecar` as a person starts them: real workers, real signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

pytestmark = pytest.mark.component

T = TypeVar("T")

DEADLINE_S = 120.0
BRIEFLY = ("--linger", "2")
"""A coordinator stays for a while after the end, for people who ask; here nobody does."""
OUTRIDER = [sys.executable, "-m", "coordinator.cli"]
FIRST_LINE = "outrider: coordinator listening on "
GOOD = """
import json, os, pathlib, sys
seen = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
pathlib.Path(sys.argv[1], "rank_" + seen["RANK"]).write_text(json.dumps([seen, sys.argv[2:]]))
"""
BAD = "import sys; print('no such luck', file=sys.stderr); sys.exit(7)"
ENDLESS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
draft = pathlib.Path(sys.argv[1], "draft")
draft.write_text(f"{os.getpid()} {child.pid}")
draft.rename(pathlib.Path(sys.argv[1], "pids"))
time.sleep(3600)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start commands whose processes are all ended afterwards."""
    running: list[subprocess.Popen[str]] = []

    def begin(*argv: str | Path) -> "subprocess.Popen[str]":
        places = {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path / "tmp")}
        (tmp_path / "tmp").mkdir(exist_ok=True)
        process = subprocess.Popen(
            [*OUTRIDER, *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **places},
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write training scripts."""

    def write(code: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(code)
        return path

    return write


def until(look: Callable[[], T | None]) -> T:
    """Return the first answer that is not None."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def pages_of(job: str) -> list[Path]:
    """Return what stands in shared memory under the job's name: other jobs come and go."""
    return list(Path("/dev/shm").glob(f"outrider-{job}-*"))


def listening(process: "subprocess.Popen[str]") -> str:
    """Return the URL of a coordinator that has just been started."""
    assert process.stdout is not None
    return process.stdout.readline().removeprefix(FIRST_LINE).strip()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Wait for the end; return exit status and standard error."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors


def gone(pid: int) -> bool:
    """Return whether no process has this id, zombies not counted."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_standalone_runs_every_rank_and_ends_with_the_job(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """The first thing that a newcomer tries must behave like torchrun."""
    logs = tmp_path / "logs"
    process = start(
        *("run", "--standalone", "--nproc_per_node=2", "--log-dir", logs),
        *("--", script(GOOD), tmp_path, "--lr", "0.1"),
    )
    status, errors = ended(process)
    assert status == 0, errors
    for rank in ("0", "1"):
        seen, arguments = json.loads((tmp_path / f"rank_{rank}").read_text())
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (rank, rank, "2")
        assert int(seen["MASTER_PORT"]) > 0
        assert arguments == ["--lr", "0.1"]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list(logs.rglob("stdout.log"))


def test_standalone_gives_up_with_status_1_and_keeps_the_incidents(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """A script that fails for ever must end, say why, and leave what was found out."""
    state = tmp_path / "kept"
    options = ("run", "--standalone", "--state-dir", state, "--log-dir", tmp_path / "logs")
    status, errors = ended(start(*options, script(BAD)))
    assert status == 1
    assert "rank 0" in errors
    assert "exit code 7" in errors
    assert "Traceback" not in errors
    again, errors = ended(start(*options, script(BAD)))
    assert again == 2
    assert "has failed before" in errors
    assert "give another --job or --state-dir" in errors
    coordinator = start("coordinator", "--job", "standalone", "--nnodes", "1", "--port", "0",
                        "--state-dir", state)  # fmt: skip
    asked = start("incidents", "--json", "--coordinator", listening(coordinator))
    found = json.loads(asked.communicate(timeout=DEADLINE_S)[0])
    assert found
    assert {(line["kind"], line["rank"]) for line in found} == {("crash", 0)}


def test_every_run_keeps_its_output_and_its_incidents_and_says_where(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """The run that failed is begun again first, and looked at afterwards."""
    logs = tmp_path / "logs"
    run = ("run", "--standalone", "--node-name", "here", "--log-dir", logs)
    for _ in range(2):
        status, errors = ended(start(*run, script(BAD)))
        assert status == 1
        assert "incidents:" in errors
        assert "exit code 7" in errors.rpartition("incidents:")[2]
    folder = logs / "standalone" / "here"
    first, second = sorted(path for path in folder.iterdir() if not path.is_symlink())
    assert (folder / "latest").resolve() == second
    state = [word for word in errors.split() if word.endswith("/state`")][-1].rstrip("`")
    assert Path(state) == second / "state"
    for one in (first, second):
        texts = [path.read_text() for path in one.rglob("stderr.log")]
        assert len(texts) > 1  # one for each generation
        assert all("no such luck" in text for text in texts)
        asked = start("explain", "--state-dir", one / "state")
        told, complaints = asked.communicate(timeout=DEADLINE_S)
        assert (asked.returncode, complaints) == (0, "")
        assert "node here, rank 0" in told
        asked = start("incidents", "--json", "--state-dir", one / "state")
        listed = json.loads(asked.communicate(timeout=DEADLINE_S)[0])
        assert {(line["kind"], line["rank"]) for line in listed} == {("crash", 0)}
        asked = start("explain", listed[0]["id"], "--markdown", "--state-dir", one / "state")
        assert asked.communicate(timeout=DEADLINE_S)[0].startswith("# Incident standalone-0001")
    status, errors = ended(start("explain", "--state-dir", tmp_path))
    assert status == 2
    assert f"there is no journal in {tmp_path}" in errors


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGQUIT, 143)],
)
def test_a_signal_ends_everything_that_was_started(
    tmp_path: Path,
    start: Start,
    script: Callable[[str], Path],
    number: signal.Signals,
    status: int,
) -> None:
    """A worker or its data loader left behind holds the GPU until somebody finds it."""
    job = f"signalled-{os.getpid()}-{number}"
    process = start(
        *("run", "--standalone", "--job", job, "--log-dir", tmp_path / "logs"),
        *(script(ENDLESS), tmp_path),
    )
    pids = tmp_path / "pids"
    started = until(lambda: pids.read_text().split() if pids.exists() else None)
    assert pages_of(job) != []
    process.send_signal(number)
    code, errors = ended(process)
    assert code == status, errors
    assert "Traceback" not in errors
    assert all(gone(int(pid)) for pid in started)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert pages_of(job) == []


def test_what_workers_print_is_shown_on_the_terminal_with_their_rank(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """A first run that shows nothing looks like one that hangs."""
    talk = """
import os, sys
rank = os.environ["RANK"]
print("loss of", rank)
print("complaint of", rank, file=sys.stderr)
print("no line feed", end="")
"""
    run = ("run", "--standalone", "--nproc-per-node", "2", "--log-dir", tmp_path / "logs")
    both = start(*run, "--tee", "3", script(talk))
    shown, told = both.communicate(timeout=DEADLINE_S)
    assert both.returncode == 0, told
    for rank in "01":
        assert f"[rank {rank}] loss of {rank}" in shown.splitlines()
        assert f"[rank {rank}] no line feed" in shown.splitlines()
        assert f"[rank {rank}] complaint of {rank}" in told.splitlines()
    one = start(*run, "-t", "0:2", script(talk))
    shown, told = one.communicate(timeout=DEADLINE_S)
    assert "[rank" not in shown
    assert "[rank 0] complaint of 0" in told.splitlines()
    assert "[rank 1]" not in told
    status, errors = ended(start(*run, "--tee", "4", script(talk)))
    assert status == 2
    assert errors.count("\n") == 1
    assert "--tee: '4' is neither 0 (nothing)" in errors


def test_a_node_that_is_ended_while_it_waits_leaves_no_folder(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """A supervisor that tries for a night would fill the temporary folder."""
    node = start("run", "--coordinator", f"http://127.0.0.1:{free_port()}", script(GOOD))
    assert node.stderr is not None
    until(lambda: True if "retrying (for 0 s" in node.stderr.readline() else None)
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    again = until(lambda: text if "retrying" in (text := node.stderr.readline()) else None)
    assert int(again.partition("retrying (for ")[2].split()[0]) >= 5
    node.send_signal(signal.SIGTERM)
    status, errors = ended(node)
    assert (status, errors) == (143, "")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_node_waits_for_its_coordinator_and_learns_the_jobs_name(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """Schedulers start the parts in any order; none of them may give up or guess."""
    port = free_port()
    node = start(
        *("run", "--coordinator", f"http://127.0.0.1:{port}", "--node-name", "a"),
        *("--host", "127.0.0.1", "--log-dir", tmp_path / "logs", script(GOOD), tmp_path),
    )
    assert node.stderr is not None
    line = until(lambda: text if "retrying" in (text := node.stderr.readline()) else None)
    assert f"cannot reach a coordinator at http://127.0.0.1:{port}" in line
    coordinator = start(
        "coordinator", "--job", "named-late", "--nnodes", "1", "--port", port, *BRIEFLY
    )
    status, errors = ended(node)
    assert status == 0, errors
    assert ended(coordinator)[0] == 0
    assert (tmp_path / "rank_0").exists()
    assert (tmp_path / "logs" / "named-late" / "a").is_dir()


def test_a_sidecar_from_a_file_does_the_same(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """The file is what a cluster's images carry."""
    coordinator = start("coordinator", "--job", "job", "--nnodes", "2", "--port", "0", *BRIEFLY)
    url = listening(coordinator)
    nodes = []
    for name in ("a", "b"):
        config = tmp_path / f"{name}.yaml"
        body = {
            "nodeName": name,
            "job": "job",
            "coordinator": url,
            "host": "127.0.0.1",
            "command": [str(script(GOOD)), str(tmp_path)],
            "logDir": str(tmp_path / "logs"),
            "runDir": str(tmp_path / f"run-{name}"),
        }
        config.write_text(json.dumps(body))
        nodes.append(start("sidecar", "--config", config))
    for process in (*nodes, coordinator):
        status, errors = ended(process)
        assert status == 0, errors
    worlds = {json.loads((tmp_path / f"rank_{rank}").read_text())[0]["WORLD_SIZE"] for rank in "01"}
    assert worlds == {"2"}


def test_a_failed_job_is_every_nodes_exit_status(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """A scheduler that sees 0 from a node marks the failed job as done."""
    coordinator = start("coordinator", "--job", "job", "--nnodes", "1", "--port", "0", *BRIEFLY)
    node = start(
        *("run", "--coordinator", listening(coordinator), "--job", "job", "--host", "127.0.0.1"),
        *("--log-dir", tmp_path / "logs", script(BAD)),
    )
    assert ended(node)[0] == 1
    assert ended(coordinator)[0] == 1


def test_a_taken_port_of_the_nodes_api_is_one_line(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """Two nodes on one machine is the usual first experiment."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        process = start(
            *("run", "--standalone", "--http-port", port, "--log-dir", tmp_path / "logs"),
            script(GOOD),
            tmp_path,
        )
        status, errors = ended(process)
    assert status == 2
    complaints = [line for line in errors.splitlines() if line.startswith("outrider: error: ")]
    assert len(complaints) == 1
    assert f"port {port} on 127.0.0.1 is in use" in complaints[0]
    assert "Traceback" not in errors


def test_training_outlives_its_coordinator_and_the_next_one_still_repairs(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """A coordinator that takes the job down with it is one more thing that breaks at night."""
    port = free_port()
    serve = ("coordinator", "--job", "job", "--nnodes", "1", "--port", port, *BRIEFLY)
    serve = (*serve, "--state-dir", tmp_path / "kept")
    coordinator = start(*serve)
    url = listening(coordinator)
    node = start(
        *("run", "--coordinator", url, "--job", "job", "--host", "127.0.0.1"),
        *("--log-dir", tmp_path / "logs", script(ENDLESS), tmp_path),
    )
    pids = tmp_path / "pids"
    worker = int(until(lambda: pids.read_text() if pids.exists() else None).split()[0])
    coordinator.kill()
    coordinator.communicate()
    assert node.stderr is not None
    until(lambda: True if "retrying" in node.stderr.readline() else None)
    assert not gone(worker)
    pids.unlink()
    second = start(*serve)
    assert listening(second) == url
    until(lambda: True if "connected to the coordinator" in node.stderr.readline() else None)
    assert not gone(worker)
    os.kill(worker, signal.SIGKILL)
    repaired = int(until(lambda: pids.read_text() if pids.exists() else None).split()[0])
    assert repaired != worker
    asked = start("explain", "--json", "--coordinator", url)
    incident = json.loads(asked.communicate(timeout=DEADLINE_S)[0])
    assert incident["finding"]["culprit"]["rank"] == 0
    assert incident["generation"] == 1


@pytest.mark.parametrize("place", ["/proc/nothing", "/sys/nothing"])
def test_an_output_folder_that_cannot_be_made_ends_the_run_before_a_worker_starts(
    start: Start, script: Callable[[str], Path], place: str
) -> None:
    """Three restarts of workers that never were hide the one line that matters."""
    run = start("run", "--standalone", "--log-dir", place, script(GOOD))
    _, said = run.communicate(timeout=DEADLINE_S)
    assert run.returncode == 2
    assert said.splitlines()[-1].startswith("outrider: error: the workers' output cannot be kept")
    assert "--log-dir" in said
    assert "Traceback" not in said


def test_ctrl_c_while_the_command_is_being_loaded_is_silent(tmp_path: Path) -> None:
    """The first second is when people see their typing error, and press it."""
    early = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "argparse.py").write_text(early)  # stands for whatever is being loaded just then
    done = subprocess.run(
        [*OUTRIDER, "status"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_signal_that_was_ignored_before_the_start_stays_ignored(
    tmp_path: Path, start: Start, script: Callable[[str], Path]
) -> None:
    """Under nohup a run must outlive the terminal it was typed into."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(
            "run", "--standalone", "--log-dir", tmp_path / "logs", script(ENDLESS), tmp_path
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    pids = tmp_path / "pids"
    until(lambda: pids.read_text() if pids.exists() else None)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130
