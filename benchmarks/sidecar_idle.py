"""What a sidecar costs while nothing is wrong: processor and memory, beside node-exporter's.

One node of 8 ranks that step and print once a second, 20 log rules, NVML with 8 devices every 5 s
(a scripted library stands in for the driver's), a kernel log, a coordinator that is connected.
Debian's prometheus-node-exporter runs in the same minute on the same machine; both are scraped
every 15 s.  Our numbers are the sidecar, its NVML helper and its guardian together: user and system
time over wall time, and the largest resident memory seen.  The interpreter's and the libraries'
pages, which all three map, are in memory once and are counted once: the sidecar's resident size
and what the others have for themselves.

    make bench-sidecar-idle [SECONDS=60]
"""

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from tests.fakenvml.build import FakeNvml

HERE: Final = Path(__file__).resolve().parent
LIBRARY: Final = HERE.parent / "sidecar/logs/library"
TOPICS: Final = ("megatron", "nccl", "cuda", "numerical", "host", "rendezvous", "nccl_network")
RANKS: Final = 8
RULES: Final = 20
GPUS: Final = 8
SCRAPE_S: Final = 15.0
KERNEL_LINE_S: Final = 5.0
"""A healthy node's kernel writes about as often."""
SETTLE_S: Final = 20.0
"""Imports, first reads and the reading of old output are not the steady state."""
WITHIN_S: Final = 120.0
HELPER: Final = "sidecar.hardware.nvml_helper"
GUARDIAN: Final = "sidecar.workers.guard"
EXPORTER: Final = "prometheus-node-exporter"
TICKS: Final = os.sysconf("SC_CLK_TCK")
OUTRIDER: Final = (sys.executable, "-m", "coordinator.cli")


@dataclass(slots=True)
class Cost:
    """Processor seconds so far, and the largest resident size seen, of some processes."""

    cpu_s: float = 0.0
    rss_mb: float = 0.0

    def look(self, pids: Sequence[int]) -> None:
        """Look at ``pids``, all of one contender."""
        self.cpu_s = sum(map(cpu_s, pids))
        self.rss_mb = max(self.rss_mb, rss_mb(pids[0]) + sum(map(own_mb, pids[1:])))


@dataclass(slots=True)
class Bench:
    """Everything that runs, and the folder it runs in."""

    folder: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def spawn(self, name: str, command: Sequence[str], **environment: str) -> int:
        """Start one process."""
        with (self.folder / f"{name}.log").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
        return self.processes[name].pid

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Return the first true answer of ``condition``."""
        deadline = time.monotonic() + WITHIN_S
        while not (found := condition()):
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError((self.folder / f"{name}.log").read_text()[-2000:])
            if time.monotonic() > deadline:
                raise TimeoutError(f"never seen: {what}")
            time.sleep(0.1)
        return found

    def end(self) -> None:
        """End everything; the sidecar ends its workers itself."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def cpu_s(pid: int) -> float:
    """Return user and system time of a process, ended threads included, its children not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mb(pid: int) -> float:
    """Return the resident size in units of 10**6 bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def own_mb(pid: int) -> float:
    """Return the resident memory that is no file's, in units of 10**6 bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib: str = status.partition("RssAnon:")[2].split()[0]
    return int(kib) * 1024 / 1e6


def child_of(pid: int, module: str) -> int | None:
    """Return the sidecar's process that runs ``module``, once it is there."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return child
    return None


def library_rules() -> list[dict[str, Any]]:
    """Return twenty shipped rules, step lines of one framework and what breaks under any."""
    found: list[dict[str, Any]] = []
    for topic in TOPICS:
        body = yaml.safe_load((LIBRARY / f"{topic}.yaml").read_text(encoding="utf-8"))
        found += [entry["rule"] for entry in body["rules"]]
    assert len(found) >= RULES
    return found[:RULES]


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def scrape(url: str) -> str:
    """Return a page of metrics, empty while there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own processes
            text: str = answer.read().decode()
            return text
    except OSError:
        return ""


def start_job(bench: Bench) -> tuple[int, str]:
    """Start a coordinator and the node.  Returns the sidecar's pid and its metrics page."""
    fake, state, http = FakeNvml(bench.folder, GPUS), bench.folder / "state", free_port()
    spec, node = bench.folder / "job.yaml", bench.folder / "node.yaml"
    job = {
        "name": "idle",
        "nprocPerNode": RANKS,
        "replicaSpecs": [{"name": "workers", "replicas": 1}],
        "runPolicy": {"logMonitoringConfiguration": library_rules()},
    }
    spec.write_text(yaml.safe_dump(job))
    port = ("--port", "0", "--state-dir", str(state))
    bench.spawn("coordinator", (*OUTRIDER, "coordinator", "--job-spec", str(spec), *port))
    bench.until("the coordinator's address", (state / "coordinator.url").exists)
    (bench.folder / "kernel.log").touch()
    fields = {
        "nodeName": "n0",
        "job": "idle",
        "coordinator": (state / "coordinator.url").read_text().strip(),
        "command": [str(HERE / "sidecar_idle_worker.py")],
        "host": "127.0.0.1",
        "httpPort": http,
        "nprocPerNode": RANKS,
        "logDir": str(bench.folder / "logs"),
        "runDir": str(bench.folder / "run"),
        "kernelLog": str(bench.folder / "kernel.log"),
    }
    node.write_text(yaml.safe_dump(fields))
    command = (*OUTRIDER, "sidecar", "--config", str(node))
    pid = bench.spawn("sidecar", command, PYTHONPATH=str(HERE.parent), **fake.environment)
    return pid, f"http://127.0.0.1:{http}/metrics"


def start_exporter(bench: Bench) -> tuple[int, str] | None:
    """Start node-exporter as Debian configures it, None where it is not installed."""
    program = shutil.which(EXPORTER)
    if program is None:
        return None
    address = f"127.0.0.1:{free_port()}"
    pid = bench.spawn("exporter", (program, f"--web.listen-address={address}"))
    return pid, f"http://{address}/metrics"


@contextmanager
def running() -> Iterator[Bench]:
    """Run in a fresh folder until the block ends."""
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        bench = Bench(Path(folder))
        try:
            yield bench
        finally:
            bench.end()


def steady(page: str) -> bool:
    """Whether every rank steps and every device is read."""
    lines = scrape(page).splitlines()
    ranks = sum(line.startswith("outrider_rank_step{") for line in lines)
    devices = sum(line.startswith("outrider_gpu_temperature_celsius{") for line in lines)
    return (ranks, devices) == (RANKS, GPUS)


def measure(seconds: float) -> dict[str, float | None]:
    """Return the costs over ``seconds`` of steady state."""
    with running() as bench:
        sidecar, page = start_job(bench)
        exporter = start_exporter(bench)
        bench.until("every rank's step and every device", lambda: steady(page))
        helper = bench.until("the NVML helper", lambda: child_of(sidecar, HELPER))
        guardian = bench.until("the guardian", lambda: child_of(sidecar, GUARDIAN))
        time.sleep(SETTLE_S)
        groups = {"ours": (sidecar, helper, guardian), "sidecar": (sidecar,)}
        groups |= {"helper": (helper,), "guardian": (guardian,)}
        if exporter is not None:
            groups["exporter"] = (exporter[0],)
        costs = {name: Cost() for name in groups}
        before, began = {}, time.monotonic()
        scrape_at = kernel_at = began
        for name, pids in groups.items():
            costs[name].look(pids)
            before[name] = costs[name].cpu_s
        while (now := time.monotonic()) < began + seconds:
            if now >= scrape_at:
                scrape_at += SCRAPE_S
                for url in (page, *(exporter[1:] if exporter else ())):
                    assert scrape(url), f"{url} does not answer"
            if now >= kernel_at:
                kernel_at += KERNEL_LINE_S
                with (bench.folder / "kernel.log").open("a") as log:
                    log.write(f"6,{int(now)},{int(now * 1e6)},-;audit: backlog limit raised\n")
            for name, pids in groups.items():
                costs[name].look(pids)
            time.sleep(1.0)
        wall_s = time.monotonic() - began
        assert steady(page), "a rank or a device was lost during the run"
        assert child_of(sidecar, HELPER) == helper, "the NVML helper was restarted during the run"
    results: dict[str, float | None] = {}
    for name in ("ours", "sidecar", "helper", "guardian", "exporter"):
        prefix = {"ours": "", "exporter": "node_exporter_"}.get(name, f"{name}_")
        seen = costs.get(name)
        fraction = None if seen is None else (seen.cpu_s - before[name]) / wall_s
        results[f"{prefix}cpu_fraction"] = None if fraction is None else round(fraction, 4)
        results[f"{prefix}rss_mb"] = None if seen is None else round(seen.rss_mb, 1)
    return results


def main() -> None:
    """Measure, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    if shutil.which(EXPORTER) is None:
        print(f"{EXPORTER} is not here; `apt-get install {EXPORTER}` adds it", file=sys.stderr)
    results = measure(arguments.seconds)
    print(f"{platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'':24}{'% of a core':>12}{'resident MB':>13}")
    for label, prefix in (
        ("all of a node's", ""),
        ("  sidecar", "sidecar_"),
        ("  NVML helper", "helper_"),
        ("  guardian", "guardian_"),
        ("node-exporter", "node_exporter_"),
    ):
        cpu, rss = results[f"{prefix}cpu_fraction"], results[f"{prefix}rss_mb"]
        if cpu is not None and rss is not None:
            print(f"{label:24}{cpu * 100:12.2f}{rss:13.1f}")
    print(json.dumps({"benchmark": "sidecar-idle", "results": results}))


if __name__ == "__main__":
    main()
