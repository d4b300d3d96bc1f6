"""A tiny DDP job for the recovery benchmark: the same file under every launcher.

Writes a line of JSON for each thing it does, with the machine's monotonic clock, so that the
driver can tell launcher, interpreter, imports, process group and first step apart.
"""

import contextlib
import datetime as dt
import json
import os
import sys
import time
from pathlib import Path

import worker_shim

worker_shim.attach()

RECORDS = os.open(
    os.environ["BENCH_DIR"] + "/records.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
)
STEPS_PER_CHECKPOINT = 10
IN_PROCESS = "--in-process" in sys.argv
"""Run in a restartable block, and fail by an exception when the driver asks for it."""


def rank() -> int:
    """Return this process's rank; an in-process restart may change it."""
    return int(os.environ["RANK"])


def record(event: str, **more: int) -> None:
    """Append one line, whole."""
    line = {"event": event, "ns": time.monotonic_ns(), "rank": rank(), "pid": os.getpid(), **more}
    os.write(RECORDS, (json.dumps(line) + "\n").encode())


record("python")

import torch  # noqa: E402 - the time it takes is measured
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

record("imported")
MONITOR = None
if os.environ.get("BENCH_NVRX"):
    from nvidia_resiliency_ext import fault_tolerance

    MONITOR = fault_tolerance.RankMonitorClient()
    MONITOR.init_workload_monitoring()


def main() -> None:
    """Train until somebody ends us."""
    record("block")
    torch.set_num_threads(1)
    timeout = dt.timedelta(seconds=float(os.environ["BENCH_GROUP_TIMEOUT_S"]))
    dist.init_process_group("gloo", timeout=timeout)
    record("group")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    folder = Path(os.environ["BENCH_DIR"])
    newest = max(folder.glob("state-*.pt"), default=None)
    chosen = worker_shim.latest_checkpoint(default=newest)
    step = 0
    if chosen is not None:
        state = torch.load(chosen, weights_only=True)
        model.load_state_dict(state["model"])
        step = state["step"]
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    agreed = torch.tensor([step])
    dist.broadcast(agreed, 0)
    step = int(agreed)
    while True:
        time.sleep(0.02)
        fail_if_asked(folder)
        parallel(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        record("step", step=step)
        if MONITOR is not None:
            MONITOR.send_heartbeat()
        if step % STEPS_PER_CHECKPOINT == 0:
            save(folder, step, model)


def fail_if_asked(folder: Path) -> None:
    """Raise, once, when the driver has left a file for this rank."""
    order = folder / f"raise-{rank()}"
    with contextlib.suppress(FileNotFoundError):
        order.unlink()
        raise ValueError("asked to fail")


def save(folder: Path, step: int, model: torch.nn.Module) -> None:
    """Save atomically on rank 0, then say on every rank that it is there."""
    path = folder / f"state-{step:08d}.pt"
    if rank() == 0:
        partial = path.with_suffix(".partial")
        torch.save({"step": step, "model": model.state_dict()}, partial)
        partial.replace(path)
        for old in sorted(folder.glob("state-*.pt"))[:-5]:
            old.unlink()
    dist.barrier()
    worker_shim.checkpoint_saved(step, path)


if IN_PROCESS:
    worker_shim.restartable(main)()
else:
    main()
