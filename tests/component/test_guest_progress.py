"""What a training process's page says while it trains: real torch, real ranks, no sidecar."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scout.hang import Phase
from scout.progress import PageReader, create_page
from worker_shim.messages import (
    GENERATION_ENV,
    PROGRESS_PAGE_ENV,
    PROGRESS_TOKEN_ENV,
    SOCKET_ENV,
)

pytest.importorskip("torch")
pytestmark = pytest.mark.component

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pytorch_ddp" / "train.py"
DEADLINE_S = 120

PRELUDE = """
import sys
from torch.distributed import all_reduce, broadcast
import torch, torch.distributed as dist
import worker_shim
worker_shim.attach()
RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])

def wait(word):
    print(word, flush=True)
    sys.stdin.readline()

def join():
    dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=RANK,
                            world_size=WORLD)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return torch.relu(self.linear(x))

def model_and_optimizer():
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[Block() for _ in range(4)], torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


class Ranks:
    """Training processes with a page each, and hands on their standard input."""

    def __init__(self, folder, code, world, environment=None):
        self.pages = [folder / f"page-{rank}" for rank in range(world)]
        self.processes = []
        for rank, page in enumerate(self.pages):
            create_page(page, 7)
            place = {
                SOCKET_ENV: str(folder / "nobody"),
                PROGRESS_PAGE_ENV: str(page),
                PROGRESS_TOKEN_ENV: "7",
                GENERATION_ENV: "1",
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-c", PRELUDE + code]
            self.processes.append(
                subprocess.Popen(
                    [*command, str(rank), str(world), str(folder / "store")],
                    cwd=ROOT,
                    env=os.environ | place | (environment or {}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def reaches(self, rank, word):
        line = self.processes[rank].stdout.readline()
        if line != f"{word}\n":
            raise AssertionError((line, self.processes[rank].communicate(timeout=DEADLINE_S)))

    def go(self, rank):
        self.processes[rank].stdin.write("\n")
        self.processes[rank].stdin.flush()

    def shows(self, rank, condition):
        """Wait until the rank's page satisfies the condition, and return what it says."""
        reader = PageReader.open(self.pages[rank], 7)
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            said = reader.read()
            if said is not None and condition(said):
                return said
            time.sleep(0.01)
        raise AssertionError(reader.read())

    def end(self):
        ended = [process.communicate(timeout=DEADLINE_S) for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(ended), ended
        return ended

    def kill(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(tmp_path):
    """Starts ranks and leaves none behind."""
    started = []

    def start(code, world=1, environment=None):
        started.append(Ranks(tmp_path, code, world, environment))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def beats_again(said):
    """Return a condition: the background thread sampled twice since."""
    seen = set()

    def condition(now):
        if now.beat_ns > said.beat_ns:
            seen.add(now.beat_ns)
        return len(seen) > 1

    return condition


def position(said, name="0"):
    return next((it for it in said.groups if it.name == name), None)


STALL_IN_BACKWARD = """
from torch.nn.parallel import DistributedDataParallel
join()
model, optimizer = model_and_optimizer()
parallel = DistributedDataParallel(model)
x = torch.ones(2, 8)
for _ in range(2):
    step(parallel, optimizer, x)
if RANK == 1:
    model[1].linear.weight.register_hook(lambda grad: wait("stalled") or grad)
step(parallel, optimizer, x)
dist.destroy_process_group()
"""


def test_a_stall_inside_backward_shows_who_is_behind_and_where(ranks):
    """DDP's collectives start in C++: no Python hook would see which rank is waited for."""
    both = ranks(STALL_IN_BACKWARD, world=2)
    both.reaches(1, "stalled")
    late = both.shows(1, lambda said: said.phase is Phase.BACKWARD and position(said))
    waits = both.shows(0, lambda said: position(said).seq > position(late).seq)
    late = both.shows(1, beats_again(late))
    waits = both.shows(0, beats_again(waits))
    assert (late.phase, waits.phase) == (Phase.BACKWARD, Phase.BACKWARD)
    assert (late.step, waits.step) == (2, 2)
    assert position(late).seq < position(waits).seq
    assert position(late).ranks == position(waits).ranks == (0, 1)
    both.go(1)
    both.end()


COLLECTIVES = """
join()
pair = dist.new_group([0, 1])
all_reduce(torch.ones(2))
all_reduce(torch.ones(3), group=pair, async_op=True).wait()
wait("equal")
if RANK == 0:
    broadcast(torch.ones(2), 0, group=pair)
else:
    wait("late")
    broadcast(torch.ones(2), 0, group=pair)
if RANK == 0:
    all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
else:
    wait("late again")
    all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
dist.destroy_process_group()
"""


def test_ranks_in_the_same_collective_say_the_same_of_every_group(ranks):
    """Every healthy job would look as if its ranks were in different collectives."""
    both = ranks(COLLECTIVES, world=2)
    both.reaches(0, "equal")
    both.reaches(1, "equal")
    said = [
        both.shows(rank, lambda said: len(said.groups) == 2 and said.groups[1].seq == 1)
        for rank in range(2)
    ]
    said = [both.shows(rank, beats_again(said[rank])) for rank in range(2)]
    assert said[0].groups == said[1].groups
    assert [it.op for it in said[0].groups] == ["all_reduce", "all_reduce"]
    assert said[0].groups[0].fingerprint != said[0].groups[1].fingerprint
    both.go(0)
    both.go(1)
    both.reaches(1, "late")
    both.go(1)
    both.reaches(1, "late again")
    inside = both.shows(0, lambda said: position(said).inside)
    assert inside.phase is Phase.COLLECTIVE
    assert inside.collective_since_ns is not None
    inside = both.shows(0, beats_again(inside))
    late = both.shows(1, lambda said: True)
    late = both.shows(1, beats_again(late))
    assert position(late).inside is False
    assert position(late).seq == position(inside).seq - 1
    assert late.groups[1].seq == inside.groups[1].seq
    both.go(1)
    both.end()


DIFFERENT = """
join()
all_reduce(torch.ones(2))
if RANK == 2:
    broadcast(torch.ones(2), 0, async_op=True)
    wait("odd")
elif RANK == 1:
    all_reduce(torch.ones(5), async_op=True)
    wait("shape")
else:
    all_reduce(torch.ones(2), async_op=True)
    wait("ours")
import os
os._exit(0)
"""


def test_another_operation_or_shape_shows_in_the_fingerprint(ranks):
    """A rank that took another branch would look as if it waited like everybody else."""
    all_four = ranks(DIFFERENT, world=4)
    said = []
    for rank, word in enumerate(["ours", "shape", "odd", "ours"]):
        all_four.reaches(rank, word)
        first = all_four.shows(rank, lambda said: position(said) and position(said).seq == 2)
        said.append(position(all_four.shows(rank, beats_again(first))))
    prints = [it.fingerprint for it in said]
    assert prints[0] == prints[3]
    assert len(set(prints)) == 3
    assert [it.op for it in said] == ["all_reduce", "all_reduce", "broadcast", "all_reduce"]
    for rank in range(4):
        all_four.go(rank)
    all_four.end()


MESSAGES = """
join()
if RANK == 0:
    for _ in range(3):
        dist.send(torch.ones(2), 1)
    wait("late")
    dist.send(torch.ones(2), 1)
else:
    for _ in range(4):
        dist.recv(torch.zeros(2), 0)
dist.destroy_process_group()
"""


def test_a_rank_that_waits_for_a_message_says_for_whose(ranks):
    """A stuck pipeline stage would be one of a dozen silent ones."""
    both = ranks(MESSAGES, world=2)
    both.reaches(0, "late")
    waits = both.shows(1, lambda said: (at := position(said, "0:0-1")) and at.inside)
    waits = both.shows(1, beats_again(waits))
    late = both.shows(0, lambda said: position(said, "0:0-1"))
    assert (position(waits, "0:0-1").seq, position(late, "0:0-1").seq) == (4, 3)
    assert position(waits, "0:0-1").op == "recv"
    both.go(0)
    both.end()


PHASES = """
model, optimizer = model_and_optimizer()
x = torch.ones(2, 8)
step(model, optimizer, x)
with worker_shim.phase("evaluate", limit_s=600):
    model(x)
    with worker_shim.checkpoint_io("write"):
        wait("writing")
    wait("evaluating")
wait("declared nothing")
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, at):
        wait("loading")
        return at
for _ in torch.utils.data.DataLoader(Slow(), batch_size=2):
    pass
def slow():
    wait("generating")
    yield x
for batch in worker_shim.instrument_dataloader(slow()):
    step(model, optimizer, batch)
class Storage:
    def write(self, data):
        global wait
        said, wait = wait, lambda word: None
        said("saving")
        return len(data)
    def flush(self):
        pass
torch.save({"step": 1}, Storage())
model.eval()
model[2].register_forward_hook(lambda *_: said_in_eval("eval"))
def said_in_eval(word):
    print(word, flush=True)
    sys.stdin.readline()
with torch.no_grad():
    model(x)
"""


def test_what_a_rank_is_busy_with_is_on_its_page(ranks):
    """Ten minutes of evaluation, a slow disk and a dead loader would all be one silence."""
    one = ranks(PHASES)
    expected = [
        ("writing", Phase.CHECKPOINT, "write", True),
        ("evaluating", Phase.EVALUATE, "", True),
        ("declared nothing", Phase.UNKNOWN, "", False),
        ("loading", Phase.DATA, "", False),
        ("loading", Phase.DATA, "", False),
        ("generating", Phase.DATA, "", False),
        ("saving", Phase.CHECKPOINT, "write", False),
        ("eval", Phase.EVALUATE, "", False),
    ]
    for word, *told in expected:
        one.reaches(0, word)
        said = one.shows(0, lambda said: tells(said) == tuple(told))  # noqa: B023 - called at once
        assert [said.phase, said.detail, said.phase_limit_ns is not None] == told
        one.go(0)
    one.end()


def tells(said):
    return said.phase, said.detail, said.phase_limit_ns is not None


LOADER = """
model, optimizer = model_and_optimizer()
x = torch.ones(2, 8)
step(model, optimizer, x)
class Busy(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, at):
        step(model, optimizer, x)
        all(torch.save({}, "/dev/null") for _ in range(3))
        return at
loader = torch.utils.data.DataLoader(
    Busy(), batch_size=1, num_workers=2, multiprocessing_context="fork"
)
assert sorted(int(it) for it in loader) == [0, 1, 2, 3]
wait("loaded")
"""


def test_the_workers_of_a_loader_publish_nothing(ranks):
    """Forked from a rank, they would step and save in its name."""
    one = ranks(LOADER)
    one.reaches(0, "loaded")
    said = one.shows(0, beats_again(one.shows(0, lambda said: said.beat_ns)))
    assert (said.step, said.phase) == (1, Phase.UNKNOWN)
    one.go(0)
    one.end()


@pytest.mark.parametrize("world", [1, 2])
def test_an_attached_run_ends_with_the_bits_of_one_that_is_not(tmp_path, world):
    """Whoever watches a training would change what it learns."""
    digests = []
    for attached in (False, True):
        folder = tmp_path / str(attached)
        folder.mkdir()
        digests.append(run_example(folder, world, attached=attached))
    assert digests[0] == digests[1]


def run_example(folder, world, *, attached):
    small = ("--batch-size", "2", "--block-size", "16", "--width", "32", "--layers", "2")
    options = ("--steps", "6", "--checkpoint-every", "3", "--data-megabytes", "0.3")
    started = []
    for rank in range(world):
        page = folder / f"page-{rank}"
        create_page(page, 7)
        place = {
            SOCKET_ENV: str(folder / "nobody"),
            PROGRESS_PAGE_ENV: str(page),
            PROGRESS_TOKEN_ENV: "7",
        }
        ranks = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        launch = f"""
import os, runpy, sys, torch.distributed as dist
rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
join = dist.init_process_group
dist.init_process_group = lambda backend, **_: join(
    backend, init_method="file://" + store, rank=rank, world_size=world)
os.environ["RANK"] = str(rank)
sys.argv = ["train.py", *sys.argv[4:]]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
        own_data = ("--data-dir", f"data-{rank}")
        store = str(folder / "store")
        arguments = (str(rank), str(world), store, *small, *options, *own_data)
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", launch, *arguments],
                cwd=folder,
                env=os.environ
                | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                | (ranks | place if attached else ranks),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [process.communicate(timeout=DEADLINE_S) for process in started]
    assert [process.returncode for process in started] == [0] * world, ended
    if attached:
        said = PageReader.open(folder / "page-0", 7).read()
        assert said.step == 6
    return re.search(r"^final weights sha256 (\w{64})$", ended[0][0], re.MULTILINE).group(1)
