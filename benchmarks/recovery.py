"""How fast a job trains again after one of its two ranks is killed, stopped, or raises.

Outrider, torchrun and the peers that are installed run the same script with the same torch on the
same machine, in alternating blocks of one run: first on the machine as it is, then with every core
kept busy.  The clock starts just before the fault and stops at the last rank's first step after
it: by a new process, or after an in-process restart by an old one.  Prints tables, and last one
line of JSON.

    make bench-recovery [TRIALS=50] [PEER_TRIALS=5]

Some 70 minutes on two cores with the defaults, most of it torchrun's and the peers'; ten with
TRIALS=5 PEER_TRIALS=1.
"""

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from benchmarks.recovery_systems import (
    COLD,
    GROUP_TIMEOUT_S,
    HYPERPOD,
    IN_PROCESS,
    NVRX,
    OURS,
    TORCHRUN,
    TORCHRUN_OWN_STORE,
    WARM,
    WITHIN_S,
    Run,
    installed_peers,
    running,
    until,
    warmed_up,
)

STEADY_STEPS: Final = 40
FAULTS_PER_RUN: Final = 5
Phases = dict[str, float]
Act = Callable[[Run, int], None]
Campaign = dict[str, dict[str, list[Phases]]]
"""Kind of fault -> system -> each recovery's phases."""


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

    pids: dict[int, int] = until("steady training", found)
    if run.name in {WARM, IN_PROCESS}:
        until("warm workers", lambda: warmed_up(run))
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

    fresh = until("recovery", back)
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

    incident = client.get("v1", "incidents", until("the incident's end", closed))
    at = {item["phase"]: (item["at_ns"] - wall) / 1e9 for item in incident["milestones"]}
    return {
        "detect": at["detected"],
        "localize": at["localized"] - at["detected"],
        "capture": at["captured"] - at["localized"],
        "stop": at["stopped"] - at["captured"],
        "assign": at["assigned"] - at["stopped"],
    }


FAULTS: Final[Mapping[str, tuple[str, Act, tuple[str, ...]]]] = {
    "kill": (
        "kill -9 of one of two ranks",
        kill,
        (TORCHRUN, TORCHRUN_OWN_STORE, NVRX, HYPERPOD, COLD, WARM, IN_PROCESS),
    ),
    "raise": ("an exception in one of two ranks", fail, (TORCHRUN_OWN_STORE, IN_PROCESS)),
    "stop": (
        f"SIGSTOP of one of two ranks (group time-out {GROUP_TIMEOUT_S} s)",
        stop,
        (TORCHRUN_OWN_STORE, NVRX, WARM, IN_PROCESS),
    ),
}
"""Kind -> its title, what is done to rank 1, and who is asked to recover from it."""


def measure(act: Act, trials: Mapping[str, int]) -> dict[str, list[Phases]]:
    """Alternate over the systems in blocks until each has had its ``trials`` faults."""
    results: dict[str, list[Phases]] = {name: [] for name in trials}
    rounds = -(-max(trials.values()) // FAULTS_PER_RUN)
    for turn in range(rounds):
        for name, count in trials.items():
            block = count * (turn + 1) // rounds - count * turn // rounds
            if not block:
                continue
            try:
                with running(name) as run:
                    for _ in range(block):
                        results[name].append(inject(run, act))
            except TimeoutError as error:
                print(f"{name}: no {error} within {WITHIN_S:g} s", flush=True)
    return results


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core of this machine busy until the block ends."""
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def median(results: list[Phases], key: str) -> float:
    """Return the median of one phase, in seconds."""
    values = [item[key] for item in results if key in item]
    return statistics.median(values) if values else float("nan")


def show(title: str, results: Mapping[str, list[Phases]], trials: Mapping[str, int]) -> None:
    """Print one table of medians."""
    ours = ["detect", "localize", "capture", "stop", "assign"]
    keys = [*ours, "python", "imported", "block", "group", "step"]
    print(f"\n{title}: medians, seconds since the signal (detect..assign: each phase's own span)")
    print(f"{'':<30}{'recovered':>10}" + "".join(f"{key:>10}" for key in keys))
    for name, rows in results.items():
        cells = "".join(_cell(median(rows, key)) for key in keys)
        print(f"{name:<30}{f'{len(rows)}/{trials[name]}':>10}{cells}", flush=True)


def _cell(value: float) -> str:
    return f"{'-':>10}" if math.isnan(value) else f"{value:>10.3f}"


def summary(quiet: Campaign, busy: Campaign, trials: int) -> dict[str, Any]:
    """Return what the last line says."""
    kills, raised, stops = (quiet[kind] for kind in FAULTS)
    rows = [
        rows
        for tables in (quiet, busy)
        for table in tables.values()
        for name, rows in table.items()
        if name in {WARM, IN_PROCESS}
    ]
    return {
        "kill_ratio_vs_torchrun": _ratio(kills, WARM),
        "sigstop_ratio_vs_torchrun": _ratio(stops, WARM),
        "in_process_ratio_vs_torchrun": _ratio(raised, IN_PROCESS),
        "recovered": sum(len(found) for found in rows),
        "recovered_of": len(rows) * trials,
        "detect_ms_p50": round(median(kills[WARM], "detect") * 1e3, 1),
        "stop_ms_p50": round(median(kills[WARM], "stop") * 1e3, 1),
        "in_process_kill_ratio_vs_torchrun": _ratio(kills, IN_PROCESS),
        "busy_kill_ratio_vs_torchrun": _ratio(busy["kill"], WARM),
        "busy_sigstop_ratio_vs_torchrun": _ratio(busy["stop"], WARM),
        "busy_in_process_ratio_vs_torchrun": _ratio(busy["raise"], IN_PROCESS),
        "systems": [
            {
                "fault": kind,
                "busy": is_busy,
                "system": name,
                "recovered": len(found),
                "median_s": None if not found else round(median(found, "step"), 3),
            }
            for is_busy, tables in ((False, quiet), (True, busy))
            for kind, table in tables.items()
            for name, found in table.items()
        ],
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=50, help="faults of each kind for Outrider")
    parser.add_argument("--peer-trials", type=int, default=5, help="and for everybody else")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    peers, notes = installed_peers()
    quiet = campaign("", args.trials, args.peer_trials, peers)
    with busy_cores():
        busy = campaign(", every core busy", args.trials, args.peer_trials, peers=[])
    print("\n" + "\n".join(notes))
    results = summary(quiet, busy, args.trials)
    print(json.dumps({"benchmark": "recovery", "results": results}))


def campaign(where: str, trials: int, peer_trials: int, peers: list[str]) -> Campaign:
    """Inject every kind of fault into every system and print the tables; kind -> results."""
    found: Campaign = {}
    for kind, (title, act, names) in FAULTS.items():
        wanted = {
            name: trials if name in OURS - {COLD} else peer_trials
            for name in names
            if name not in {NVRX, HYPERPOD} or name in peers
        }
        found[kind] = measure(act, wanted)
        show(title + where, found[kind], wanted)
    return found


def _ratio(results: Mapping[str, list[Phases]], ours: str) -> float | None:
    """Return ours against the better of torchrun's two ways to keep its store."""
    torchrun = [median(rows, "step") for name, rows in results.items() if "torchrun" in name]
    known = [value for value in torchrun if not math.isnan(value)]
    mine = median(results[ours], "step")
    return None if math.isnan(mine) or not known else round(mine / min(known), 3)


if __name__ == "__main__":
    main()
