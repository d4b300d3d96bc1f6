"""A DDP job under lm-resiliency's observer, in which one rank stalls at a place that is named."""

import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lm_resiliency import ReplayHarnessConfig, enable_resiliency
from torch import nn

FOLDER = Path(os.environ["PEER_DIR"])
WHERE, CULPRIT = os.environ["PEER_WHERE"], int(os.environ["PEER_RANK"])
THRESHOLD_S = 3.0
STALL_AT_STEP = 4


class Block(nn.Module):
    """One of several equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch to one of the same shape."""
        return x + self.linear(x).tanh()


class Model(nn.Module):
    """Named as the harness expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.output = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens to logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def main() -> None:
    """Train, stall, and write down what the observer reports."""
    torch.set_num_threads(1)
    torch.cuda.synchronize = lambda *_: None  # it is called on machines without a GPU, too
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Model()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    is_armed = False

    def report(found: dict[str, object]) -> None:
        began = float((FOLDER / "began").read_text())
        line = {"failed_ranks": found["failed_ranks"], "after_s": time.time() - began}
        with (FOLDER / f"report-{rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def nap(where: str) -> None:
        if is_armed and where == WHERE and rank == CULPRIT:
            (FOLDER / "began").write_text(str(time.time()))
            if where in ("stop", "kill"):
                os.kill(os.getpid(), signal.SIGSTOP if where == "stop" else signal.SIGKILL)
            time.sleep(1000)

    model.layers[2].register_forward_pre_hook(lambda *_: nap("forward"))
    model.layers[1].linear.weight.register_hook(lambda gradient: (nap("backward"), gradient)[1])
    enable_resiliency(
        parallel,
        optimizer,
        interval=100_000,
        enable_checkpoint=False,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        nccl_group=dist.group.WORLD,
        replay=ReplayHarnessConfig(
            scale_factors=[],
            hang_stall_threshold_s=THRESHOLD_S,
            hang_confirmation_interval_s=0.5,
            dataloader_latency_threshold_s=THRESHOLD_S,
            checkpoint_io_latency_threshold_s=THRESHOLD_S,
        ),
        oob_fault_callback=report,
    )
    for step in range(100_000):
        is_armed = step == STALL_AT_STEP
        nap("stop")
        nap("kill")
        nap("data")
        tokens = torch.randint(0, 64, (4, 16))
        optimizer.zero_grad()
        logits = parallel(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        nap("optimizer")
        optimizer.step()


if __name__ == "__main__":
    main()
