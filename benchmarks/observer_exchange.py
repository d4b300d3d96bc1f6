"""What is left of an exchange between observers when one of them dies: a Gloo group, and ours.

Four members trade a word twice a second.  One of them is killed or stopped; a second later it is
counted how many of the others still hear every one of the others within five seconds.  Prints a
table, and last one line of JSON.  The reason is in docs/decisions/0007.

    make bench-observer
"""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MEMBERS: Final = 4
READY_WITHIN_S: Final = 60.0
AFTER_S: Final = 1.0
WITHIN_S: Final = 5.0
PERIOD_S: Final = 0.5
GLOO_TIMEOUT_S: Final = 1.0
"""As short as ours: an observer's exchange waits for no longer than that."""
FAULTS: Final = (
    ("a member is killed", signal.SIGKILL, 2),
    ("the first member is killed", signal.SIGKILL, 0),
    ("a member is stopped", signal.SIGSTOP, 2),
    ("the first member is stopped", signal.SIGSTOP, 0),
)
KINDS: Final = ("gloo", "tcp", "files")


# --- a member ---------------------------------------------------------------------------------


def note(folder: Path, rank: int, heard: list[int]) -> None:
    """Write down of whom this member has fresh words."""
    told = {"heard": sorted(heard), "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}
    partial = folder / f".{rank}"
    partial.write_text(json.dumps(told))
    partial.replace(folder / f"member-{rank}.json")


def gloo_member(folder: Path, rank: int, port: int) -> None:
    """Trade by `all_gather` in a group over a store of the first member."""
    from datetime import timedelta  # noqa: PLC0415 - the other kind needs none of these

    import torch  # noqa: PLC0415 - same
    import torch.distributed as dist  # noqa: PLC0415 - same

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=MEMBERS,
        timeout=timedelta(seconds=60),
    )
    group = dist.new_group(timeout=timedelta(seconds=GLOO_TIMEOUT_S))
    words = [torch.zeros(1) for _ in range(MEMBERS)]
    while True:
        try:
            dist.all_gather(words, torch.ones(1), group=group)
            note(folder, rank, list(range(MEMBERS)))
        except RuntimeError:
            note(folder, rank, [rank])
        time.sleep(PERIOD_S)


async def our_member(folder: Path, rank: int, port: int, *, in_files: bool) -> None:
    """Trade as an observer does."""
    from scout.observer.config import ObserverConfig  # noqa: PLC0415 - must not count for gloo
    from scout.observer.exchange import ExchangeError, exchange_for  # noqa: PLC0415 - same
    from scout.observer.words import Word  # noqa: PLC0415 - same
    from scout.report import Place  # noqa: PLC0415 - same
    from scout.snapshot import RankSnapshot  # noqa: PLC0415 - same

    config = ObserverConfig(
        rank=rank,
        world_size=MEMBERS,
        local_rank=rank,
        host="127.0.0.1",
        run="bench",
        generation=0,
        pid=os.getpid(),
        page="",
        token=0,
        status="",
        address=None if in_files else "127.0.0.1",
        port=None if in_files else port,
        folder=str(folder) if in_files else None,
    )
    exchange = exchange_for(config)
    await exchange.open()
    known: dict[int, Word] = {}
    fresh: dict[int, tuple[int, float]] = {}
    count = 0
    while True:
        count += 1
        place = Place(rank=rank, host="127.0.0.1", local_rank=rank)
        seen = RankSnapshot(rank=rank, node="node", local_rank=rank, step=count)
        mine = Word(count=count, seen=seen, place=place, port=exchange.port)
        try:
            words = [mine, *await exchange.trade(mine, known)]
        except ExchangeError:
            words = [mine]
        now = time.monotonic()
        for word in words:
            if fresh.get(word.seen.rank, (0, 0.0))[0] != word.count:
                known[word.seen.rank] = word
                fresh[word.seen.rank] = (word.count, now)
        note(folder, rank, [it for it, (_, at) in fresh.items() if now - at < 3 * PERIOD_S])
        await asyncio.sleep(PERIOD_S)


# --- the trial --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How it ended: members left that hear all that are left, after how many seconds."""

    hearing: int
    start_s: float
    megabytes: float


def trial(kind: str, number: signal.Signals, victim: int) -> Trial:
    """Start four members, do the fault, and look at the three others."""
    with tempfile.TemporaryDirectory(prefix="outrider-exchange-") as name:
        folder, began = Path(name), time.monotonic()
        command = [sys.executable, "-m", "benchmarks.observer_exchange", kind, name, free_port()]
        members = [
            subprocess.Popen([*command, str(rank)], cwd=ROOT, stderr=subprocess.DEVNULL)
            for rank in range(MEMBERS)
        ]
        others = [rank for rank in range(MEMBERS) if rank != victim]
        try:
            wait(lambda: all(heard(folder, it) >= set(range(MEMBERS)) for it in range(MEMBERS)))
            start_s = time.monotonic() - began
            members[victim].send_signal(number)
            time.sleep(AFTER_S + 3 * PERIOD_S)
            deadline = time.monotonic() + WITHIN_S
            hearing: set[int] = set()
            for rank in others:
                (folder / f"member-{rank}.json").unlink(missing_ok=True)
            while time.monotonic() < deadline and len(hearing) < len(others):
                hearing |= {rank for rank in others if heard(folder, rank) >= set(others)}
                time.sleep(0.05)
            sizes = [body(folder, rank)["mb"] for rank in others if body(folder, rank)]
        finally:
            for member in members:
                member.kill()
                member.wait()
    return Trial(hearing=len(hearing), start_s=start_s, megabytes=max(sizes, default=0.0))


def body(folder: Path, rank: int) -> dict[str, float]:
    """Return what a member wrote last, empty while it has not."""
    try:
        told: dict[str, float] = json.loads((folder / f"member-{rank}.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return told


def heard(folder: Path, rank: int) -> set[int]:
    """Return of whom a member has fresh words."""
    found: list[int] = body(folder, rank).get("heard", [])  # type: ignore[assignment] # as written
    return set(found)


def wait(condition: object) -> None:
    """Wait until every member hears every other."""
    deadline = time.monotonic() + READY_WITHIN_S
    while not condition():  # type: ignore[operator] # a function
        if time.monotonic() > deadline:
            raise SystemExit("observer_exchange: the members never heard one another")
        time.sleep(0.05)


def free_port() -> str:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main() -> None:
    """Run every trial, or be a member of one."""
    if len(sys.argv) > 1:
        kind, folder, port, rank = sys.argv[1:]
        if kind == "gloo":
            gloo_member(Path(folder), int(rank), int(port))
        asyncio.run(our_member(Path(folder), int(rank), int(port), in_files=kind == "files"))
    found = {kind: [trial(kind, number, rank) for _, number, rank in FAULTS] for kind in KINDS}
    print(f"| of three members left, how many hear the others | {' | '.join(KINDS)} |")
    print("|---" * (1 + len(KINDS)) + "|")
    for row, (name, _, _) in enumerate(FAULTS):
        cells = " | ".join(str(found[kind][row].hearing) for kind in KINDS)
        print(f"| {name} | {cells} |")
    starts = {kind: min(it.start_s for it in found[kind]) for kind in KINDS}
    sizes = {kind: max(it.megabytes for it in found[kind]) for kind in KINDS}
    print("| until all four hear one another | " + " | ".join(f"{starts[k]:.1f} s" for k in KINDS))
    print("| resident, each | " + " | ".join(f"{sizes[k]:.0f} MB" for k in KINDS))
    results = {
        kind: {
            "hearing": [it.hearing for it in found[kind]],
            "start_s": round(starts[kind], 2),
            "resident_mb": round(sizes[kind]),
        }
        for kind in KINDS
    }
    print(json.dumps({"benchmark": "observer", "results": results}))


if __name__ == "__main__":
    main()
