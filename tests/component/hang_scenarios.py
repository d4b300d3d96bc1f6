"""Small training scripts that hang, each in another way; run in forked processes by their test.

Reads lines of JSON from standard input, each a scenario with the pages of its ranks; forks the
ranks from this process, which has imported torch already, and answers with their pids.
"""

import ctypes
import io
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import worker_shim
from worker_shim import collectives, groups

SCENARIOS: dict[str, Callable[["Rank"], None]] = {}
FOREVER = 10_000.0


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


class Rank:
    """One rank of a job that trains a tiny model."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, model=None) -> None:
        loss = (model or self.model)(torch.ones(2, 4)).square().mean()
        loss.backward()
        if model is None:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = 3, model=None) -> None:
        for _ in range(count):
            self.step(model)

    def is_(self, rank: int) -> bool:
        return self.rank == rank


def hang() -> None:
    time.sleep(FOREVER)


# --- pipelines ------------------------------------------------------------------------------


@scenario
def stage_that_never_sends(it: Rank) -> None:
    """Stage 1 stops between its receive and its send; the others wait up- and downstream."""
    it.steps()
    batch = torch.zeros(4)
    while True:
        if it.rank > 0:
            dist.recv(batch, it.rank - 1)
        if it.is_(1):
            hang()
        if it.rank < 2:
            dist.send(batch, it.rank + 1)
        dist.barrier()


@scenario
def stage_whose_first_message_never_comes(it: Rank) -> None:
    """No message has been sent yet, so only one end of each pair knows of it."""
    it.steps()
    batch = torch.zeros(4)
    if it.is_(0):
        hang()
    dist.recv(batch, it.rank - 1)
    dist.send(batch, (it.rank + 1) % 3)


@scenario
def stage_that_forgot_a_send(it: Rank) -> None:
    """Stage 0 goes to the barrier without the message that stage 1 waits for."""
    it.steps()
    batch = torch.zeros(4)
    if it.is_(1):
        dist.recv(batch, 0)
        dist.send(batch, 2)
    if it.is_(2):
        dist.recv(batch, 1)
    dist.barrier()


@scenario
def batched_messages(it: Rank) -> None:
    """Messages are asked for in one batch and waited for later, as pipelines do."""
    it.steps()
    out, into = torch.zeros(4), torch.zeros(4)
    for turn in range(100):
        if it.is_(2) and turn == 3:
            hang()
        right, left = (it.rank + 1) % 3, (it.rank - 1) % 3
        work = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, into, left)]
        )
        for one in work:
            one.wait()


# --- groups ---------------------------------------------------------------------------------


@scenario
def two_groups_in_another_order(it: Rank) -> None:
    """Ranks 0 and 1 enter two groups of both crosswise: a deadlock that is nobody's alone."""
    it.steps()
    one, two = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
    first, second = (one, two) if it.rank < 2 else (two, one)
    dist.barrier(group=first)
    dist.barrier(group=second)


@scenario
def wrong_order_in_a_subgroup(it: Rank) -> None:
    """One member broadcasts where the others reduce."""
    it.steps()
    group = dist.new_group([0, 1, 2])
    value = torch.zeros(8)
    if it.rank < 3:
        if it.is_(1):
            dist.broadcast(value, 1, group=group)
            dist.all_reduce(value, group=group)
        else:
            dist.all_reduce(value, group=group)
            dist.broadcast(value, 1, group=group)
    dist.barrier()


@scenario
def tensor_peer_hides_the_culprit(it: Rank) -> None:
    """Rank 3 of a 2x2 layout misses its tensor group; its data group waits for its peer."""
    it.steps()
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][it.rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][it.rank % 2]
    value = torch.zeros(8)
    for turn in range(100):
        if it.is_(3) and turn == 5:
            hang()
        dist.all_reduce(value, group=tensor)
        dist.all_reduce(value, group=data)


@scenario
def barrier_on_one_rank_only(it: Rank) -> None:
    """A leftover barrier under ``if rank == 0``."""
    it.steps()
    if it.is_(0):
        dist.barrier()
    it.steps(100)


# --- collectives ----------------------------------------------------------------------------


@scenario
def all_to_all(it: Rank) -> None:
    """Token exchange of a mixture of experts, one rank late."""
    it.steps()
    out, into = torch.zeros(4), torch.zeros(4)
    for turn in range(100):
        if it.is_(2) and turn == 4:
            hang()
        dist.all_to_all_single(into, out)


@scenario
def monitored_barrier(it: Rank) -> None:
    """Rank 0 collects everybody; a count of torch's does not move."""
    it.steps()
    if it.is_(2):
        hang()
    dist.monitored_barrier(timeout=timedelta(hours=1))


@scenario
def broadcast_without_its_root(it: Rank) -> None:
    """The others wait for a root that still looks for its file."""
    it.steps()
    if it.is_(0):
        hang()
    dist.broadcast(torch.zeros(4), 0)


@scenario
def gathered_objects(it: Rank) -> None:
    """A pickled object takes two collectives of any size."""
    it.steps()
    if it.is_(1):
        hang()
    dist.all_gather_object([None] * it.size, {"rank": it.rank})


@scenario
def handle_that_nobody_waits_for(it: Rank) -> None:
    """Rank 1 has issued its part like everybody else, and never comes back for it."""
    it.steps()
    work = dist.all_reduce(torch.zeros(4), async_op=True)
    if it.is_(1):
        hang()
    work.wait()
    dist.all_reduce(torch.zeros(4))


@scenario
def gradients_not_shared_by_one(it: Rank) -> None:
    """Rank 1 is under DDP's ``no_sync`` and goes on alone."""
    model = DistributedDataParallel(it.model)
    it.steps(model=model)
    if it.is_(1):
        with model.no_sync():
            it.step(model)
    else:
        it.step(model)
    dist.all_reduce(torch.zeros(4))
    dist.barrier()


@scenario
def backward_without_torch_s_counts(it: Rank) -> None:
    """A torch whose groups do not tell their count: the Flight Recorder tells of C++'s."""
    model = DistributedDataParallel(it.model, bucket_cap_mb=0.0001)
    it.steps(model=model)
    if it.is_(2):
        it.model[0][0].weight.register_hook(lambda _: hang())
    it.steps(100, model)


@scenario
def stopped_in_ddp(it: Rank) -> None:
    """A signal stops rank 3 somewhere in a step."""
    model = DistributedDataParallel(it.model)
    it.steps(10, model)
    if it.is_(3):
        os.kill(os.getpid(), signal.SIGSTOP)
    it.steps(100_000, model)


# --- what happens inside one process --------------------------------------------------------


class Items(Dataset):
    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.stop_at:
            hang()
        return torch.zeros(4)


@scenario
def loader_s_worker_hangs(it: Rank) -> None:
    """A worker of rank 2's loader reads a file that never comes."""
    it.steps()
    stop_at = 8 if it.is_(2) else -1
    for _ in DataLoader(
        Items(stop_at), num_workers=1, batch_size=2, multiprocessing_context="fork"
    ):
        it.step()


@scenario
def interpreter_held(it: Rank) -> None:
    """An extension of rank 1 computes for ever without letting go of the interpreter."""
    it.steps()
    if it.is_(1):
        ctypes.PyDLL(None).sleep(int(FOREVER))
    it.steps(100)


@scenario
def lock_of_another_thread(it: Rank) -> None:
    """Rank 2's training thread wants a lock whose holder waits for training."""
    it.steps()
    if it.is_(2):
        lock, taken = threading.Lock(), threading.Event()

        def hold() -> None:
            with lock:
                taken.set()
                hang()

        threading.Thread(target=hold, daemon=True).start()
        taken.wait()
        lock.acquire()
    it.steps(100)


@scenario
def endless_loop(it: Rank) -> None:
    """Rank 0 looks for a batch that fits, and there is none."""
    it.steps()
    while it.is_(0):
        pass
    it.steps(100)


@scenario
def checkpoint_into_a_full_pipe(it: Rank) -> None:
    """Rank 1 writes its part to a place that takes nothing any more."""
    it.steps()
    if it.is_(1):
        pipe = it.folder / "pipe"
        os.mkfifo(pipe)
        os.open(pipe, os.O_RDWR)
        with pipe.open("wb", buffering=0) as file:
            torch.save({"state": torch.zeros(1 << 20)}, file)
    dist.barrier()


@scenario
def leaves_without_a_word(it: Rank) -> None:
    """Rank 3's script thinks that it has seen all its data."""
    it.steps()
    if it.is_(3):
        os._exit(0)
    it.steps(100)


@scenario
def reads_a_file_that_never_comes(it: Rank) -> None:
    """Rank 2 reads its next shard from a place that answers nothing, outside any loader."""
    it.steps()
    if it.is_(2):
        pipe = it.folder / "shard"
        os.mkfifo(pipe)
        os.read(os.open(pipe, os.O_RDWR), 1)
    it.steps(100)


@scenario
def waits_for_a_server_that_is_silent(it: Rank) -> None:
    """Rank 0 sends its numbers to a server that takes them and never answers."""
    it.steps()
    if it.is_(0):
        listener = socket.create_server(("127.0.0.1", 0))
        with socket.create_connection(listener.getsockname()) as connection:
            connection.recv(1)
    it.steps(100)


@scenario
def waits_for_its_own_child(it: Rank) -> None:
    """Rank 3 runs a program that never ends, between two steps."""
    it.steps()
    if it.is_(3):
        subprocess.run(["sleep", str(FOREVER)], check=True)
    it.steps(100)


@scenario
def queue_that_nobody_fills(it: Rank) -> None:
    """The thread that fetched rank 1's batches died of an error that nobody saw."""
    it.steps()
    batches: queue.Queue[torch.Tensor] = queue.Queue()
    batches.put(torch.zeros(4))
    while True:
        if it.is_(1):
            batches.get()
        it.step()


@scenario
def two_locks_in_another_order(it: Rank) -> None:
    """Rank 0's training thread and its writer each hold what the other wants."""
    it.steps()
    if it.is_(0):
        one, two, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

        def write() -> None:
            with two:
                both.wait()
                with one:
                    pass

        threading.Thread(target=write, daemon=True).start()
        with one:
            both.wait()
            with two:
                pass
    it.steps(100)


@scenario
def loader_in_the_process_hangs(it: Rank) -> None:
    """Rank 3's loader has no workers: the training thread itself reads what never comes."""
    it.steps()
    for _ in DataLoader(Items(8 if it.is_(3) else -1), batch_size=2):
        it.step()


@scenario
def checkpoint_read_from_an_empty_pipe(it: Rank) -> None:
    """Rank 1 loads its part from a place that gives nothing."""
    it.steps()
    if it.is_(1):
        pipe = it.folder / "pipe"
        os.mkfifo(pipe)
        with os.fdopen(os.open(pipe, os.O_RDWR), "rb", buffering=0) as file:
            torch.load(io.BytesIO(file.read(8)))
    dist.barrier()


@scenario
def checkpoint_of_its_own_format(it: Rank) -> None:
    """Rank 2 writes a checkpoint that torch does not know of, and says so."""
    it.steps()
    with worker_shim.checkpoint_io("write"):
        if it.is_(2):
            hang()
    it.steps(100)


@scenario
def gathers_where_the_others_reduce(it: Rank) -> None:
    """A branch on rank 3 leads to another collective of the whole job."""
    it.steps()
    value = torch.zeros(1 << 16)
    if it.is_(3):
        dist.all_gather([torch.zeros_like(value) for _ in range(it.size)], value)
    else:
        dist.all_reduce(value)
    dist.barrier()


@scenario
def member_that_never_comes_to_its_subgroup(it: Rank) -> None:
    """Rank 2 is missing in a group of three while the fourth rank waits for all of them."""
    it.steps()
    group = dist.new_group([0, 1, 2])
    if it.is_(2):
        hang()
    if it.rank < 3:
        dist.all_reduce(torch.zeros(8), group=group)
    dist.barrier()


@scenario
def member_that_skips_its_subgroup(it: Rank) -> None:
    """Rank 2 goes on to the barrier: it waits there for those who wait for it."""
    it.steps()
    group = dist.new_group([0, 1, 2])
    if it.rank < 2:
        dist.all_reduce(torch.zeros(8), group=group)
    dist.barrier()


@scenario
def stopped_inside_a_collective(it: Rank) -> None:
    """Rank 0 has entered the same collective as all others when a signal stops it."""
    it.steps()
    if it.is_(0):
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP))
        timer.start()
    if it.is_(1):
        time.sleep(1.5)
    it.steps(100_000)


@scenario
def frozen_with_its_control_group(it: Rank) -> None:
    """Whoever took a snapshot of rank 1's container forgot to let it go on."""
    it.steps()
    if it.is_(1):
        partial = it.folder / "partial"
        partial.write_text(str(os.getpid()))
        partial.rename(it.folder / "to freeze")
    while True:
        it.step()
        time.sleep(0.02)


@scenario
def ends_with_its_script(it: Rank) -> None:
    """Rank 1 counts one batch fewer than the others, and its process ends as it should."""
    it.steps()
    if it.is_(1):
        sys.exit(0)
    it.steps(100)


@scenario
def killed_in_backward(it: Rank) -> None:
    """The kernel ends rank 2 for its memory in the middle of a pass."""
    it.steps()
    if it.is_(2):
        it.model[1][0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    it.steps(100)


# --- what is no hang ------------------------------------------------------------------------


@scenario
def one_rank_is_slower(it: Rank) -> None:
    """Rank 2 computes for as long as is allowed, again and again."""
    it.steps()
    for _ in range(100):
        if it.is_(2):
            time.sleep(0.8)
        it.step()


@scenario
def first_step_takes_long(it: Rank) -> None:
    """Nothing is known of how long a first step may take."""
    if it.is_(0):
        hang()
    it.steps()


@scenario
def declared_evaluation(it: Rank) -> None:
    """Rank 0 evaluates for as long as it said, and the others are at the barrier."""
    it.steps()
    if it.is_(0):
        with worker_shim.phase("evaluate", limit_s=600):
            hang()
    dist.barrier()


@scenario
def evaluation_without_a_word(it: Rank) -> None:
    """Rank 0 evaluates, told by nothing but the passes through its model."""
    it.steps()
    if it.is_(0):
        it.model.eval()
        with torch.no_grad():
            for _ in range(10_000):
                it.model(torch.ones(2, 4))
                time.sleep(0.2)
    dist.barrier()


@scenario
def compiler_takes_long(it: Rank) -> None:
    """Each rank compiles its model for another time, and the first step waits for the slowest."""

    def slowly(graph, _inputs):
        time.sleep(3.5 + it.rank)
        return graph.forward

    compiled = torch.compile(it.model, backend=slowly)
    it.step(DistributedDataParallel(compiled))
    while True:
        it.step()
        time.sleep(0.02)


@scenario
def compiles_again_as_declared(it: Rank) -> None:
    """Rank 3 meets another shape of its data in the middle of training."""
    it.steps()
    if it.is_(3):
        with worker_shim.phase("compile", limit_s=600):
            hang()
    it.steps(100)


@scenario
def checkpoint_as_declared(it: Rank) -> None:
    """Rank 0 alone writes what all wait for, for as long as it said."""
    it.steps()
    if it.is_(0):
        with worker_shim.checkpoint_io("write", limit_s=600):
            hang()
    dist.barrier()


@scenario
def uneven_steps(it: Rank) -> None:
    """Whoever draws the longest step keeps the others waiting, each time another rank."""
    it.steps()
    dice = random.Random(it.rank)
    while True:
        time.sleep(min(1.2, dice.lognormvariate(-3, 1.2)))
        it.step()


# --- running --------------------------------------------------------------------------------


def train(body: dict, rank: int) -> None:
    """Be one rank until somebody ends us."""
    path, token = body["pages"][rank]
    os.environ |= {
        "OUTRIDER_PROGRESS_PAGE": path,
        "OUTRIDER_PROGRESS_TOKEN": str(token),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(body["pages"])),
        "LOCAL_RANK": str(rank),
    }
    folder = Path(body["folder"])
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if body["scenario"] == "backward_without_torch_s_counts":
        groups.sequence_number = collectives.sequence_number = lambda _group: None
    worker_shim.attach()
    size = len(body["pages"])
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    SCENARIOS[body["scenario"]](Rank(rank, size, folder))
    hang()


def main() -> None:
    """Fork ranks until standard input ends."""
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone
    for line in sys.stdin:
        body = json.loads(line)
        pids = []
        for rank in range(len(body["pages"])):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    train(body, rank)
                except BaseException as error:  # noqa: BLE001 - it is told, and the rank ends
                    os.write(2, f"{error!r}\n".encode())
                    os._exit(1)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
