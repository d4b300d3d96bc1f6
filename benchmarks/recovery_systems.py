"""The launchers of the recovery benchmark: Outrider, torchrun, and peers where they are installed.

Each runs the same script with two nodes of one worker each on this machine.  A peer needs an
interpreter of its own, for its pins: name one that can import torch and ``nvidia_resiliency_ext``
in ``NVRX_PYTHON``, and one with ``hyperpod_elastic_agent`` in ``HYPERPOD_PYTHON``.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coordinator.cli.client import Client

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "recovery_worker.py"
GROUP_TIMEOUT_S = 10
"""The process group's time-out, for every launcher: torchrun sees a hang by nothing else."""
WITHIN_S = 120.0
"""Longest wait for anything that a launcher has to bring about."""
TORCHRUN = "torchrun"
TORCHRUN_OWN_STORE = "torchrun, own store"
COLD = "outrider, cold"
WARM = "outrider"
IN_PROCESS = "outrider, in-process"
NVRX = "NVRx ft_launcher"
HYPERPOD = "HyperPod agent, client-driven"
POLL_S = 0.005
"""How often the client of the HyperPod agent asks it: a client of its own would ask less often."""
SPEC = """\
name: bench
nprocPerNode: 1
replicaSpecs: [{name: workers, replicas: 2}]
runPolicy:
  jobMaxRetryCount: 1000
progressPolicy:
  stallTimeoutSeconds: 5
"""


@dataclass(slots=True)
class Run:
    """One launcher with two nodes of one worker each."""

    name: str
    folder: Path
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    client: Client | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def spawn(self, log: str, command: list[str], **environment: str) -> None:
        """Start one process of the launcher."""
        with (self.folder / log).open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={
                        **os.environ,
                        "BENCH_DIR": str(self.folder),
                        "BENCH_GROUP_TIMEOUT_S": str(GROUP_TIMEOUT_S),
                        "OMP_NUM_THREADS": "1",
                        "GLOO_SOCKET_IFNAME": "lo",
                        **environment,
                    },
                )
            )

    def records(self) -> list[dict[str, Any]]:
        """Return all that the workers wrote."""
        try:
            text = (self.folder / "records.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def end(self) -> None:
        """End the launcher and every worker it started."""
        self.ended.set()
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + 5
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in {item["pid"] for item in self.records()}:
            if str(SCRIPT) in _command_line(pid):
                os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_torchrun(run: Run, *, share_store: bool) -> None:
    """Start two elastic agents that find each other over c10d."""
    endpoint = f"127.0.0.1:{_free_port()}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--max-restarts=1000", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"),
        *("--rdzv-id=bench", "--local-addr=127.0.0.1", str(SCRIPT)),
    ]
    disabled = {} if share_store else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for index in range(2):
        run.spawn(f"agent-{index}.log", command, **disabled)
        time.sleep(0.3)


def start_outrider(run: Run, *, warm: bool, in_process: bool = False) -> None:
    """Start a coordinator and two sidecars."""
    spec, state = run.folder / "job.yaml", run.folder / "state"
    spec.write_text(SPEC)
    outrider = [sys.executable, "-m", "coordinator.cli"]
    run.spawn(
        "coordinator.log",
        [
            *(*outrider, "coordinator", "--job-spec", str(spec)),
            *("--port", "0", "--state-dir", str(state)),
        ],
    )
    until("the coordinator's address", (state / "coordinator.url").exists)
    url = (state / "coordinator.url").read_text().strip()
    run.client = Client(url=url)
    for index in range(2):
        folder = run.folder / f"node-{index}"
        (folder).mkdir()
        (folder / "kern.log").touch()
        run.spawn(
            f"node-{index}.log",
            [
                *(*outrider, "run", "--coordinator", url, "--job", "bench"),
                *("--node-name", f"node-{index}", "--host", "127.0.0.1", "--nnodes", "2"),
                *("--log-dir", str(folder / "logs"), "--run-dir", str(folder / "run")),
                *("--kernel-log", str(folder / "kern.log")),
                *([] if warm else ["--no-warm-workers"]),
                *("--", str(SCRIPT), *(["--in-process"] if in_process else [])),
            ],
        )


def warmed_up(run: Run) -> bool:
    """Return whether both nodes have their warm workers again."""
    logs = [run.folder / f"node-{index}.log" for index in range(2)]
    return all("warm workers are ready" in log.read_text() for log in logs)


def start_nvrx(run: Run) -> None:
    """Start two fault-tolerant agents; a rank that sends no heartbeat for 5 s counts as hung."""
    python = Path(os.environ["NVRX_PYTHON"])
    command = [
        *(str(python.with_name("ft_launcher")), "--nnodes=2", "--nproc-per-node=1"),
        *("--max-restarts=1000", "--rdzv-backend=c10d", "--rdzv-id=bench"),
        *(f"--rdzv-endpoint=127.0.0.1:{_free_port()}", "--local-addr=127.0.0.1"),
        *("--workers-stop-timeout=5", "--ignore-missing-fault-tol-cfg"),
        *("--ft-workload-check-interval=1", "--ft-initial-rank-heartbeat-timeout=60"),
        *("--ft-rank-heartbeat-timeout=5", str(SCRIPT)),
    ]
    ours = {"PYTHONPATH": str(HERE.parent), "BENCH_NVRX": "1"}
    for index in range(2):
        run.spawn(f"agent-{index}.log", command, GROUP_RANK=str(index), **ours)
        time.sleep(0.3)


def start_hyperpod(run: Run) -> None:
    """Start one agent with both workers, and a client that stops and starts it after a fault."""
    port = _free_port()
    command = [
        *(os.environ["HYPERPOD_PYTHON"], "-c", _HYPERPOD_RUN, "--nnodes=1", "--nproc_per_node=2"),
        *("--redirects=3", f"--log_dir={run.folder}/logs", f"--server-port={port}"),
        *("--server-host=127.0.0.1", "--server-log-level=warning"),
        *(f"--rdzv-conf=resource_config_dir={run.folder}/cfg", str(SCRIPT)),
    ]
    ours = {"PYTHONPATH": str(HERE.parent), "NNODES": "1"}
    run.spawn("agent.log", command, HYPERPOD_ELASTICAGENT_SERVER_DELAY="1", **ours)
    threading.Thread(target=_drive_hyperpod, args=(run, port), daemon=True).start()


def _drive_hyperpod(run: Run, port: int) -> None:
    faults = 0
    while not run.ended.wait(POLL_S):
        with suppress(OSError, ValueError, http.client.HTTPException):
            match _ask(port, "/status", None)["status"]:
                case "faulted":
                    faults += 1
                    _ask(port, "/stop", {})
                case "ready":
                    start = {"rank": 0, "nnodes": 1, "faultCount": faults, "progress": {}}
                    start |= {"master_addr": "127.0.0.1", "master_port": _free_port()}
                    start |= {"ipVersion": f"v{faults}"}
                    _ask(port, "/start", start | {"rankIps": [{"rank": 0, "ip": "127.0.0.1"}]})


def _ask(port: int, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Ask the agent.  Raises `OSError`, `ValueError` and `http.client.HTTPException`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(
            "GET" if body is None else "POST",
            path,
            None if body is None else json.dumps(body),
            {"Content-Type": "application/json"},
        )
        text = connection.getresponse().read()
    finally:
        connection.close()
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


_HYPERPOD_RUN = """
import argparse, sys
take = argparse._ActionsContainer.__init__
def taking(self, *args, **more):  # torch 2.13 has an option of the same name
    take(self, *args, **{**more, "conflict_handler": "resolve"})
argparse._ActionsContainer.__init__ = taking
from hyperpod_elastic_agent.run import main
sys.exit(main())
"""

SYSTEMS: dict[str, Callable[[Run], None]] = {
    TORCHRUN: lambda run: start_torchrun(run, share_store=True),
    TORCHRUN_OWN_STORE: lambda run: start_torchrun(run, share_store=False),
    COLD: lambda run: start_outrider(run, warm=False),
    WARM: lambda run: start_outrider(run, warm=True),
    IN_PROCESS: lambda run: start_outrider(run, warm=True, in_process=True),
    NVRX: start_nvrx,
    HYPERPOD: start_hyperpod,
}
OURS: Final = frozenset({COLD, WARM, IN_PROCESS})
_PEERS: Final = (
    (NVRX, "NVRX_PYTHON", "nvidia_resiliency_ext.fault_tolerance"),
    (HYPERPOD, "HYPERPOD_PYTHON", "hyperpod_elastic_agent"),
)


def installed_peers() -> tuple[list[str], list[str]]:
    """Return the peers that can be run here, and a note for each that cannot."""
    names, notes = [], []
    for name, variable, module in _PEERS:
        python = os.environ.get(variable)
        if not python:
            notes.append(f"{name}: not compared, {variable} is not set")
        elif subprocess.run([python, "-c", f"import torch, {module}"], check=False).returncode:
            notes.append(f"{name}: not compared, {python} cannot import {module}")
        else:
            names.append(name)
    return names, notes


@contextmanager
def running(name: str) -> Iterator[Run]:
    """Run a system in a fresh folder until the block ends."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        run = Run(name, Path(folder))
        try:
            SYSTEMS[name](run)
            yield run
        finally:
            run.end()


def until(what: str, condition: Callable[[], Any], within_s: float = WITHIN_S) -> Any:
    """Return what ``condition`` finds.  Raises `TimeoutError` with ``what`` was waited for."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)
    return found
