"""Train a byte-level transformer on Python's own source code with torch DDP, on CPU with gloo.

Runs alone (``python train.py``), under ``torchrun`` and under ``outrider run`` without a change.
Outrider is the line after the imports, one call where a checkpoint is saved and one where it is
loaded.  A run that was killed and resumed ends with the same weights, bit for bit, as one that
was not: see README.md for what that takes.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worker_shim

worker_shim.attach()

DOCUMENT_BYTES = 1024
CHECKPOINTS_KEPT = 10


# --- model ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal self-attention and an MLP, both behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class ByteTransformer(nn.Module):
    """Predicts the next byte; about a million parameters at the default size."""

    def __init__(self, block_size: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, time) bytes to (batch, time, 256) logits."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.bytes.weight)


# --- data -----------------------------------------------------------------------------------


class Corpus:
    """The node's copy of the text, cut into documents, and a loss weight for each document.

    Both files are memory-mapped, so a step reads what is on disk at that moment.
    """

    def __init__(self, folder: Path) -> None:
        documents = (folder / "weights.f32").stat().st_size // 4
        size = documents * DOCUMENT_BYTES
        self.documents = documents
        self.tokens = torch.from_file(
            str(folder / "tokens.bin"), shared=True, size=size, dtype=torch.uint8
        )
        self.weights = torch.from_file(
            str(folder / "weights.f32"), shared=True, size=documents, dtype=torch.float32
        )

    def batch(
        self, args: argparse.Namespace, step: int, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs, targets and loss weights of one step of one rank, and of no other."""
        draw = torch.Generator().manual_seed((args.seed << 40) + (step << 16) + rank)
        chosen = torch.randint(self.documents, (args.batch_size,), generator=draw)
        starts = chosen * DOCUMENT_BYTES + torch.randint(
            DOCUMENT_BYTES - args.block_size, (args.batch_size,), generator=draw
        )
        window = starts[:, None] + torch.arange(args.block_size + 1)
        text = self.tokens[window].long()
        return text[:, :-1], text[:, 1:], self.weights[chosen]


def prepare_data(folder: Path, megabytes: float) -> None:
    """Build the node's data folder if it is missing or does not match its manifest."""
    manifest_path = folder / "manifest.json"
    names = ("tokens.bin", "weights.f32")
    try:
        manifest = json.loads(manifest_path.read_text())
        if all(manifest[name] == sha256_of(folder / name) for name in names):
            return
        say(f"data in {folder} does not match its manifest, building it again")
    except (OSError, ValueError, KeyError):
        pass
    folder.mkdir(parents=True, exist_ok=True)
    text = standard_library_text(int(megabytes * (1 << 20)))
    weights = torch.ones(len(text) // DOCUMENT_BYTES, dtype=torch.float32)
    write_atomically(folder / "tokens.bin", lambda file: file.write(text))
    write_atomically(folder / "weights.f32", lambda file: file.write(weights.numpy().tobytes()))
    manifest = {name: sha256_of(folder / name) for name in names}
    write_atomically(manifest_path, lambda file: file.write(json.dumps(manifest).encode()))


def standard_library_text(limit: int) -> bytes:
    """Return whole documents of Python source that every machine with this Python has."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < DOCUMENT_BYTES:
        fail(f"found no source text in {root}")
    return bytes(text[: min(limit, len(text)) // DOCUMENT_BYTES * DOCUMENT_BYTES])


def sha256_of(path: Path) -> str:
    """Return the digest of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- checkpoints ----------------------------------------------------------------------------


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the highest step, if there is any."""
    return max(folder.glob("checkpoint-*.pt"), default=None, key=lambda path: path.stem)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write a checkpoint that is there whole or not at all, and tell Outrider of it."""
    path = folder / f"checkpoint-{step:08d}.pt"
    if dist.get_rank() == 0:
        write_atomically(path, lambda file: torch.save(state, file))
        for old in sorted(folder.glob("checkpoint-*.pt"))[:-CHECKPOINTS_KEPT]:
            old.unlink(missing_ok=True)
    dist.barrier()
    worker_shim.checkpoint_saved(step, path)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under another name, make it durable, then give it its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what Outrider chose, or else the newest; return the number of completed steps."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(".checkpoint-*"):
            unfinished.unlink(missing_ok=True)
        path = worker_shim.latest_checkpoint(default=newest_checkpoint(folder))
        if path is None:
            return 0
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        fail(f"cannot read checkpoint folder {folder}: {error}")
    except Exception:  # noqa: BLE001 - half a pickle can raise almost anything
        fail(f"cannot resume: {path} is not a whole checkpoint; remove it")
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = int(state["step"])
    except (RuntimeError, ValueError, KeyError, TypeError):
        fail(f"cannot resume: {path} is of another model; use another --checkpoint-dir")
    say(f"resumed from {path} at step {done}")
    return done


# --- the run --------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train from wherever the last run got to until ``--steps``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        prepare_data(args.data_dir, args.data_megabytes)
        corpus = Corpus(args.data_dir)
    except OSError as error:
        fail(f"cannot use data folder {args.data_dir}: {error}")
    torch.manual_seed(args.seed)
    model = ByteTransformer(args.block_size, args.width, args.heads, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    done = load_checkpoint(args.checkpoint_dir, model, optimizer)
    parallel = DistributedDataParallel(model)
    agreed = torch.tensor([done, -done])
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    if agreed.sum() != 0:
        fail(f"rank {rank} resumes at step {done}, another rank elsewhere; share --checkpoint-dir")
    # DDP rebuilds its gradient buckets after the first backward pass, and other buckets sum in
    # another order.  One pass that trains nothing gives every real step of every run the same.
    loss_of(parallel, corpus.batch(args, 0, rank)).backward()
    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        say(f"{count / 1e6:.2f} M parameters, {world} ranks, step {done}")
    for step in range(done + 1, args.steps + 1):
        started = time.perf_counter()
        loss = loss_of(parallel, corpus.batch(args, step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took_ms = (time.perf_counter() - started) * 1000
        say(f"iter {step}: loss {loss.item():.4f}, time {took_ms:.2f}ms")
        if step % args.checkpoint_every == 0 or step == args.steps:
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            save_checkpoint(args.checkpoint_dir, step, state)
    if rank == 0:
        finish(model, args.out)


def loss_of(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the mean loss of a batch, each sequence weighted as its document is."""
    tokens, targets, weights = batch
    logits = model(tokens)
    per_byte = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (per_byte.view_as(targets).mean(1) * weights).mean()


def finish(model: nn.Module, out: Path | None) -> None:
    """Write the final weights and say what they are."""
    weights = model.state_dict()
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, lambda file: torch.save(weights, file))
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].numpy().tobytes())
    say(f"final weights sha256 {digest.hexdigest()}")


def join_group() -> None:
    """Join the process group that the environment describes, or a group of one."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def say(line: str) -> None:
    """Print a line in one write, so that ranks that share a terminal do not mix theirs."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fail(reason: str) -> NoReturn:
    """End with one clear line."""
    sys.stderr.write(f"train.py: {reason}\n")
    raise SystemExit(2)


def folder(text: str) -> Path:
    """Return a path in which variables such as $GROUP_RANK are replaced."""
    return Path(os.path.expandvars(text)).expanduser()


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=100, help="optimizer steps of the whole run")
    add("--batch-size", type=int, default=4, help="sequences per rank and step")
    add("--block-size", type=int, default=64, help="bytes per sequence")
    add("--width", type=int, default=128, help="width of the model")
    add("--heads", type=int, default=4, help="attention heads")
    add("--layers", type=int, default=5, help="transformer blocks")
    add("--lr", type=float, default=1e-3, help="learning rate")
    add("--seed", type=int, default=1, help="seed of weights and batches")
    add("--checkpoint-dir", type=folder, default="checkpoints", help="shared by all ranks")
    add("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    add("--data-dir", type=folder, default="data", help="this node's data, built if missing")
    add("--data-megabytes", type=float, default=4.0, help="text to take when building it")
    add(
        "--restart-in-process",
        action="store_true",
        help="after a fault elsewhere train on in this process (under outrider only)",
    )
    add("--out", type=folder, default=None, help="file for the final weights")
    args = parser.parse_args()
    if not 0 < args.block_size < DOCUMENT_BYTES:
        parser.error(f"--block-size is between 1 and {DOCUMENT_BYTES - 1}")
    for name in ("steps", "batch_size", "checkpoint_every", "heads", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    if args.width % args.heads:
        parser.error("--width is a multiple of --heads")
    return args


def main() -> None:
    """Set up what makes runs repeatable, train, and leave the group."""
    args = parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    run = worker_shim.restartable(once) if args.restart_in_process else once
    run(args)


def once(args: argparse.Namespace) -> None:
    """Do what each attempt begins and ends with, in whichever process."""
    join_group()
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
