"""From a bad line in a rank's output to the node's state: a part of `benchmarks.log_rules`."""

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Final

from scout.clock import Instant
from sidecar.agent import AgentCore
from sidecar.agent_config import AgentConfig
from sidecar.api import AgentState, Start
from sidecar.events import CommandReceived, LogFinding, PortReserved, WorkersSpawned
from sidecar.logs.tail import LogWatcher

STATE_RANKS: Final = 8
STATE_TRIALS: Final = 40
WITHIN_S: Final = 30.0


async def line_to_state_ms(folder: Path) -> float:
    """Return how long a bad line took until the node's core was FAULTED, in ms, the median.

    Eight ranks, two files each, every shipped rule and one more; a trial is one generation: written
    with one `write`, found by the poll, judged, and handled by the core as in the sidecar.
    """
    files = {n: (folder / f"rank{n}.out", folder / f"rank{n}.err") for n in range(STATE_RANKS)}
    for path in (path for pair in files.values() for path in pair):
        path.touch()
    chance = random.Random(7)  # noqa: S311 - no secret, only a phase of the poll
    took = [await _trial(number, files, chance) for number in range(1, STATE_TRIALS + 1)]
    return statistics.median(took)


async def _trial(number: int, files: dict[int, tuple[Path, Path]], chance: random.Random) -> float:
    core, faulted = _running_core(number), asyncio.Event()
    seen_at = 0.0

    def heard(finding: LogFinding) -> None:
        nonlocal seen_at
        core.handle(finding, Instant(time.monotonic_ns()))
        if core.state is AgentState.FAULTED:
            seen_at = time.perf_counter()
            faulted.set()

    watcher = LogWatcher(heard, lambda: Instant(time.monotonic_ns()))
    line = f"the fault of trial {number} happened\n"
    rule = {"name": "Fault", "logPattern": line.strip(), "faultOnMatch": True}
    watcher.watch(number, [rule], files)
    try:
        # Once the rules are compiled and what earlier trials wrote is read.
        await asyncio.sleep(0.5 + chance.random() * 0.1)
        with files[number % STATE_RANKS][1].open("ab", buffering=0) as out:
            written = time.perf_counter()
            out.write(line.encode())
        await asyncio.wait_for(faulted.wait(), WITHIN_S)
    finally:
        watcher.close()
    return (seen_at - written) * 1e3


def _running_core(generation: int) -> AgentCore:
    """Return a node's core as it is while its workers run."""
    now = Instant(time.monotonic_ns())
    config = AgentConfig(job="j", node="n", incarnation="i", nproc_per_node=STATE_RANKS)
    core = AgentCore(config, now)
    core.handle(PortReserved(port=1), now)
    start = Start(
        generation=generation,
        topology_version=1,
        group_rank=0,
        nnodes=1,
        master_addr="127.0.0.1",
        master_port=29500,
        fault_count=0,
        node_hosts=("n",),
        stall_timeout_s=0.0,
    )
    core.handle(CommandReceived(command=start), now)
    pids = {n: n + 1 for n in range(STATE_RANKS)}
    core.handle(WorkersSpawned(generation=generation, pids=pids), now)
    return core
