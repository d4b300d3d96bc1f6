"""How fast and how sharp the tensor digest is, beside what torch offers.

Speed: one CPU thread, 256 MiB of fp32; the digest, ``torch.clone``, ``torch.hash_tensor`` and a
plain sum in turn, medians.  ``clone`` also pays for fresh memory, as it does in training;
``copy_`` into memory that is there already is shown beside it.

Sharpness: random bits, pairs of bits and pairs of elements are changed in tensors of three
dtypes and three sizes.  Half of the pairs lie within one kilobyte, and most flips are of the
sign or the exponent, where weaker sums go blind.

Prints two tables, and last one line of JSON.

    make bench-signature [TRIALS=6000]
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from scout import signature

SIZE_BYTES = 256 << 20
ROUNDS = 9
SIZES = (4_096, 65_536, 1_048_576)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
NEAR_ELEMENTS = 256

Digest = Callable[[Any], object]


def hash_tensor(tensor: Any) -> int:
    """Return torch's own digest of the bits, without a detour over other dtypes."""
    return int(torch.hash_tensor(tensor.view(torch.uint8).view(torch.int64)).view(torch.int64))


DIGESTS: dict[str, Digest] = {"scout.signature": signature.sign, "torch.hash_tensor": hash_tensor}


def speeds() -> dict[str, float]:
    """Return the median GiB/s of everyone, taken in turn."""
    tensor = torch.randn(SIZE_BYTES // 4)
    copy = torch.empty_like(tensor)
    entrants: dict[str, Callable[[], object]] = {
        "scout.signature": lambda: signature.sign(tensor),
        "torch.clone": tensor.clone,
        "torch.copy_": lambda: copy.copy_(tensor),
        "torch.hash_tensor": lambda: hash_tensor(tensor),
        "int64 sum": lambda: int(tensor.view(torch.int64).sum()),
    }
    took: dict[str, list[float]] = {name: [] for name in entrants}
    for number in range(ROUNDS + 1):
        for name, run in entrants.items():
            started = time.perf_counter()
            run()
            if number:  # the first round warms up
                took[name].append(time.perf_counter() - started)
    size_gib = SIZE_BYTES / (1 << 30)
    return {name: size_gib / statistics.median(values) for name, values in took.items()}


def bit_patterns(tensor: Any) -> Any:
    """Return a view of the tensor as integers of its own width."""
    widths = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


def corrupt(kind: str, tensor: Any, draw: random.Random) -> bool:
    """Change ``tensor`` as ``kind`` says; return False when nothing changed."""
    bits = bit_patterns(tensor)
    first = draw.randrange(tensor.numel())
    second = draw.randrange(tensor.numel())
    if draw.random() < 0.5:  # noqa: PLR2004 - half of them are neighbours
        second = (first + draw.randrange(1, NEAR_ELEMENTS)) % tensor.numel()
    if kind == "swap":
        one, other = int(bits[first]), int(bits[second])
        bits[first], bits[second] = other, one
        return one != other
    top = 8 * tensor.element_size() - 1
    bit = draw.choice((top, top - 1, top - 2, draw.randrange(top + 1)))
    mask = -(1 << top) if bit == top else 1 << bit
    bits[first] ^= mask
    if kind == "double":
        bits[second] ^= mask
        return first != second
    return True


def misses(trials: int) -> dict[str, dict[str, int]]:
    """Return for each digest how many changes of each kind it did not see."""
    draw = random.Random(1)  # noqa: S311 - a benchmark is to be repeatable
    tensors = [torch.randn(size).to(dtype) for size in SIZES for dtype in DTYPES]
    missed = {name: dict.fromkeys(("single", "double", "swap"), 0) for name in DIGESTS}
    clean = {name: [digest(it) for it in tensors] for name, digest in DIGESTS.items()}
    for kind in ("single", "double", "swap"):
        for trial in range(trials):
            chosen = trial % len(tensors)
            changed = tensors[chosen].clone()
            while not corrupt(kind, changed, draw):
                changed = tensors[chosen].clone()
            for name, digest in DIGESTS.items():
                missed[name][kind] += digest(changed) == clean[name][chosen]
    return missed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=6000, help="changes of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    speed = speeds()
    print(f"{'one thread, 256 MiB fp32':<26}{'GiB/s':>8}")
    for name, value in speed.items():
        print(f"{name:<26}{value:>8.2f}")
    missed = misses(args.trials)
    print(f"\n{f'missed of {args.trials}':<26}{'one flip':>10}{'two flips':>11}{'swap':>8}")
    for name, by_kind in missed.items():
        print(f"{name:<26}{by_kind['single']:>10}{by_kind['double']:>11}{by_kind['swap']:>8}")
    ours = missed["scout.signature"]
    results = {
        "gib_per_s": round(speed["scout.signature"], 3),
        "ratio_vs_clone": round(speed["scout.signature"] / speed["torch.clone"], 3),
        "missed_single_flips": ours["single"],
        "missed_double_flips": ours["double"],
        "missed_swaps": ours["swap"],
        "trials": args.trials,
    }
    print(json.dumps({"benchmark": "signature", "results": results}))


if __name__ == "__main__":
    main()
