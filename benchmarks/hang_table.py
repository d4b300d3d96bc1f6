"""Who is named, and how soon, for every way in which one rank can hold the others up.

Four ranks of DDP on gloo train under real sidecars and a real coordinator.  Each fault is injected
live into the running job; the clock starts when the culprit stalls or dies and stops when the
coordinator has judged.  A healthy job that is merely uneven runs afterwards and must not be
judged at all.  Prints a table, and last one line of JSON.

    make bench-hang [MINUTES=3] [ONLY=forward,backward]
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.hang_peer import PeerResult, peer_results
from coordinator.cli.errors import UserError
from coordinator.demo.cluster import Cluster, Layout

SCRIPT: Final = Path(__file__).resolve().parent / "hang_worker.py"
NODES: Final = ("node-0", "node-1", "node-2", "node-3")
THRESHOLD_S: Final = 3.0
LEASE_S: Final = 6.0
"""Sidecars that redial a coordinator which takes seconds to start are not lost yet."""
MUTE_AFTER_S: Final = 1.5
"""A node falls silent before a stopped process counts as held."""
WITHIN_S: Final = 120.0
POLL_S: Final = 0.02
STEADY_STEPS: Final = 12

POLICY: Final = """\
runPolicy:
  jobMaxRetryCount: 1000
progressPolicy: {progress}
nodePolicy: {{leaseSeconds: {lease}}}
"""


@dataclass(frozen=True)
class BenchLayout(Layout):
    """The demo's folders with the benchmark's script."""

    def training(self, data: str, run: str) -> list[str]:  # noqa: ARG002 - the script needs neither
        """Return the training script."""
        return [str(SCRIPT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.  ``inject`` does it and returns when it began, in wall-clock nanoseconds."""

    name: str
    rank: int
    threshold_s: float
    inject: Callable[["Bench", int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of a fault."""

    fault: Fault
    named: str
    is_right: bool
    basis: str
    took_s: float | None
    why: str

    @property
    def over_s(self) -> float | None:
        """Seconds beyond the threshold."""
        return None if self.took_s is None else self.took_s - self.fault.threshold_s


class Bench:
    """A running cluster and what is done to it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.root = cluster.layout.root
        self.not_before_ns = 0
        """A verdict cannot come before its coordinator is back."""

    def order(self, where: str, rank: int) -> int:
        """Let a rank stall at a place of its next step; return when it did."""
        began = self.root / "began"
        began.unlink(missing_ok=True)
        partial = self.root / "order"
        partial.write_text(where)
        partial.replace(self.root / "orders" / str(rank))
        until(f"rank {rank} to stall in {where}", lambda: read_began(began))
        return read_began(began)

    def signal(self, rank: int, number: signal.Signals) -> int:
        """Send a signal to a rank's process; return when."""
        pid = self.cluster.worker_pid(NODES[rank])
        began_ns = time.time_ns()
        os.kill(pid, number)
        return began_ns

    def kill_sidecar(self, rank: int) -> int:
        """End the sidecar of a rank's node the hard way, and start it again."""
        name = NODES[rank]
        began_ns = time.time_ns()
        self.cluster.kill(name)
        until("the loss of a node to be judged", lambda: self.cluster.job()["open_incident"])
        folder = self.cluster.layout.node(name)
        folder.rename(folder.with_name(f"{name}-{began_ns}"))
        self.cluster._start_sidecar(rank, name)  # noqa: SLF001 - the demo starts each of them once
        return began_ns

    def kill_coordinator_in_a_round(self, rank: int) -> int:
        """Stop a rank, hold another node's answer back, and end the coordinator while it waits.

        It looks at every rank as soon as a node says that one of them is held, and the answer that
        is held back keeps it waiting for a second.
        """
        began_ns = self.signal(rank, signal.SIGSTOP)
        mute = self.cluster.processes[NODES[(rank + 1) % len(NODES)]]
        time.sleep(MUTE_AFTER_S)
        mute.send_signal(signal.SIGSTOP)
        try:
            until("the round", lambda: any(it["held"] or it["stalled"] for it in self.ranks()))
            port = int(self.cluster.client.url.rsplit(":", 1)[1].rstrip("/"))
            self.cluster.kill("coordinator")
        finally:
            mute.send_signal(signal.SIGCONT)
        self.cluster.start_coordinator(port)
        until("the coordinator", lambda: all(it["connected"] for it in self.nodes()))
        self.not_before_ns = time.time_ns()
        return began_ns

    def ranks(self) -> Iterator[dict[str, Any]]:
        """Yield what the nodes last said of every rank."""
        for node in self.nodes():
            yield from node["ranks"]

    def nodes(self) -> Sequence[dict[str, Any]]:
        """Return every node."""
        return list(self.cluster.nodes().values())

    def healthy(self) -> None:
        """Wait until the job trains, some steps beyond where it is now."""
        start: list[int] = []

        def is_steady() -> bool:
            job = self.cluster.job()
            if job["phase"] != "running" or job["open_incident"] or not job["complete_checkpoints"]:
                start.clear()
                return False
            step = job["step"] or 0
            start.append(step)
            return step >= start[0] + STEADY_STEPS

        until("a job that trains", is_steady)


def read_began(file: Path) -> int:
    """Return when the worker wrote that it stalls, 0 while it has not."""
    try:
        return int(json.loads(file.read_text())["ns"])
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def until(what: str, done: Callable[[], Any], within_s: float = WITHIN_S) -> None:
    """Wait until ``done``."""
    deadline = time.monotonic() + within_s
    while not done():
        if time.monotonic() > deadline:
            raise UserError(f"waited {within_s:g} s for {what} in vain")
        time.sleep(POLL_S)


def stall(where: str) -> Callable[[Bench, int], int]:
    """Return what lets a rank stall at ``where``."""
    return lambda bench, rank: bench.order(where, rank)


def kill(bench: Bench, rank: int) -> int:
    """End a rank's process the hard way."""
    return bench.signal(rank, signal.SIGKILL)


FAULTS: Final = (
    Fault(
        name="SIGSTOP",
        rank=0,
        threshold_s=THRESHOLD_S,
        inject=lambda bench, rank: bench.signal(rank, signal.SIGSTOP),
    ),
    *(
        Fault(name=f"sleep in {said}", rank=rank, threshold_s=THRESHOLD_S, inject=stall(where))
        for where, said, rank in (
            ("data", "data loading", 1),
            ("forward", "forward", 2),
            ("backward", "backward", 3),
            ("backward", "backward", 0),
            ("optimizer", "optimizer", 1),
            ("checkpoint", "checkpoint write", 2),
            ("caller", "a collective's caller", 3),
        )
    ),
    Fault(name="another collective", rank=1, threshold_s=THRESHOLD_S, inject=stall("other")),
    Fault(name="another shape", rank=2, threshold_s=THRESHOLD_S, inject=stall("shape")),
    *(Fault(name="SIGKILL", rank=rank, threshold_s=0.0, inject=kill) for rank in range(4)),
    Fault(
        name="death of the sidecar",
        rank=2,
        threshold_s=LEASE_S,
        inject=lambda bench, rank: bench.kill_sidecar(rank),
    ),
    Fault(
        name="SIGSTOP, and the coordinator dies in its round",
        rank=1,
        threshold_s=THRESHOLD_S,
        inject=lambda bench, rank: bench.kill_coordinator_in_a_round(rank),
    ),
)


@contextmanager
def running(progress: str, **environment: str) -> Iterator[Bench]:
    """Run a cluster in a fresh folder until the block ends."""
    with tempfile.TemporaryDirectory(prefix="outrider-hang-") as folder:
        root = Path(folder)
        (root / "orders").mkdir()
        os.environ |= {"BENCH_DIR": folder, "OMP_NUM_THREADS": "1", **environment}
        policy = POLICY.format(progress=progress, lease=LEASE_S)
        layout = BenchLayout(root=root, script=SCRIPT, steps=1, checkpoint_every=1)
        with Cluster(layout=layout, workers=NODES, spares=(), policy=policy) as cluster:
            try:
                yield Bench(cluster)
            except UserError as error:
                tails = [f"{name}: {cluster.tail(name)}" for name in cluster.processes]
                raise UserError("\n  ".join([str(error), *tails])) from error


def try_fault(bench: Bench, fault: Fault, said: Console) -> Row:
    """Inject a fault into a healthy job and wait for the verdict and the recovery."""
    bench.healthy()
    before = set(bench.cluster.incident_ids())
    bench.not_before_ns = 0
    began_ns = fault.inject(bench, fault.rank)
    found: dict[str, Any] = {}

    def judged() -> bool:
        fresh = [it for it in bench.cluster.incident_ids() if it not in before]
        if fresh:
            found.update(bench.cluster.incident(fresh[0]))
        return bool(found) and found["outcome"] != "open"

    until(f"a verdict on {fault.name}", judged)
    row = _row(fault, found, began_ns, bench.not_before_ns)
    over = "" if row.over_s is None else f" at threshold {row.over_s:+.2f} s"
    said.print(f"{fault.name}, rank {fault.rank}: {row.named}{over}; {row.why}", highlight=False)
    return row


def _row(fault: Fault, incident: dict[str, Any], began_ns: int, not_before_ns: int) -> Row:
    finding = incident["finding"] or {}
    culprit = finding.get("culprit") or {}
    at = {it["phase"]: it["at_ns"] for it in incident["milestones"]}
    judged_ns = at.get("localized")
    from_ns = max(began_ns, not_before_ns - round(fault.threshold_s * 1e9))
    named = "nobody" if not culprit else f"rank {culprit['rank']} on {culprit['node']}"
    return Row(
        fault=fault,
        named=named,
        is_right=named == f"rank {fault.rank} on {NODES[fault.rank]}",
        basis=finding.get("basis") or "-",
        took_s=None if judged_ns is None else (judged_ns - from_ns) / 1e9,
        why=finding.get("why", "no verdict"),
    )


def count_false_verdicts(minutes: float, said: Console) -> int:
    """Run healthy, uneven jobs; return how many incidents they had."""
    false = 0
    for share, scale, progress in (
        (0.5, "1", "{}"),
        (0.5, "0.15", "{stallTimeoutSeconds: 20, stallTimeoutMinSeconds: 3}"),
    ):
        with running(progress, BENCH_HEALTHY=scale) as bench:
            until("the first step", lambda: bench.cluster.job()["step"], within_s=300.0)
            deadline = time.monotonic() + 60 * minutes * share
            while time.monotonic() < deadline:
                if (dead := bench.cluster.dead()) is not None:
                    raise UserError(f"{dead} ended: {bench.cluster.tail(dead)}")
                time.sleep(1.0)
            ids = bench.cluster.incident_ids()
            step = bench.cluster.job()["step"]
            whys = [(bench.cluster.incident(it)["finding"] or {}).get("why") for it in ids]
        false += len(ids)
        said.print(f"healthy with {progress}: step {step}, {len(ids)} verdicts {whys or ''}")
    os.environ.pop("BENCH_HEALTHY", None)
    return false


def table(rows: Sequence[Row], peer: Sequence[PeerResult]) -> Table:
    """Return the table that is printed."""
    made = Table(title=f"one rank of four holds the others up (threshold {THRESHOLD_S:g} s)")
    compared = {(it.name, it.rank): it for it in peer}
    for heading in ("fault", "rank", "named", "evidence", "judged after", "over threshold"):
        made.add_column(heading)
    made.add_column("lm-resiliency")
    for row in rows:
        theirs = compared.get((row.fault.name, row.fault.rank))
        made.add_row(
            row.fault.name,
            str(row.fault.rank),
            row.named if row.is_right else f"WRONG: {row.named}",
            row.basis,
            "-" if row.took_s is None else f"{row.took_s:.2f} s",
            "-" if row.over_s is None else f"{row.over_s:+.2f} s",
            "-" if theirs is None else theirs.said,
        )
    return made


def main() -> int:
    """Run the benchmark; 0 when every culprit was named and nobody else ever."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="of healthy training")
    parser.add_argument("--only", default="", help="faults whose name contains one of these words")
    args = parser.parse_args()
    said = Console(width=160)
    words = [word for word in args.only.split(",") if word]
    chosen = [it for it in FAULTS if not words or any(word in it.name for word in words)]
    try:
        with running(f"{{stallTimeoutSeconds: {THRESHOLD_S:g}}}") as bench:
            rows = [try_fault(bench, fault, said) for fault in chosen]
            extra = len(bench.cluster.incident_ids()) - len(rows)
        false = count_false_verdicts(args.minutes, said) + extra if args.minutes else extra
    except UserError as error:
        sys.stderr.write(f"hang_table: {error}\n")
        return 1
    peer, note = peer_results()
    said.print(table(rows, peer))
    if note:
        said.print(note)
    over = [row.over_s for row in rows if row.over_s is not None]
    keys = {
        "named_right": sum(row.is_right for row in rows),
        "named_total": len(rows),
        "over_threshold_s_max": round(max(over), 3) if over else None,
        "false_verdicts": false,
        "healthy_minutes": args.minutes,
        "peer_named_right": sum(it.is_right for it in peer),
        "peer_named_total": len(peer),
    }
    sys.stdout.write(json.dumps({"benchmark": "hang", "results": keys}) + "\n")
    right = keys["named_right"] == keys["named_total"]
    return 0 if right and not false else 1


if __name__ == "__main__":
    sys.exit(main())
