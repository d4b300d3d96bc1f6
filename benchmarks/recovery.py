"""How fast a job trains again after one of its two ranks is killed, stopped, or raises.

Outrider and torchrun run the same script with the same torch on the same machine, in alternating
blocks of one run.  The clock starts just before the fault and stops at the last rank's first step
after it: by a new process, or after an in-process restart by an old one.  Prints a table, and last
one line of JSON.

    make bench-recovery [TRIALS=5] [STOPS=3]
"""

import argparse
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.cli.client import Client

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "recovery_worker.py"
GROUP_TIMEOUT_S = 10
"""The process group's time-out, for every launcher: torchrun sees a hang by nothing else."""
WITHIN_S = 120.0
STEADY_STEPS = 40
FAULTS_PER_RUN = 5
IN_PROCESS = "outrider, in-process"
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
    _until("the coordinator's address", (state / "coordinator.url").exists)
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


def _warmed_up(run: Run) -> bool:
    logs = [run.folder / f"node-{index}.log" for index in range(2)]
    return all("warm workers are ready" in log.read_text() for log in logs)


SYSTEMS: dict[str, Callable[[Run], None]] = {
    "torchrun": lambda run: start_torchrun(run, share_store=True),
    "torchrun, own store": lambda run: start_torchrun(run, share_store=False),
    "outrider, cold": lambda run: start_outrider(run, warm=False),
    "outrider": lambda run: start_outrider(run, warm=True),
    IN_PROCESS: lambda run: start_outrider(run, warm=True, in_process=True),
}


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


def _until(what: str, condition: Callable[[], Any], within_s: float = WITHIN_S) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)
    return found


def steady(run: Run) -> dict[int, int]:
    """Wait until both newest workers have made some steps; return rank -> pid."""

    def found() -> dict[int, int] | None:
        latest: dict[int, int] = {}
        count: dict[int, int] = {}
        for item in run.records():
            latest[item["rank"]] = item["pid"]
            if item["event"] == "block":
                count[item["pid"]] = 0
            if item["event"] == "step":
                count[item["pid"]] = count.get(item["pid"], 0) + 1
        enough = all(count.get(pid, 0) >= STEADY_STEPS for pid in latest.values())
        return latest if len(latest) == 2 and enough else None  # noqa: PLR2004 - two ranks

    pids: dict[int, int] = _until("steady training", found)
    if run.name in {"outrider", IN_PROCESS}:
        _until("warm workers", lambda: _warmed_up(run))
    return pids


def kill(_run: Run, pid: int) -> None:
    """Kill the process of rank 1."""
    os.kill(pid, signal.SIGKILL)


def stop(_run: Run, pid: int) -> None:
    """Stop the process of rank 1: it is there, and nothing moves."""
    os.kill(pid, signal.SIGSTOP)


def fail(run: Run, _pid: int) -> None:
    """Let rank 1 raise at its next step."""
    (run.folder / "raise-1").touch()


def inject(run: Run, act: Callable[[Run, int], None]) -> dict[str, float]:
    """Break rank 1 and return the seconds to each phase of the recovery."""
    before = steady(run)
    incidents = _incident_count(run)
    began = time.monotonic_ns()
    wall = time.time_ns()
    act(run, before[1])

    def back() -> list[dict[str, Any]] | None:
        fresh = _anew([item for item in run.records() if item["ns"] > began])
        stepped = {item["rank"] for item in fresh if item["event"] == "step"}
        return fresh if stepped == {0, 1} else None

    fresh = _until("recovery", back)
    phases = {}
    for event in ("python", "imported", "block", "group", "step"):
        firsts = {
            rank: min(
                item["ns"] for item in fresh if (item["rank"], item["event"]) == (rank, event)
            )
            for rank in (0, 1)
            if any((item["rank"], item["event"]) == (rank, event) for item in fresh)
        }
        if firsts:  # a process that stayed has nothing to import
            phases[event] = (max(firsts.values()) - began) / 1e9
    phases.update(_incident_phases(run, incidents, wall))
    return phases


def _anew(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what belongs to the runs that began in ``records``, by new processes or old ones."""
    begun: set[int] = set()
    found = []
    for item in records:
        if item["event"] in {"python", "block"}:
            begun.add(item["pid"])
        if item["pid"] in begun:
            found.append(item)
    return found


def _incident_count(run: Run) -> int:
    return 0 if run.client is None else len(run.client.get("v1", "incidents")["incidents"])


def _incident_phases(run: Run, before: int, wall: int) -> dict[str, float]:
    """Return what the coordinator's own milestones say, in seconds since the signal."""
    if run.client is None:
        return {}
    client = run.client

    def closed() -> Any:
        listed = client.get("v1", "incidents")["incidents"]
        fresh = listed[before:]
        return fresh[-1]["id"] if fresh and fresh[-1]["outcome"] == "recovered" else None

    incident = client.get("v1", "incidents", _until("the incident's end", closed))
    at = {item["phase"]: (item["at_ns"] - wall) / 1e9 for item in incident["milestones"]}
    return {
        "detect": at["detected"],
        "localize": at["localized"] - at["detected"],
        "capture": at["captured"] - at["localized"],
        "stop": at["stopped"] - at["captured"],
        "assign": at["assigned"] - at["stopped"],
    }


def measure(
    act: Callable[[Run, int], None], names: list[str], trials: int
) -> dict[str, list[dict[str, float]]]:
    """Alternate over the systems in blocks until each has had ``trials`` faults."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    tried: dict[str, int] = dict.fromkeys(names, 0)
    while any(count < trials for count in tried.values()):
        for name in names:
            block = min(FAULTS_PER_RUN, trials - tried[name])
            if block <= 0:
                continue
            with running(name) as run:
                for _ in range(block):
                    tried[name] += 1
                    try:
                        results[name].append(inject(run, act))
                    except TimeoutError as error:
                        print(f"{name}: no {error} within {WITHIN_S:g} s")
                        break
    for name in names:
        while tried[name] < trials:
            tried[name] += 1
    return results


def median(results: list[dict[str, float]], key: str) -> float:
    """Return the median of one phase, in seconds."""
    values = [item[key] for item in results if key in item]
    return statistics.median(values) if values else float("nan")


def show(title: str, results: dict[str, list[dict[str, float]]], trials: int) -> None:
    """Print one table of medians."""
    ours = ["detect", "localize", "capture", "stop", "assign"]
    keys = [*ours, "python", "imported", "block", "group", "step"]
    print(f"\n{title}: medians, seconds since the signal (detect..assign: each phase's own span)")
    print(f"{'':<22}{'recovered':>10}" + "".join(f"{key:>10}" for key in keys))
    for name, rows in results.items():
        cells = "".join(_cell(median(rows, key)) for key in keys)
        print(f"{name:<22}{f'{len(rows)}/{trials}':>10}{cells}")


def _cell(value: float) -> str:
    return f"{'-':>10}" if math.isnan(value) else f"{value:>10.3f}"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5, help="kills of each system")
    parser.add_argument("--stops", type=int, default=3, help="SIGSTOPs of each system")
    args = parser.parse_args()
    kills = measure(kill, list(SYSTEMS), args.trials)
    show("kill -9 of one of two ranks", kills, args.trials)
    raised = measure(fail, ["torchrun, own store", IN_PROCESS], args.trials)
    show("an exception in one of two ranks", raised, args.trials)
    names = ["torchrun, own store", "outrider", IN_PROCESS]
    stops = measure(stop, names, args.stops)
    show(f"SIGSTOP of one of two ranks (group time-out {GROUP_TIMEOUT_S} s)", stops, args.stops)
    ours = [
        rows
        for table in (kills, raised, stops)
        for name, rows in table.items()
        if name in {"outrider", IN_PROCESS}
    ]
    results = {
        "kill_ratio_vs_torchrun": _ratio(kills),
        "sigstop_ratio_vs_torchrun": _ratio(stops),
        "in_process_ratio_vs_torchrun": _ratio(raised, IN_PROCESS),
        "in_process_kill_ratio_vs_torchrun": _ratio(kills, IN_PROCESS),
        "recovered": sum(len(rows) for rows in ours),
        "recovered_of": 3 * args.trials + 2 * args.stops,
        "detect_ms_p50": round(median(kills["outrider"], "detect") * 1e3, 1),
        "stop_ms_p50": round(median(kills["outrider"], "stop") * 1e3, 1),
        "peers": {
            name: {"recovered": len(rows), "kill_total_s": round(median(rows, "step"), 3)}
            for name, rows in kills.items()
        },
    }
    print(json.dumps({"benchmark": "recovery", "results": results}))


def _ratio(results: dict[str, list[dict[str, float]]], ours: str = "outrider") -> float:
    """Return ours against the better of torchrun's two ways to keep its store."""
    torchrun = [median(rows, "step") for name, rows in results.items() if "torchrun" in name]
    best = min(value for value in torchrun if not math.isnan(value))
    return round(median(results[ours], "step") / best, 3)


if __name__ == "__main__":
    main()
