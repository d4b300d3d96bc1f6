"""The example training script as its users start it, without Outrider beside it."""

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.component

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pytorch_ddp" / "train.py"
DEADLINE_S = 150
SMALL = ("--batch-size", "2", "--block-size", "16", "--width", "32", "--layers", "2")
NOT_ATTACHED = re.compile(r"outrider: not attached, .*\n")


def run(folder, *arguments, ranks=1, script=SCRIPT):
    """Run the script, alone or under torchrun, and return what became of it."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    many = ("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *rendezvous)
    return subprocess.run(
        [sys.executable, *(many if ranks > 1 else ()), str(script), *SMALL, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def digest(done):
    """Return the final weights' digest that a run printed."""
    assert done.returncode == 0, done.stderr
    return re.search(r"^final weights sha256 (\w{64})$", done.stdout, re.MULTILINE).group(1)


def identical(left, right):
    """Compare nested states bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(identical(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(identical, left, right))
    if torch.is_tensor(left):
        return left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
    return left == right


def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(tmp_path):
    """Nobody could tell a good recovery from one that lost or repeated a batch."""
    options = ("--checkpoint-every", "4", "--data-megabytes", "0.5")
    whole = run(tmp_path, "--steps", "12", "--checkpoint-dir", "whole", *options, ranks=2)
    part = run(tmp_path, "--steps", "7", "--checkpoint-dir", "part", *options, ranks=2)
    rest = run(tmp_path, "--steps", "12", "--checkpoint-dir", "part", *options, ranks=2)
    assert digest(part) != digest(whole)
    assert rest.stdout.count("resumed from part/checkpoint-00000007.pt at step 7\n") == 2
    assert digest(rest) == digest(whole)
    last = [
        torch.load(tmp_path / name / "checkpoint-00000012.pt", weights_only=True)
        for name in ("whole", "part")
    ]
    assert identical(*last)


def test_each_step_is_one_line_and_nothing_else_is_said(tmp_path):
    """Log rules would have to be written for this script alone."""
    done = run(tmp_path, "--steps", "3", "--out", "weights/final.pt")
    digest(done)
    steps = re.findall(
        r"^iter (\d+): loss \d+\.\d{4}, time \d+\.\d\dms$", done.stdout, re.MULTILINE
    )
    assert steps == ["1", "2", "3"]
    assert NOT_ATTACHED.fullmatch(done.stderr)
    assert (tmp_path / "weights" / "final.pt").is_file()


def test_bad_weights_in_the_data_make_the_loss_bad_and_the_next_start_heals_them(tmp_path):
    """A fault in a node's data could not be rehearsed, or would never go away."""
    first = run(tmp_path, "--steps", "2", "--data-megabytes", "0.5", "--checkpoint-dir", "a")
    weights = tmp_path / "data" / "weights.f32"
    good = weights.read_bytes()
    bad = struct.pack("=f", float("nan")) * (len(good) // 4)
    weights.write_bytes(bad)
    # A manifest that fits the bad file is how it looks when the file goes bad after the start.
    manifest = tmp_path / "data" / "manifest.json"
    told = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(told | {"weights.f32": sha256(bad)}))
    broken = run(tmp_path, "--steps", "2", "--data-megabytes", "0.5", "--checkpoint-dir", "b")
    assert "iter 1: loss nan, " in broken.stdout
    assert "iter 2: loss nan, " in broken.stdout
    manifest.write_text(json.dumps(told))
    healed = run(tmp_path, "--steps", "2", "--data-megabytes", "0.5", "--checkpoint-dir", "c")
    assert "data does not match its manifest, building it again" in healed.stdout
    assert weights.read_bytes() == good
    assert digest(healed) == digest(first)


def test_only_the_newest_ten_checkpoints_are_kept_and_all_are_whole(tmp_path):
    """A long run would fill the disk, and a crash would leave half a file to resume from."""
    assert run(tmp_path, "--steps", "13", "--checkpoint-every", "1").returncode == 0
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in kept] == [f"checkpoint-{it:08d}.pt" for it in range(4, 14)]
    assert [torch.load(path, weights_only=True)["step"] for path in kept] == list(range(4, 14))


@pytest.mark.parametrize(
    ("prepare", "line"),
    [
        (lambda at: at.write_text("x"), r"cannot read checkpoint folder c: .*File exists: 'c'"),
        (
            lambda at: (at.mkdir(), (at / "checkpoint-00000003.pt").write_text("half")),
            r"cannot resume: c/checkpoint-00000003.pt is not a whole checkpoint; remove it",
        ),
    ],
)
def test_a_checkpoint_folder_that_cannot_be_used_is_one_clear_line(tmp_path, prepare, line):
    """The reader of the log would have to know torch's internals to fix a path."""
    prepare(tmp_path / "c")
    done = run(tmp_path, "--steps", "1", "--checkpoint-dir", "c")
    assert done.returncode == 2
    assert re.fullmatch(f"train.py: {line}\n", NOT_ATTACHED.sub("", done.stderr))


def sha256(data):
    return hashlib.sha256(data).hexdigest()
