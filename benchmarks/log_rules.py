"""Lines of training output judged per CPU-second: ours, a loop of `re`, and mtail.

One run, the same generated logs, the same 8 rules for everyone, in alternating rounds; the best
round of each counts.  Everyone must find the same number of matches, or the run is void.

- ours: the rule engine as the sidecar's tail uses it, from the file to each rule's state.
- re loop: as the HyperPod agent evaluates rules, one line at a time and one rule at a time, with
  `re.match` and the leading `.*` that it asks of a rule, and the same evaluation of a match.
- re loop, search: the same with `re.search` and without `.*`, which is faster for these rules.
- a bad line to the node's state: one write into a file of one of 8 ranks until its core is FAULTED.
- mtail: Debian's, one shot over the file, its start and end included.

    make bench-log-rules [LINES=300000] [ROUNDS=3]
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.line_to_state import STATE_TRIALS, line_to_state_ms
from scout.clock import Instant
from sidecar.logs.evaluator import LogEvaluator
from sidecar.logs.follow import FollowCounters, FollowedFile
from sidecar.logs.rules import parse_rules
from sidecar.logs.tail import LogWatcher

RULES: Final[list[dict[str, Any]]] = [
    {
        "name": "LossSpike",
        "logPattern": r"(?:lm )?loss[:=]\s*(?P<loss>[-+]?\d[\d.eE+-]*|nan|inf)",
        "metricThreshold": 9.0,
        "operator": "gt",
        "metricEvaluationDataPoints": 5,
    },
    {
        "name": "Steps",
        "logPattern": r"iteration\s+(?P<step>\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)",
        "expectedRecurringFrequencyInSeconds": 300,
    },
    {
        "name": "LowThroughput",
        "logPattern": r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)",
        "metricThreshold": 80,
        "operator": "lteq",
        "metricEvaluationDataPoints": 25,
    },
    {"name": "Xid", "logPattern": r"NVRM: Xid \(PCI:([0-9a-f:.]+)\): (\d+)"},
    {
        "name": "Watchdog",
        "logPattern": r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+)",
    },
    {"name": "OutOfMemory", "logPattern": r"(?:CUDA out of memory|OutOfMemoryError)"},
    {"name": "Saved", "logPattern": r"checkpoint saved at step (?P<step>\d+)"},
    {
        "name": "CudaError",
        "logPattern": (
            r"CUDA error: (device-side assert|an illegal memory access|unspecified launch failure)"
        ),
    },
]
NOISE: Final = (
    "[2026-01-01 00:00:{:02d},{:03d}] [INFO] [dataloader.py:{}:prefetch] worker {} queue depth {}",
    "DEBUG:torch.distributed: reducer bucket {} ready after {} us, {} bytes, {} pending of {}",
    "node-17: INFO data shard {} of {} opened in {} ms from cache {} {}",
    "NCCL INFO Channel {:02d}/{:02d} : {}[{}] -> {}[0] via P2P/IPC",
    "  warnings.warn('the tokenizer truncated sample {} from {} to {} tokens {} {}')",
    "memory: allocated {} MiB, reserved {} MiB, active {} MiB, retries {} {}",
    "gc collected {} objects in generation {} after {} ms ({} {})",
    "INFO:checkpoint: shard {} of {} queued for upload, {} MB, {} {}",
)
RARE: Final = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
    "CUDA error: device-side assert triggered",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "checkpoint saved at step 1200",
)
STEP_LINE: Final = (
    " [2026-01-01 00:00:00] iteration {:8d}/  500000 | consumed samples: {:12d} | elapsed time per "
    "iteration (ms): {:.1f} | throughput per GPU (TFLOP/s/GPU): {:.1f} | learning rate: "
    "1.000000E-04 | global batch size:    96 | lm loss: {:.6E} | loss scale: 1.0 | grad norm: "
    "{:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
HOSTILE: Final = (r"(a+)+b", r"^(\S+\s*)*loss: ([\d.]+)$", r"(x|xx)+y", r"(\s*\S*){4}loss")
HOSTILE_LINES: Final = ("a" * 60_000, "word " * 12_000, "x" * 60_000, " a" * 30_000)
TICK_S: Final = 0.001
LOOP_ROUNDS: Final = 5
"""Rounds of the loop's longest turn; the best counts, because a busy machine only adds to it."""


def generate(lines: int, *, dense: bool, seed: int = 7) -> str:
    """Return a log: 5 % of its lines match a rule, or (``dense``) 30 % match three."""
    chance = random.Random(seed)  # noqa: S311 - the same log for everyone
    out: list[str] = []
    step = 0
    for number in range(lines):
        luck = chance.random()
        if luck < (0.30 if dense else 0.005):
            step += 1
            out.append(
                STEP_LINE.format(
                    step,
                    step * 96,
                    100 + chance.random() * 9,
                    400 + chance.random() * 20,
                    2 + chance.random(),
                    chance.random(),
                )
            )
        elif not dense and luck < 0.0495:  # noqa: PLR2004 - with the rare ones, 5 %
            out.append(f"step {number} loss={2 + chance.random():.4f}")
        elif not dense and luck < 0.05:  # noqa: PLR2004
            out.append(chance.choice(RARE))
        else:
            fields = [chance.randrange(100) for _ in range(5)]
            out.append(chance.choice(NOISE).format(*fields))
    return "\n".join(out) + "\n"


# --- the contenders ---------------------------------------------------------------------------


def ours(path: Path) -> tuple[float, Counter[str]]:
    """Read and judge the file as the tail's thread does."""
    rules = parse_rules(RULES)
    evaluator = LogEvaluator(rules, Instant(0))
    file = FollowedFile(path, FollowCounters())
    began = time.process_time()
    while True:
        block = file.read_block()
        if block.data:
            evaluator.judge(block, Instant(time.monotonic_ns()))
        elif not file.behind:
            break
    spent = time.process_time() - began
    file.close()
    return spent, +evaluator.matches


@dataclass(slots=True)
class Peer:
    """A rule as a per-line evaluator keeps it."""

    pattern: re.Pattern[str]
    search: bool
    threshold: float | None
    below: bool
    points: int
    recurring: float | None
    active: bool = True
    matched_at: float | None = None
    violations: int = 0
    state: str = "WAITING"
    matches: int = 0

    def evaluate(self, line: str) -> str:
        """Judge one line: match and stamp, silence, metric."""
        if not self.active:
            return self.state
        now = time.time()
        match = self.pattern.search(line) if self.search else self.pattern.match(line)
        if match is not None:
            self.matches += 1
            self.matched_at = now
        silent = self.recurring is not None and self.matched_at is not None
        if silent and now - (self.matched_at or now) > (self.recurring or 0):
            self.state = "HANGING"
            return self.state
        if match is None:
            return self.state
        if self.threshold is None:
            self.state = "HEALTHY"
            return self.state
        value = float(match.group(1))
        bad = value <= self.threshold if self.below else value > self.threshold
        self.violations = self.violations + 1 if bad else 0
        self.state = "SLOW" if self.violations >= self.points else "HEALTHY"
        return self.state


def re_loop(path: Path, *, search: bool) -> tuple[float, Counter[str]]:
    """Judge line by line and rule by rule with `re`."""
    peers: dict[str, Peer] = {}
    for rule in RULES:
        text = rule["logPattern"]
        peers[rule["name"]] = Peer(
            pattern=re.compile(text if search else f".*{text}.*"),
            search=search,
            threshold=rule.get("metricThreshold"),
            below=rule.get("operator") == "lteq",
            points=rule.get("metricEvaluationDataPoints", 1),
            recurring=rule.get("expectedRecurringFrequencyInSeconds"),
        )
    evaluators = list(peers.values())
    began = time.process_time()
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            for evaluator in evaluators:
                evaluator.evaluate(line)
    spent = time.process_time() - began
    return spent, +Counter({name: peer.matches for name, peer in peers.items()})


def mtail(path: Path, folder: Path) -> tuple[float, Counter[str]]:
    """Run mtail over the file; CPU time is that of its process."""
    program = folder / "rules.mtail"
    program.write_text(
        "".join(f"counter c_{rule['name']}\n" for rule in RULES)
        + "".join(
            f"/{rule['logPattern'].replace('/', chr(92) + '/')}/ {{\n  c_{rule['name']}++\n}}\n"
            for rule in RULES
        ),
        encoding="utf-8",
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["mtail", "--progs", str(program), "--logs", str(path), "--one_shot"]
    done = subprocess.run(
        [*command, "--one_shot_format=prometheus"], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = re.findall(r"^c_(\w+)\{[^}]*\} (\d+)", done.stdout, re.MULTILINE)
    return spent, +Counter({name: int(count) for name, count in found})


# --- a hostile rule and the loop ----------------------------------------------------------------


async def longest_gap(path: Path | None, wanted: int) -> float:
    """Return the longest time between two turns of the loop, beyond the tick, in ms."""
    watcher = LogWatcher(lambda _: None, lambda: Instant(time.monotonic_ns()))
    rules = [{"name": f"Hostile{n}", "logPattern": one} for n, one in enumerate(HOSTILE)]
    longest = 0.0
    try:
        if path is not None:
            watcher.watch(1, rules, {0: (path, path.with_name("none"))})
        stop = time.monotonic() + 20.0
        least = time.monotonic() + 1.0
        last = time.perf_counter()
        while time.monotonic() < least or watcher.counters.bytes_read < wanted:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            longest, last = max(longest, now - last - TICK_S), now
            if time.monotonic() > stop:
                break
    finally:
        watcher.close()
    return longest * 1e3


def loop_block(folder: Path, rounds: int) -> tuple[float, float]:
    """Return the longest gap under hostile rules, and that of an idle loop; the best round each."""
    path = folder / "hostile.log"
    path.write_text("\n".join(HOSTILE_LINES * 20) + "\n", encoding="utf-8")
    hostile = min(asyncio.run(longest_gap(path, path.stat().st_size)) for _ in range(rounds))
    idle = min(asyncio.run(longest_gap(None, 0)) for _ in range(rounds))
    return hostile, idle


# --- the run ------------------------------------------------------------------------------------


def measure(lines: int, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    """Return lines per CPU-second by log and contender."""
    contenders: dict[str, Callable[[Path], tuple[float, Counter[str]]]] = {
        "ours": ours,
        "re loop": lambda path: re_loop(path, search=False),
        "re loop, search": lambda path: re_loop(path, search=True),
    }
    if shutil.which("mtail"):
        contenders["mtail"] = lambda path: mtail(path, folder)
    results: dict[str, dict[str, float]] = {}
    for name in ("sparse", "dense"):
        path = folder / f"{name}.log"
        path.write_text(generate(lines, dense=name == "dense"), encoding="utf-8")
        best: dict[str, float] = {}
        found: dict[str, Counter[str]] = {}
        for _ in range(rounds):
            for contender, run in contenders.items():
                spent, found[contender] = run(path)
                best[contender] = max(best.get(contender, 0.0), lines / spent)
        for contender, counts in found.items():
            if counts != found["ours"]:
                print(f"void: {contender} found {counts}, ours {found['ours']}", file=sys.stderr)
                raise SystemExit(1)
        results[name] = best
    return results


def main() -> None:
    """Measure, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if not shutil.which("mtail"):
        print("mtail is not here; `apt-get install mtail` adds it to the run", file=sys.stderr)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        speeds = measure(arguments.lines, arguments.rounds, folder)
        hostile, idle = loop_block(folder, LOOP_ROUNDS)
        state_ms = asyncio.run(line_to_state_ms(folder))
    print(f"{platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'lines per CPU-second':24}{'sparse':>12}{'dense':>12}{'sparse x':>10}{'dense x':>10}")
    for contender in speeds["sparse"]:
        sparse, dense = speeds["sparse"][contender], speeds["dense"][contender]
        of = [speeds[log]["ours"] / speeds[log][contender] for log in ("sparse", "dense")]
        print(f"{contender:24}{sparse:12,.0f}{dense:12,.0f}{of[0]:9.1f}x{of[1]:9.1f}x")
    print(f"longest turn of the loop under hostile rules {hostile:.1f} ms, idle {idle:.1f} ms")
    print(f"a bad line to the node's state, median of {STATE_TRIALS}: {state_ms:.1f} ms")
    sparse_ours, dense_ours = speeds["sparse"]["ours"], speeds["dense"]["ours"]
    peer = speeds["sparse"].get("mtail")
    results = {
        "sparse_lines_per_cpu_s": round(sparse_ours),
        "dense_lines_per_cpu_s": round(dense_ours),
        "sparse_speedup_vs_re_loop": round(sparse_ours / speeds["sparse"]["re loop"], 2),
        "dense_speedup_vs_re_loop": round(dense_ours / speeds["dense"]["re loop"], 2),
        "sparse_speedup_vs_mtail": None if peer is None else round(sparse_ours / peer, 2),
        "loop_block_ms_max": round(hostile, 2),
        "line_to_state_ms_p50": round(state_ms, 1),
    }
    print(json.dumps({"benchmark": "log-rules", "results": results}))


if __name__ == "__main__":
    main()
