"""Real processes on one machine: a coordinator, a sidecar a node, and their workers.

Every node has its own folder, sockets, logs, kernel log and copy of the data, as it would on a
machine of its own.  Ends everything it started, and nothing else.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from coordinator.cli.client import Client
from coordinator.cli.errors import UserError

START_WITHIN_S: Final = 30.0
"""Longest wait for the coordinator's address; a loaded laptop needs a few seconds."""
END_WITHIN_S: Final = 4.5
"""Time between a polite signal and SIGKILL at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the demo's files are.  ``root`` is a fresh folder."""

    root: Path
    script: Path
    steps: int
    checkpoint_every: int
    options: tuple[str, ...] = ()
    """More arguments of the training script."""

    def node(self, name: str) -> Path:
        """Return the folder of a node."""
        return self.root / name

    def kernel_log(self, name: str) -> Path:
        """Return the file that stands for the node's kernel log."""
        return self.node(name) / "kern.log"

    def data(self, name: str) -> Path:
        """Return the node's own copy of the training data."""
        return self.node(name) / "data"

    def training(self, data: str, run: str) -> list[str]:
        """Return the training script with its arguments; ``run`` names its output folder."""
        return [
            str(self.script),
            *("--steps", str(self.steps)),
            *("--checkpoint-every", str(self.checkpoint_every)),
            *("--checkpoint-dir", str(self.root / run / "checkpoints")),
            *("--data-dir", data),
            *("--data-megabytes", "1"),
            *("--out", str(self.root / run / "final.pt")),
            *self.options,
        ]


_JOB: Final = """\
name: demo
nprocPerNode: 1
replicaSpecs:
  - name: workers
    replicas: {nodes}
"""


def pci_address(node_index: int) -> str:
    """Return the PCI address that stands for a node's GPU 0 in its kernel log."""
    return f"0000:{0x3B + node_index:02x}:00"


@dataclass(slots=True, kw_only=True)
class Cluster:
    """The demo's processes.  Use as a context manager: leaving ends all of them."""

    layout: Layout
    workers: Sequence[str]
    spares: Sequence[str]
    policy: str = ""
    """What the job spec says beside the job's name and nodes: YAML text."""
    path: Path | None = None
    """A folder of Python modules that every process finds before all others."""
    client: Client = field(init=False)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __enter__(self) -> Self:
        try:
            (self.layout.root / "coordinator").mkdir()
            self.start_coordinator()
            for index, name in enumerate([*self.workers, *self.spares]):
                self._start_sidecar(index, name)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    # --- looking ----------------------------------------------------------------------------

    def job(self) -> dict[str, Any]:
        """Return the job's picture."""
        picture: dict[str, Any] = self.client.get("v1", "job")
        return picture

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Return every node by name."""
        return {node["node"]: node for node in self.client.get("v1", "nodes")["nodes"]}

    def incident(self, wanted: str) -> dict[str, Any]:
        """Return one incident."""
        found: dict[str, Any] = self.client.get("v1", "incidents", wanted)
        return found

    def incident_ids(self) -> list[str]:
        """Return the ids of all incidents, oldest first."""
        return [item["id"] for item in self.client.get("v1", "incidents")["incidents"]]

    def worker_pid(self, node: str) -> int:
        """Return the process id of the node's worker.  Raises `UserError` when it has none."""
        for rank in self.nodes()[node]["ranks"]:
            if rank["pid"] is not None:
                return int(rank["pid"])
        raise UserError(f"{node} runs no worker at this moment")

    def dead(self) -> str | None:
        """Return the name of a process that ended by itself, or None."""
        return next((name for name, item in self.processes.items() if item.poll()), None)

    # --- starting and ending ----------------------------------------------------------------

    def start_coordinator(self, port: int = 0) -> None:
        """Start the coordinator, or start it again on the ``port`` and journal it had."""
        folder = self.layout.root / "coordinator"
        (folder / "job.yaml").write_text(_JOB.format(nodes=len(self.workers)) + self.policy)
        address = folder / "state" / "coordinator.url"
        address.unlink(missing_ok=True)
        self._start(
            "coordinator",
            [
                *("coordinator", "--job-spec", str(folder / "job.yaml"), "--port", str(port)),
                *("--state-dir", str(folder / "state"), "--linger", "3"),
            ],
        )
        deadline = time.monotonic() + START_WITHIN_S
        while not address.exists() or not address.read_text().strip():
            if self.processes["coordinator"].poll() is not None or time.monotonic() > deadline:
                raise UserError(f"the coordinator did not start: {self.tail('coordinator')}")
            time.sleep(0.05)
        self.client = Client(url=address.read_text().strip())

    def kill(self, name: str) -> None:
        """End a process the hard way."""
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def _start_sidecar(self, index: int, name: str) -> None:
        folder = self.layout.node(name)
        folder.mkdir()
        self.layout.kernel_log(name).touch()
        spare = ["--spare"] if name in self.spares else []
        self._start(
            name,
            [
                *("run", "--coordinator", self.client.url, "--job", "demo", "--node-name", name),
                *("--nnodes", str(len(self.workers)), "--nproc-per-node", "1", *spare),
                *("--host", "127.0.0.1", "--http-port", "0"),
                *("--log-dir", str(folder / "logs"), "--run-dir", str(folder / "run")),
                *("--kernel-log", str(self.layout.kernel_log(name))),
                *("--gpu", f"0={pci_address(index)}"),
                *("--", *self.layout.training(str(self.layout.data(name)), "outrider")),
            ],
        )

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        with (self.layout.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "coordinator.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(self.path),
            )

    def tail(self, name: str) -> str:
        """Return the last line a process wrote."""
        lines = (self.layout.root / f"{name}.log").read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")

    def end(self) -> None:
        """End every process that still runs: politely, then not."""
        end(*self.processes.values())


def end(*processes: "subprocess.Popen[bytes]") -> None:
    """End these processes, and let them end what they started: politely, then not."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + END_WITHIN_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _environment(path: Path | None) -> Mapping[str, str]:
    """Return our environment without what would lead a child to another job."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_")}
    if path is not None:
        before = kept.get("PYTHONPATH")
        kept["PYTHONPATH"] = f"{path}{os.pathsep}{before}" if before else str(path)
    return kept
