"""A small DDP job for the hang benchmark that stalls where it is told to, while it trains.

A file named after the rank in ``BENCH_DIR/orders`` holds one word: where to stall.  The rank takes
the file away, writes down when it stalls, and sleeps for good.  With ``BENCH_HEALTHY`` it stalls
nowhere and is merely as uneven as real jobs are: a first step that takes long, steps of any
length, evaluations on one rank while the others wait, slow checkpoints.
"""

import io
import json
import os
import random
import time
from pathlib import Path

import worker_shim

worker_shim.attach()

import torch  # noqa: E402 - attached first, as a script that cannot know better does
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

FOLDER = Path(os.environ["BENCH_DIR"])
RANK = int(os.environ["RANK"])
HEALTHY = float(os.environ.get("BENCH_HEALTHY", "0"))
"""Scale of the healthy unevenness; 0 is a job that stalls when it is told to."""
STEPS_PER_CHECKPOINT = 20
WIDTH = 64


class Orders:
    """Where this rank is to stall in the present step, if anywhere."""

    def __init__(self) -> None:
        self.where = ""

    def look(self) -> None:
        """Take the order that lies there."""
        file = FOLDER / "orders" / str(RANK)
        try:
            self.where = file.read_text()
            file.unlink()
        except FileNotFoundError:
            return

    def obey(self, where: str) -> None:
        """Stall for good when ``where`` is the place."""
        if self.where == where:
            self.began()
            time.sleep(100_000)

    def began(self) -> None:
        """Write down that the fault begins now."""
        (FOLDER / "began").write_text(json.dumps({"rank": RANK, "ns": time.time_ns()}))


ORDERS = Orders()


class Samples(Dataset[torch.Tensor]):
    """Endless noise."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sample, or stall as a file system would make us."""
        ORDERS.obey("data")
        return torch.full((WIDTH,), (index % 7) / 7)


class Block(nn.Module):
    """One of several equal layers."""

    def __init__(self, *, is_in_the_middle: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_in_the_middle = is_in_the_middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a batch to one of the same shape."""
        if self.is_in_the_middle:
            ORDERS.obey("forward")
        return x + self.linear(x).tanh()


class SlowFile(io.BytesIO):
    """A file whose storage stops answering."""

    def write(self, data: object) -> int:
        """Write, or stall as a file server would make us."""
        ORDERS.obey("checkpoint")
        return super().write(data)  # type: ignore[arg-type] # what torch hands over


def stall_in_backward(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient as it is."""
    ORDERS.obey("backward")
    return gradient


def share_loss(loss: torch.Tensor) -> None:
    """Average the loss over all ranks: the script's own collective."""
    ORDERS.obey("caller")
    if ORDERS.where == "other":
        ORDERS.began()
        dist.all_gather([torch.empty_like(loss) for _ in range(dist.get_world_size())], loss)
    elif ORDERS.where == "shape":
        ORDERS.began()
        dist.all_reduce(torch.zeros(1 << 16))
    else:
        dist.all_reduce(loss)


def save(step: int, model: nn.Module) -> None:
    """Save this rank's part, and say that it is there."""
    file = SlowFile()
    torch.save({"step": step, "model": model.state_dict()}, file)
    path = FOLDER / f"state-{step:08d}-{RANK}.pt"
    partial = path.with_suffix(".partial")
    partial.write_bytes(file.getvalue())
    partial.replace(path)
    for old in sorted(FOLDER.glob(f"state-*-{RANK}.pt"))[:-5]:
        old.unlink()
    worker_shim.checkpoint_saved(step, path)


def load(model: nn.Module) -> int:
    """Load what was chosen; return its step."""
    newest = max(FOLDER.glob(f"state-*-{RANK}.pt"), default=None)
    chosen = worker_shim.latest_checkpoint(default=newest)
    if chosen is None:
        return 0
    mine = Path(chosen).with_name(f"{Path(chosen).stem.rsplit('-', 1)[0]}-{RANK}.pt")
    state = torch.load(mine, weights_only=True)
    model.load_state_dict(state["model"])
    return int(state["step"])


def be_uneven(dice: random.Random, step: int, first: int) -> None:
    """Take the time that healthy jobs take now and then."""
    if step == first:
        with worker_shim.phase("compile"):
            time.sleep(HEALTHY * (20 + 5 * RANK))
    time.sleep(min(HEALTHY * 4, dice.lognormvariate(-3, 1.2)))
    if step % 50 == 0:
        if RANK == 0:
            with worker_shim.phase("evaluate", limit_s=600):
                time.sleep(HEALTHY * 45)
        dist.barrier()
    if step % 35 == 0 and step // 35 % dist.get_world_size() == RANK:
        time.sleep(HEALTHY * 20)  # what a script does without telling anybody


def main() -> None:
    """Train until somebody ends us."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dice = random.Random(RANK)  # noqa: S311 - a training script's noise
    dist.init_process_group("gloo")
    model = nn.ModuleList(Block(is_in_the_middle=index == 1) for index in range(4))
    model[1].linear.weight.register_hook(stall_in_backward)
    whole = nn.Sequential(*model)
    agreed = torch.tensor([load(whole)])
    dist.broadcast(agreed, 0)
    step = first = int(agreed)
    parallel = DistributedDataParallel(whole, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: ORDERS.obey("optimizer"))
    for batch in DataLoader(Samples(), batch_size=8):
        if HEALTHY:
            be_uneven(dice, step, first)
        else:
            time.sleep(0.03)
        ORDERS.look()
        loss = parallel(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        share_loss(loss.detach())
        if step % STEPS_PER_CHECKPOINT == 0:
            save(step, whole)


if __name__ == "__main__":
    main()
