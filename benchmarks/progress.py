"""What publishing progress costs the training process, and whether a reader ever sees a torn page.

Three measurements in one process, on the example's own model:

- a completed step on the page, a publication (a collective, a declared phase) and a note for the
  background thread, in batches of a hundred;
- the step with and without `attach`, and once more without, in turn: at the example's own
  settings, and with the same layers made narrow, because the hooks' price does not depend on the
  width and shows there above the noise of the machine.  The step without against itself (A/A)
  says how much of a difference is noise;
- a reader in a process of its own that looks at a page without pause while it is written.

Prints a table, and last one line of JSON.

    make bench-progress [PAIRS=200]
"""

import argparse
import importlib.util
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from worker_shim.instrument import Instruments
from worker_shim.messages import PROGRESS_PAGE_ENV, PROGRESS_TOKEN_ENV, SOCKET_ENV
from worker_shim.session import StepCounter

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pytorch_ddp" / "train.py"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where a sidecar makes its pages
TOKEN = 7
BATCH = 100
BATCHES = 500
BACKGROUND_S = 10.0
SETTLING_ROUNDS = 20
NARROW_ROUNDS_PER_ROUND = 10
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Medians in ns, with warm caches: a step on the page, a publication, a note."""

    step_ns: float
    publication_ns: float
    note_ns: float


def prices() -> Prices:
    """Return what each event costs."""
    with fresh_page() as page:
        instruments = Instruments(StepCounter(), PageWriter.open(page, TOKEN))
        instruments.install()
        track = instruments.track
        track.stepped()
        half = BATCH // 2

        def publish() -> None:
            track.leave_collective(track.enter_collective(1, 2, 2, 3))

        found = Prices(
            step_ns=median_ns(track.stepped, BATCH),
            publication_ns=median_ns(publish, half) / 2,
            note_ns=median_ns(lambda: track.mark(Phase.UNKNOWN), BATCH),
        )
        instruments.remove()
    return found


def median_ns(event: Callable[[], object], batch: int) -> float:
    """Return the median price of ``event`` over `BATCHES` batches, in ns."""
    batches = []
    for _ in range(BATCHES):
        started = time.perf_counter_ns()
        for _ in range(batch):
            event()
        batches.append((time.perf_counter_ns() - started) / batch)
    return statistics.median(batches)


# --- the step -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A step without `attach`, what `attach` adds, and the standard error of that.

    ``noise_ns`` is what the step without adds to itself: zero, if the measure is right.
    ``background`` is what the background thread takes of a core while the training thread trains,
    its waits for the sidecar included; whether the step waits for it depends on the cores.
    """

    without_ns: float
    added_ns: float
    noise_ns: float
    error_ns: float
    background: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The example's settings that make its step what it is."""

    block_size: int
    width: int
    heads: int
    layers: int
    batch_size: int


def example_size(example: ModuleType) -> Size:
    """Return what the example trains when nothing is said on its command line."""
    ours, sys.argv = sys.argv, sys.argv[:1]  # our command line is not the example's
    args = example.parse_args()
    sys.argv = ours
    return Size(
        block_size=args.block_size,
        width=args.width,
        heads=args.heads,
        layers=args.layers,
        batch_size=args.batch_size,
    )


def make_step(example: ModuleType, size: Size) -> tuple[torch.nn.Module, Callable[[], object]]:
    """Return the example's model and one training step of it under DDP."""
    torch.manual_seed(0)
    length, batch = size.block_size, size.batch_size
    model = example.ByteTransformer(length, size.width, size.heads, size.layers)
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

    def __init__(self, module: torch.nn.Module) -> None:
        hooks = sys.modules["torch.optim.optimizer"]
        gradient = (getattr(it, "_post_accumulate_grad_hooks", None) for it in module.parameters())
        self._dicts: list[Any] = [
            hooks._global_optimizer_post_hooks,  # noqa: SLF001 - there is no public switch
            *(it for it in gradient if it),
        ]
        self._hooks = [dict(it) for it in self._dicts]
        assert all(self._hooks), "everything that attach puts there is there"

    def set(self, *, attached: bool) -> None:
        """Make the next step one with, or one without."""
        for hooks, ours in zip(self._dicts, self._hooks, strict=True):
            hooks.clear()
            hooks.update(ours if attached else {})


def compare(example: ModuleType, rounds: int, size: Size) -> Compared:
    """Run ``rounds`` of three steps of one model: with `attach`, without, and again without.

    Their order is drawn anew in each round.  The training thread's own processor time is compared:
    it leaves out what other processes take, and the background thread.
    """
    worker_shim.attach()
    model, step = make_step(example, size)
    switch = Switch(model)
    took: dict[str, list[int]] = {"with": [], "without": [], "again": []}
    order = list(took)
    draw = random.Random(0)  # noqa: S311 - an order, no secret
    for _ in range(SETTLING_ROUNDS + rounds):
        draw.shuffle(order)
        for arm in order:
            switch.set(attached=arm == "with")
            took[arm].append(timed(step))
    switch.set(attached=True)
    background = background_fraction(step)
    worker_shim.detach()
    measured = {arm: times[SETTLING_ROUNDS:] for arm, times in took.items()}
    differences = sorted(map(int.__sub__, measured["with"], measured["without"]))
    noise = map(int.__sub__, measured["again"], measured["without"])
    # The median's standard error, from the quartiles: some steps are interrupted for long.
    quartiles = differences[3 * rounds // 4] - differences[rounds // 4]
    return Compared(
        without_ns=statistics.median(measured["without"]),
        added_ns=statistics.median(differences),
        noise_ns=statistics.median(noise),
        error_ns=0.93 * quartiles / rounds**0.5,
        background=background,
    )


def background_fraction(step: Callable[[], object]) -> float:
    """Return the background thread's share of one core over some seconds of attached steps."""
    ours = next(it for it in threading.enumerate() if it.name == "outrider")
    assert ours.ident is not None, "it runs"
    clock = time.pthread_getcpuclockid(ours.ident)
    began, taken = time.perf_counter_ns(), time.clock_gettime_ns(clock)
    while time.perf_counter_ns() - began < BACKGROUND_S * 1e9:
        step()
    return (time.clock_gettime_ns(clock) - taken) / (time.perf_counter_ns() - began)


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


def measure(rounds: int) -> dict[str, Any]:
    """Return every number of the table."""
    logging.disable(logging.WARNING)  # nobody listens at the socket, and attach would say so
    torch.set_num_threads(1)  # as the example does
    example = load_example()
    size = example_size(example)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    narrow_size = replace(size, width=8, block_size=8, batch_size=1)
    price = prices()
    with fresh_page() as page:
        os.environ[PROGRESS_PAGE_ENV] = str(page)
        os.environ[PROGRESS_TOKEN_ENV] = str(TOKEN)
        os.environ[SOCKET_ENV] = str(page.with_name("nobody"))
        narrow = compare(example, NARROW_ROUNDS_PER_ROUND * rounds, narrow_size)
        whole = compare(example, rounds, size)
    dist.destroy_process_group()
    publications, reads, torn, unstable = torn_reads(TORN_S)
    background, step_ns = whole.background, whole.without_ns
    return {
        "publish_ns_p50": round(price.publication_ns),
        "step_ns_p50": round(price.step_ns),
        "note_ns_p50": round(price.note_ns),
        "step_overhead_fraction": round(narrow.added_ns / step_ns + background, 6),
        "step_overhead_error": round(narrow.error_ns / step_ns, 6),
        "step_added_us": round(narrow.added_ns / 1000, 2),
        "step_added_error_us": round(narrow.error_ns / 1000, 2),
        "step_noise_us": round(narrow.noise_ns / 1000, 2),
        "step_ms": round(step_ns / 1e6, 3),
        "background_fraction": round(background, 6),
        "step_overhead_direct_fraction": round(whole.added_ns / step_ns, 6),
        "step_overhead_direct_error": round(whole.error_ns / step_ns, 6),
        "step_noise_direct_fraction": round(whole.noise_ns / step_ns, 6),
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
    rows = (
        ("one publication (a collective, a declared phase), p50", f"{found['publish_ns_p50']} ns"),
        ("one completed step on the page, p50", f"{found['step_ns_p50']} ns"),
        ("one note (a wait for data), p50", f"{found['note_ns_p50']} ns"),
        ("step of the example", f"{found['step_ms']} ms"),
        (
            "added to a step by hooks",
            "{step_added_us} ± {step_added_error_us} µs".format_map(found),
        ),
        ("the same of a step without and another without", f"{found['step_noise_us']} µs"),
        ("background thread", f"{found['background_fraction']:.4%} of a core"),
        (
            "both, of a step",
            "{step_overhead_fraction:.3%} ± {step_overhead_error:.3%}".format_map(found),
        ),
        (
            "the whole step with less without, of it",
            "{step_overhead_direct_fraction:.2%} ± {step_overhead_direct_error:.2%}".format_map(
                found
            ),
        ),
        ("the whole step without less without", f"{found['step_noise_direct_fraction']:.2%}"),
        (
            "torn reads",
            f"{found['torn_reads']} of {found['reads']:,} ({found['publications']:,} publications)",
        ),
    )
    print("| what | measured |\n|---|---|")
    for what, measured in rows:
        print(f"| {what} | {measured} |")
    print(json.dumps({"benchmark": "progress", "results": found}))


if __name__ == "__main__":
    main()
