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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scout
from scout import adapters, signature
from scout.results import OrchestrationHooks, plain
from scout.settings import Referee, ReplayHarnessConfig
from scout.straggler import StragglerThresholds

VOCABULARY: Final = 101
WITHIN_S: Final = 600.0

Orders = dict[str, Any]


class Block(nn.Module):  # type: ignore[misc]
    """A residual MLP with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        """Map (batch, time, width) to the same shape."""
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):  # type: ignore[misc]
    """A language model whose parts bear no name that a list would hold."""

    def __init__(self, width: int, layers: int, *, headless: bool) -> None:
        super().__init__()
        self.lexicon = nn.Embedding(VOCABULARY, width)
        self.stack = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.classifier = None if headless else nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        """Map (batch, time) to logits."""
        x = self.stack(self.lexicon(tokens))
        if self.classifier is None:
            return nn.functional.linear(x, self.lexicon.weight)
        return self.classifier(x)


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


# --- faults ---------------------------------------------------------------------------------


def flip(tensor: Any, element: int, bit: int) -> None:
    """Flip one bit of one element of this rank's part of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    width = local.element_size()
    raw = local.detach().view(-1).view(torch.uint8)
    raw[(element % local.numel()) * width + bit // 8] ^= 1 << (bit % 8)


class SwapValue(torch.autograd.Function):  # type: ignore[misc]
    """Puts other values in place of a result, and lets its gradient pass."""

    @staticmethod
    def forward(_context: Any, _result: Any, other: Any) -> Any:
        """Return ``other``."""
        return other

    @staticmethod
    def backward(_context: Any, gradient: Any) -> Any:
        """Return the gradient unchanged."""
        return gradient, None


class FlipGradient(torch.autograd.Function):  # type: ignore[misc]
    """Lets values pass, and flips a bit of their gradient."""

    @staticmethod
    def forward(context: Any, value: Any, element: int, bit: int) -> Any:
        """Return ``value``."""
        context.at = element, bit
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        """Return the gradient with a bit flipped."""
        wrong = gradient.contiguous().clone()
        flip(wrong, *context.at)
        return wrong, None, None


def flipped_output(result: Any, element: int, bit: int) -> Any:
    """Return ``result`` with a bit flipped, as a broken unit would leave it."""
    other = result.detach().contiguous().clone()
    flip(other, element, bit)
    return SwapValue.apply(result, other)


class Fault:
    """One fault of one rank, from one step on until it is lifted."""

    def __init__(self, orders: Orders, model: Any, optimizer: Any) -> None:
        fault = orders.get("fault", {})
        self.kind = fault.get("kind", "") if fault.get("rank") == dist.get_rank() else ""
        self.step = fault.get("step", 3)
        self.at = fault.get("element", 7), fault.get("bit", 30)
        self.ms = fault.get("ms", 0.0)
        self.factor = fault.get("factor", 1.0)
        self.layer = fault.get("layer", 1)
        self.model, self.optimizer = model, optimizer
        self._undo: list[Callable[[], None]] = []

    def before(self, step: int) -> None:
        """Begin, if this is the rank and the step."""
        if step != self.step or not self.kind:
            return
        element, bit = self.at
        match self.kind:
            case "output":
                self._change_blocks(lambda out: flipped_output(out, element, bit))
            case "gradient":
                self._change_blocks(lambda out: FlipGradient.apply(out, element, bit))
            case "slow":
                self._change_blocks(self._pause)
            case "slower":
                self._slow_down()
            case "raise":
                self._change_blocks(_raise_in_replay)
            case "optimizer":
                self._change_optimizer()
            case "uncalled":
                self._uncalled()

    def after(self, step: int) -> None:
        """Corrupt what is owned, once the optimizer has stepped, but before the step's check."""
        if step != self.step:
            return
        layer = self.model.stack[self.layer]
        if self.kind == "weight":
            flip(layer.up.weight, *self.at)
        elif self.kind == "embedding":
            flip(self.model.lexicon.weight, *self.at)
        elif self.kind == "moment":
            flip(self.optimizer.state[layer.up.weight]["exp_avg"], *self.at)

    def lift(self) -> None:
        """Put the code back."""
        while self._undo:
            self._undo.pop()()

    def _change_blocks(self, change: Callable[[Any], Any]) -> None:
        original = Block.forward

        def forward(block: Any, x: Any) -> Any:
            return change(original(block, x))

        Block.forward = forward
        self._undo.append(lambda: setattr(Block, "forward", original))

    def _pause(self, result: Any) -> Any:
        time.sleep(self.ms / 1000)
        return result

    def _slow_down(self) -> None:
        """Make the blocks of this rank take ``factor`` of their time."""
        original = Block.forward

        def forward(block: Any, x: Any) -> Any:
            began = time.perf_counter()
            result = original(block, x)
            until = time.perf_counter() + (self.factor - 1) * 2 * (time.perf_counter() - began)
            while time.perf_counter() < until:
                pass
            return result

        Block.forward = forward
        self._undo.append(lambda: setattr(Block, "forward", original))

    def _change_optimizer(self) -> None:
        kind = type(self.optimizer)
        original = kind.step
        element, bit = self.at

        def step(optimizer: Any, closure: Any = None) -> Any:
            done = original(optimizer, closure)
            flip(optimizer.param_groups[0]["params"][0], element, bit)
            return done

        kind.step = step
        self._undo.append(lambda: setattr(kind, "step", original))

    def _uncalled(self) -> None:
        """Run this rank's layers around the calls that hooks see."""
        stack = self.model.stack

        def forward(x: Any) -> Any:
            for layer in stack:
                x = layer.forward(x)
            return x

        stack.forward = forward
        self._undo.append(lambda: delattr(stack, "forward"))


def _raise_in_replay(result: Any) -> Any:
    frame = sys._getframe()  # noqa: SLF001 - the fault is to strike only there
    while frame is not None:
        if frame.f_globals.get("__name__") == "scout.replay.recipes":
            raise RuntimeError("no kernel for this")
        frame = frame.f_back  # type: ignore[assignment]
    return result


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
