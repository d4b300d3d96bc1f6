"""Training runs with a fault of one's choice in one rank: what the detection figures stand on.

A rank of a job.  It reads a list of orders from a JSON file, runs each of them in turn in the same
process group, and writes what SCOUT said about each to ``<folder>/<rank>.json``.  Faults are real:
bits of live tensors, code that computes something else, time that passes.

    python -m benchmarks.scout_world ORDERS.json FOLDER    (with RANK, WORLD_SIZE, MASTER_*)
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scout
from benchmarks.scout_faults import VOCABULARY, Fault, Model, Orders
from scout import adapters, signature
from scout.results import OrchestrationHooks, plain
from scout.settings import Referee, ReplayHarnessConfig
from scout.straggler import StragglerThresholds

WITHIN_S: Final = 600.0


def wrap(model: Any, orders: Orders) -> Any:
    """Return what is called in training; FSDP changes the model itself."""
    if orders.get("regime", "ddp") == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    world = dist.get_world_size()
    shards = orders.get("shards", world)
    names = ("dp_replicate", "dp_shard")
    mesh = (
        init_device_mesh("cpu", (world,))
        if shards == world
        else init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=names)
    )
    for layer in model.stack:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# --- a run ----------------------------------------------------------------------------------


def config_of(orders: Orders) -> ReplayHarnessConfig:
    """Return the orders' settings; times are not compared unless the orders say so."""
    given = dict(orders.get("config", {"check_interval": 2}))
    if "stragglers" in orders:
        given["stragglers"] = StragglerThresholds(**orders["stragglers"])
    given.setdefault("compare_stragglers", "stragglers" in orders)
    if "referee" in given:
        given["referee"] = Referee(given["referee"])
    return ReplayHarnessConfig(**given)


def checkpoints_of(orders: Orders, model: Any, optimizer: Any) -> Any:
    """Return the checkpoints that the orders ask for, if any."""
    if "checkpoints" not in orders:
        return None

    def restore(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])

    if orders.get("regime", "ddp") == "ddp":
        return adapters.torch_save(
            orders["checkpoints"],
            state=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            restore=restore,
            every_steps=orders["every"],
        )
    return adapters.distributed_checkpoint(
        orders["checkpoints"],
        state=lambda: {"model": model.state_dict()},
        restore=restore,
        every_steps=orders["every"],
    )


def train(orders: Orders) -> dict[str, Any]:
    """Run one scenario and return what SCOUT said, and what training noticed of it."""
    torch.manual_seed(0)
    dtype = getattr(torch, orders.get("dtype", "float32"))
    model = Model(
        orders.get("width", 32), orders.get("layers", 3), headless=orders.get("headless", False)
    ).to(dtype)
    called = wrap(model, orders)
    optimizer = getattr(torch.optim, orders.get("optimizer", "AdamW"))(model.parameters(), lr=1e-3)
    told: dict[str, Any] = {"results": [], "faults": [], "trust": []}
    hooks = OrchestrationHooks(
        report_fault=lambda it: told["faults"].append(plain(it)),
        report_result=lambda it: told["results"].append(plain(it)),
        report_trust=lambda *it: told["trust"].append(list(it)),
    )
    fault = Fault(orders, model, optimizer)
    optimizer.register_step_post_hook(lambda *_: fault.after(told["step"]))
    guard = None
    if orders.get("protected", True):
        guard = scout.protect(
            model,
            optimizer,
            config=config_of(orders),
            hooks=hooks,
            run="world",
            checkpoints=checkpoints_of(orders, model, optimizer),
        )
        if orders.get("restore"):
            told["restored"] = plain(guard.restore())
    told |= {"held": [], "untouched": True, "step_ms": []}
    for step in range(1, orders.get("steps", 4) + 1):
        told["step"] = step
        fault.before(step)
        began = time.perf_counter()
        _step(called, optimizer, orders, told, guard)
        told["step_ms"].append((time.perf_counter() - began) * 1000)
    fault.lift()
    if guard is not None:
        told["why_not"], told["interval"] = guard.why_not, guard.interval
        told["worst_case_steps"] = guard.worst_case_steps
        guard.close()
    told["weights"] = f"{signature.sign(list(model.parameters())):#x}"
    told["hooks_left"] = sum(
        len(it._forward_hooks) + len(it._forward_pre_hooks)  # noqa: SLF001
        for layer in model.stack
        for it in layer.modules()
    )
    return told


def _step(called: Any, optimizer: Any, orders: Orders, told: dict[str, Any], guard: Any) -> None:
    step = told["step"]
    torch.manual_seed(1000 * step + dist.get_rank())
    shape = orders.get("batch", 4), orders.get("length", 16)
    tokens = torch.randint(0, VOCABULARY, shape)
    logits = called(tokens).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    if not orders.get("watched", True):
        optimizer.step()
        return
    gradients = [it.grad for group in optimizer.param_groups for it in group["params"]]
    told["held"].append(len(guard.captures_held()) if guard is not None else 0)
    before = signature.sign([*gradients, torch.get_rng_state()])
    optimizer.step()
    told["untouched"] &= before == signature.sign([*gradients, torch.get_rng_state()])


def run_world(ranks: int, orders: Sequence[Orders], folder: Path) -> list[list[dict[str, Any]]]:
    """Run ``orders`` with ``ranks`` processes; return for each order what every rank told.

    Raises `RuntimeError` with the output of the first rank that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "orders.json"
    path.write_text(json.dumps(list(orders)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    base |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-m", "benchmarks.scout_world", str(path), str(folder)]
    with _started(command, base, ranks, folder) as processes:
        deadline = time.monotonic() + WITHIN_S
        while any(process.poll() is None for process in processes):
            failed = [at for at, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > deadline:
                at = failed[0] if failed else 0
                raise RuntimeError((folder / f"{at}.log").read_text()[-4000:])
            time.sleep(0.05)
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return [list(one) for one in zip(*told, strict=True)]


@contextlib.contextmanager
def _started(
    command: list[str], base: dict[str, str], ranks: int, folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = []
    try:
        for rank in range(ranks):
            with (folder / f"{rank}.log").open("wb") as log:
                env = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    orders = json.loads(Path(sys.argv[1]).read_text())
    told = [train(one) for one in orders]
    Path(sys.argv[2], f"{os.environ['RANK']}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
