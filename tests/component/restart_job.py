"""A small DDP job with a restartable block, for tests: it breaks when it finds a file.

``break-<rank>`` in the folder that ``--out`` names the parent of says how, once: ``raise``,
``swallow`` (catch whatever is raised, for ever), ``sleep`` (in the kernel, in one long call),
``asleep-<library>`` (call its function that sleeps in the kernel where no signal wakes it),
``restart-<mode>`` (report a fault that asks for this mode).  ``always-<rank>`` with ``raise`` in it
is never used up.  ``early-<rank>`` kills the rank once, before it opens or finds the store, as
soon as everybody else has been waiting for the store for a while.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_shim

worker_shim.attach()

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--checkpoint-dir", type=Path, required=True)
ARGS, _ = parser.parse_known_args()
FOLDER = ARGS.out.parent.parent
KEPT = {"runs": 0}
"""Stands for what a script keeps in memory outside of its block."""


@worker_shim.restartable
def train() -> None:
    """Train until the steps are done or somebody ends us."""
    KEPT["runs"] += 1
    die_early(int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"run {KEPT['runs']} of this process, rank {rank} of {dist.get_world_size()}", flush=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    ARGS.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    chosen = worker_shim.latest_checkpoint()
    done = 0
    if chosen is not None:
        state = torch.load(chosen, weights_only=True)
        model.load_state_dict(state["model"])
        done = state["step"]
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    step = done
    while True:
        step += 1
        misbehave(rank)
        time.sleep(0.02)
        optimizer.zero_grad()
        parallel(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        if step % 10 == 0:
            save(step, rank, model)


def save(step: int, rank: int, model: torch.nn.Module) -> None:
    """Save on rank 0, then say everywhere that it is there."""
    path = ARGS.checkpoint_dir / f"{step}.pt"
    if rank == 0:
        torch.save({"step": step, "model": model.state_dict()}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    dist.barrier()
    worker_shim.checkpoint_saved(step, path)


def die_early(rank: int) -> None:
    """Die as the file says, if there is one, when all others wait for the store."""
    (FOLDER / f"waits-{rank}").touch()
    order = FOLDER / f"early-{rank}"
    if not order.exists():
        return
    others = int(os.environ["WORLD_SIZE"]) - 1
    while len(list(FOLDER.glob("waits-*"))) <= others:
        time.sleep(0.05)
    time.sleep(3)  # what a store waits between two tries grows, and it must be in such a wait
    order.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def misbehave(rank: int) -> None:
    """Do what the file says, if there is one."""
    if (FOLDER / f"always-{rank}").exists():
        raise ValueError(f"rank {rank} can never take this step")
    order = FOLDER / f"break-{rank}"
    if not order.exists():
        return
    how = order.read_text().strip()
    order.unlink()
    if how == "raise":
        raise ValueError(f"rank {rank} found a value it cannot use")
    if how.startswith("restart-"):
        worker_shim.report_fault("asked by the script", how.removeprefix("restart-"))
    if how.startswith("asleep-"):
        ctypes.CDLL(how.removeprefix("asleep-")).fall_asleep()
    while how == "sleep":
        time.sleep(3600)
    while how == "swallow":
        try:
            time.sleep(0.1)
        except BaseException:  # noqa: BLE001 - the worst that a script can do
            print("swallowed", file=sys.stderr, flush=True)


train()
