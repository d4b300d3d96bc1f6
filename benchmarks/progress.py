"""What publishing progress costs the training process, and whether a reader ever sees a torn page.

Three measurements in one process, on the example's own model:

- one publication, and one note for the next publication, in batches of a hundred;
- the step with and without `attach`, in turn: once at the example's size, and once
  with the same layers made narrow, because the hooks' price does not depend on the width and
  shows there above the noise of the machine;
- a reader in a process of its own that looks at a page without pause while it is written.

Prints a table, and last one line of JSON.

    make bench-progress [PAIRS=200]
"""

import argparse
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import worker_shim
from scout.hang import Phase
from scout.page_layout import GroupWords
from scout.progress import PageReader, PageWriter, create_page
from worker_shim.client import TICK_S
from worker_shim.instrument import Instruments
from worker_shim.messages import PROGRESS_PAGE_ENV, PROGRESS_TOKEN_ENV, SOCKET_ENV
from worker_shim.session import StepCounter

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pytorch_ddp" / "train.py"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where a sidecar makes its pages
TOKEN = 7
BATCH = 100
BATCHES = 500
TICKS = 500
SETTLING_PAIRS = 20
NARROW_PAIRS_PER_PAIR = 10
"""The narrow step is so much shorter that it can be taken more often."""
TORN_S = 5.0


def load_example() -> ModuleType:
    """Import the example script without running it."""
    spec = importlib.util.spec_from_file_location("example_train", EXAMPLE)
    assert spec is not None, "the example is there"
    assert spec.loader is not None, "a file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    worker_shim.detach()
    return module


@contextmanager
def fresh_page() -> Iterator[Path]:
    """Make a page where a sidecar would."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="bench-progress-", dir=base) as folder:
        page = Path(folder) / "page"
        create_page(page, TOKEN)
        yield page


# --- one publication ------------------------------------------------------------------------


def publication_ns() -> tuple[float, float, float]:
    """Return the median price of a publication, a note, and a tick's processor time, in ns."""
    with fresh_page() as page:
        instruments = Instruments(StepCounter(), PageWriter.open(page, TOKEN))
        instruments.install()
        track = instruments.track
        batches = []
        notes = []
        for _ in range(BATCHES):
            started = time.perf_counter_ns()
            for _ in range(BATCH):
                track.mark(Phase.FORWARD)
            notes.append((time.perf_counter_ns() - started) / BATCH)
            started = time.perf_counter_ns()
            for _ in range(BATCH):
                track.stepped()
            batches.append((time.perf_counter_ns() - started) / BATCH)
        ticks = []
        for _ in range(TICKS):
            started = time.thread_time_ns()
            instruments.tick(time.monotonic_ns())
            ticks.append(time.thread_time_ns() - started)
        instruments.remove()
    return statistics.median(batches), statistics.median(notes), statistics.median(ticks)


# --- the step -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A step without `attach`, what `attach` adds, and the standard error of that."""

    without_ns: float
    added_ns: float
    error_ns: float


def make_step(
    example: ModuleType, width: int, length: int, batch: int
) -> tuple[torch.nn.Module, Callable[[], object]]:
    """Return the example's model and one training step of it under DDP."""
    torch.manual_seed(0)
    model = example.ByteTransformer(length, width, heads=4, layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    parallel = DistributedDataParallel(model)
    text = torch.randint(0, 256, (batch, length + 1))
    inputs = (text[:, :-1], text[:, 1:], torch.ones(batch))

    def step() -> object:
        loss = example.loss_of(parallel, inputs)
        optimizer.zero_grad()
        loss.backward()
        return optimizer.step()

    return model, step


class Switch:
    """Takes what `attach` put around training steps off and on again between two of them."""

    def __init__(self, module: torch.nn.Module, bare: Callable[..., object]) -> None:
        self._bare = bare
        self._backward = torch.autograd.backward
        hooks = sys.modules["torch.optim.optimizer"]
        self._dicts: list[Any] = [
            hooks._global_optimizer_pre_hooks,  # noqa: SLF001 - there is no public switch
            hooks._global_optimizer_post_hooks,  # noqa: SLF001 - same
            *(it._forward_pre_hooks for it in module.modules()),  # noqa: SLF001 - same
        ]
        gradient = (getattr(it, "_post_accumulate_grad_hooks", None) for it in module.parameters())
        self._dicts += [it for it in gradient if it]
        self._hooks = [dict(it) for it in self._dicts]

    def set(self, *, attached: bool) -> None:
        """Make the next step one with, or one without."""
        torch.autograd.backward = self._backward if attached else self._bare
        for hooks, ours in zip(self._dicts, self._hooks, strict=True):
            if ours:
                hooks.clear()
                hooks.update(ours if attached else {})


def compare(example: ModuleType, pairs: int, width: int, length: int, batch: int) -> Compared:
    """Run ``pairs`` of steps of one model, one with `attach` and one without.

    The training thread's own processor time is compared: it leaves out what other processes of
    the machine take.  What the background thread takes is added by the caller.
    """
    bare = torch.autograd.backward
    worker_shim.attach()
    model, step = make_step(example, width, length, batch)
    switch = Switch(model, bare)
    took: dict[bool, list[int]] = {True: [], False: []}
    for pair in range(-SETTLING_PAIRS, pairs):
        for attached in (False, True) if pair % 2 else (True, False):
            switch.set(attached=attached)
            took[attached].append(timed(step))
    switch.set(attached=True)
    worker_shim.detach()
    measured = {arm: times[SETTLING_PAIRS:] for arm, times in took.items()}
    differences = sorted(map(int.__sub__, measured[True], measured[False]))
    # The median's standard error, from the quartiles: some steps are interrupted for long.
    quartiles = differences[3 * pairs // 4] - differences[pairs // 4]
    return Compared(
        without_ns=statistics.median(measured[False]),
        added_ns=statistics.median(differences),
        error_ns=0.93 * quartiles / pairs**0.5,
    )


def timed(step: Callable[[], object]) -> int:
    """Return the processor time of one step in ns."""
    started = time.thread_time_ns()
    step()
    return time.thread_time_ns() - started


# --- the reader -----------------------------------------------------------------------------

READER = """
import json, sys, time
from pathlib import Path
from scout.progress import PageReader
reader = PageReader.open(sys.argv[1], int(sys.argv[2]))
until = time.monotonic() + float(sys.argv[3])
reads = torn = unstable = last = 0
print("reading", flush=True)
while time.monotonic() < until:
    said = reader.read()
    if said is None or said.step is None:
        continue
    reads += 1
    if not said.stable:
        unstable += 1
        continue
    same = said.step == said.progress_ns == said.phase_limit_ns == said.fingerprint
    groups = {it.seq for it in said.groups} | {it.fingerprint for it in said.groups}
    torn += not same or said.step < last or len(groups) > 1
    last = said.step
print(json.dumps([reads, torn, unstable]))
"""


def torn_reads(seconds: float) -> tuple[int, int, int, int]:
    """Write without pause beside a reader; return publications, reads, torn and unstable ones."""
    with fresh_page() as page:
        writer = PageWriter.open(page, TOKEN)
        command = [sys.executable, "-c", READER, str(page), str(TOKEN), str(seconds)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLE.parents[2])
        assert child.stdout is not None, "a pipe was asked for"
        child.stdout.readline()
        number = 0
        while child.poll() is None:
            for _ in range(200):
                number += 1
                writer.publish(number, now_ns=number, fingerprint=number, phase_limit_ns=number)
            writer.beat(number, number, [words(group, number) for group in range(1, 9)])
        reads, torn, unstable = json.loads(child.stdout.read())
        assert PageReader.open(page, TOKEN).read() is not None, "the last words stay"
    return number, reads, torn, unstable


def words(group: int, number: int) -> GroupWords:
    """Return a group whose numbers are all the same."""
    return GroupWords(
        group=group,
        name=f"group-{group}",
        ranks=tuple(range(group)),
        seq=number,
        fingerprint=number,
        operation=2,
        inside=False,
    )


# --- all of it ------------------------------------------------------------------------------


def measure(pairs: int) -> dict[str, Any]:
    """Return every number of the table."""
    logging.disable(logging.WARNING)  # nobody listens at the socket, and attach would say so
    torch.set_num_threads(1)
    example = load_example()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    publish_ns, note_ns, tick_ns = publication_ns()
    with fresh_page() as page:
        os.environ[PROGRESS_PAGE_ENV] = str(page)
        os.environ[PROGRESS_TOKEN_ENV] = str(TOKEN)
        os.environ[SOCKET_ENV] = str(page.with_name("nobody"))
        narrow = compare(example, NARROW_PAIRS_PER_PAIR * pairs, width=8, length=8, batch=1)
        whole = compare(example, pairs, width=128, length=128, batch=4)
    dist.destroy_process_group()
    publications, reads, torn, unstable = torn_reads(TORN_S)
    background = tick_ns / (TICK_S * 1e9)
    return {
        "publish_ns_p50": round(publish_ns),
        "note_ns_p50": round(note_ns),
        "step_overhead_fraction": round(narrow.added_ns / whole.without_ns + background, 6),
        "step_added_us": round(narrow.added_ns / 1000, 2),
        "step_added_error_us": round(narrow.error_ns / 1000, 2),
        "step_ms": round(whole.without_ns / 1e6, 3),
        "background_fraction": round(background, 6),
        "step_overhead_direct_fraction": round(whole.added_ns / whole.without_ns, 6),
        "step_overhead_direct_error": round(whole.error_ns / whole.without_ns, 6),
        "torn_reads": torn,
        "reads": reads,
        "unstable_reads": unstable,
        "publications": publications,
    }


def main() -> None:
    """Measure, print the table, and last the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="steps with and without, each")
    found = measure(max(20, parser.parse_args().pairs))
    print("| what | measured |\n|---|---|")
    print(f"| one publication (a step, a collective), p50 | {found['publish_ns_p50']} ns |")
    print(f"| one note (a layer, a phase), p50 | {found['note_ns_p50']} ns |")
    print(f"| step of the example | {found['step_ms']} ms |")
    print(
        f"| added to a step by hooks | {found['step_added_us']} "
        f"± {found['step_added_error_us']} µs |"
    )
    print(f"| background thread | {found['background_fraction']:.4%} of a core |")
    print(f"| both, of a step | {found['step_overhead_fraction']:.4%} |")
    print(
        f"| the step with less the step without, of it | "
        f"{found['step_overhead_direct_fraction']:.2%} "
        f"± {found['step_overhead_direct_error']:.2%} |"
    )
    print(
        f"| torn reads | {found['torn_reads']} of {found['reads']:,} "
        f"({found['publications']:,} publications) |"
    )
    print(json.dumps({"benchmark": "progress", "results": found}))


if __name__ == "__main__":
    main()
