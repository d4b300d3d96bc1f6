"""An exact 128-bit digest of tensors: equal bit for bit, or the digests differ.

A tensor is read once, as 64-bit words in rows of `ROW_WORDS`.  Of each row two sums modulo 2^64
are kept: of the words, and of their upper halves, each multiplied by an odd weight of its
position.  The rows' sums are mixed with the row's number by a bijection and added up, then mixed
with a digest of dtype and shape.  What follows from that:

* every change of one word, every flip of two bits and every swap of two elements inside a row
  changes that row's sums: proved, because no two weights are equal or opposite modulo 2^33;
* a change of one row always changes the digest: every step from there on is a bijection;
* changes of several rows, or three and more inside one, escape with the odds of a 128-bit hash
  of fixed weights.  It is no defence against somebody who looks for collisions.

NaN payloads and signs of zero are bits like any others.  Integers only, so the result is the same
on every device, with any number of threads, in any order of summation; nothing waits for the
device until `sign` brings the result to the host.

Source: multilinear hashing as in Lemire and Kaser, "Strongly universal string hashing is fast"
(2014); the mixing function is that of SplitMix64.
"""

import functools
import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

ROW_WORDS: Final = 1024
"""Words of a row: 8 KiB, the grain in which `differing_bytes` says where tensors differ."""
CHUNK_ROWS_CPU: Final = 64
"""Rows at a time: 512 KiB and their scratch stay in a core's cache."""
CHUNK_ROWS_DEVICE: Final = 8192
"""64 MiB at a time on an accelerator: few launches, little scratch."""
DEPTH_MAX: Final = 32
"""Nesting of a structure; deeper ones are cycles."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK64: Final = (1 << 64) - 1


def sign(value: object) -> int:
    """Return the signature, 0 to 2^128, of a tensor or a nested structure of tensors.

    Mappings (by key), lists, tuples, sets, numbers, text, bytes, None, dtypes, devices and
    `torch.Size` are understood.  Raises `TypeError` for anything else.  Waits for the device.
    """
    tensors: list[Any] = []
    text = _skeleton(value, tensors, 0)
    whole = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16)
    for one in sign_tensors(tensors).tolist() if tensors else ():
        whole.update(struct.pack("<qq", *one))
    return int.from_bytes(whole.digest(), "little")


def sign_tensors(tensors: Sequence[Any]) -> Any:
    """Return the signatures of ``tensors`` as int64 of shape (n, 2), on their device.

    A DTensor is signed by its local shard.  Raises `TypeError` for a tensor that is not dense.
    """
    with torch.no_grad():
        locals_ = [local_part(tensor) for tensor in tensors]
        if not locals_:
            return torch.empty((0, 2), dtype=torch.int64)
        device = locals_[0].device
        sums = [row_sums(tensor) for tensor in locals_]
        counts = [len(one) for one in sums]
        segments, numbers = _places(tuple(counts), device)
        mixed = _mix_rows(torch.cat([one.to(device) for one in sums]), numbers)
        total = torch.zeros((len(locals_), 2), dtype=torch.int64, device=device)
        total.index_add_(0, segments, mixed)
        kinds = torch.tensor([_kind(tensor) for tensor in locals_], dtype=torch.int64)
        return _mix_pairs(total + kinds.to(device, non_blocking=True))


def row_sums(tensor: Any) -> Any:
    """Return int64 of shape (rows, 2): the two weighted sums of each row of ``tensor``."""
    with torch.no_grad():
        words, tail = _words(local_part(tensor))
        rows, rest = divmod(len(words), ROW_WORDS)
        parts = [_full_rows(words[: rows * ROW_WORDS].view(rows, ROW_WORDS))] if rows else []
        if rest or tail is not None:
            last = words[rows * ROW_WORDS :]
            parts.append(_full_rows((last if tail is None else torch.cat([last, tail]))[None]))
        if not parts:
            return torch.empty((0, 2), dtype=torch.int64, device=words.device)
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def differing_bytes(mine: Any, theirs: Any) -> tuple[tuple[int, int], ...]:
    """Return the byte ranges ``(start, stop)`` in which two results of `row_sums` differ.

    A range is rounded out to whole rows; neighbours are joined.  Raises `ValueError` when the two
    are of different sizes.
    """
    if mine.shape != theirs.shape:
        raise ValueError(f"{mine.shape[0]} rows cannot be compared with {theirs.shape[0]}")
    found = (mine.cpu() != theirs.cpu()).any(1).nonzero().flatten().tolist()
    ranges: list[tuple[int, int]] = []
    for row in found:
        start, stop = 8 * ROW_WORDS * row, 8 * ROW_WORDS * (row + 1)
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return tuple(ranges)


def local_part(tensor: Any) -> Any:
    """Return the dense tensor that this process holds of ``tensor``, outside any graph."""
    to_local = getattr(tensor, "to_local", None)
    local = tensor.detach() if to_local is None else to_local().detach()
    wait = getattr(local, "wait", None)  # an asynchronous collective's result
    local = local if wait is None else wait()
    if local.layout is not torch.strided or local.is_quantized:
        raise TypeError(f"a {local.layout} tensor has no signature; sign its parts")
    return local


def _words(tensor: Any) -> tuple[Any, Any]:
    """Return the tensor's bytes as int64, and the last word apart if it must be filled up."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 8 and flat.numel() * size >= 8:  # noqa: PLR2004 - a word
        flat = flat.clone()
    if size > 8:  # noqa: PLR2004 - complex128 is two words
        return flat.view(torch.int64), None
    per_word = 8 // size
    whole = flat.numel() // per_word
    rest = flat[whole * per_word :]
    words = (
        flat[: whole * per_word].view(torch.int64)
        if whole
        else torch.empty(0, dtype=torch.int64, device=flat.device)
    )
    if not rest.numel():
        return words, None
    tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    tail[: rest.numel() * size] = rest.clone().view(torch.uint8)
    return words, tail.view(torch.int64)


def _full_rows(rows: Any) -> Any:
    """Return the sums of ``rows`` (int64, at most `ROW_WORDS` wide) as (rows, 2)."""
    count, width = rows.shape
    on_cpu = rows.device.type == "cpu"
    step = CHUNK_ROWS_CPU if on_cpu else CHUNK_ROWS_DEVICE
    low, high = (weight[:width] for weight in _weights(rows.device))
    sums = torch.empty((2, count), dtype=torch.int64, device=rows.device)
    scratch = torch.empty((min(step, count), width), dtype=torch.int64, device=rows.device)
    for at in range(0, count, step):
        part = rows[at : at + step]
        upper = scratch[: len(part)]
        if on_cpu:
            torch.mv(part, low, out=sums[0, at : at + step])
            torch.bitwise_right_shift(part, 32, out=upper)
            torch.mv(upper, high, out=sums[1, at : at + step])
        else:  # accelerators multiply no integer matrices; the sums are the same
            torch.mul(part, low, out=upper)
            torch.sum(upper, 1, out=sums[0, at : at + step])
            torch.bitwise_right_shift(part, 32, out=upper)
            torch.sum(upper.mul_(high), 1, out=sums[1, at : at + step])
    return sums.t()


@functools.cache
def _weights(device: Any) -> tuple[Any, Any]:
    """Return the weights of the words and of their upper halves."""
    chosen: list[list[int]] = []
    counter = 0
    for _ in range(2):
        seen: set[int] = set()
        lane: list[int] = []
        while len(lane) < ROW_WORDS:
            counter += 1
            weight = _splitmix(counter * _GOLDEN) | 1
            short = weight % (1 << 33)
            if short not in seen and (1 << 33) - short not in seen:
                seen.add(short)
                lane.append(_signed(weight))
        chosen.append(lane)
    both = torch.tensor(chosen, dtype=torch.int64).to(device)
    return both[0], both[1]


@functools.lru_cache(maxsize=64)
def _places(counts: tuple[int, ...], device: Any) -> tuple[Any, Any]:
    """Return for every row the number of its tensor and its own number within it, from 1."""
    lengths = torch.tensor(counts, dtype=torch.int64)
    segments = torch.repeat_interleave(torch.arange(len(counts)), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    numbers = torch.arange(sum(counts)) - first[segments] + 1
    return segments.to(device), numbers.to(device)


def _mix_rows(sums: Any, numbers: Any) -> Any:
    """Return ``sums`` (rows, 2), each row changed by a bijection that depends on its number."""
    return _mix_pairs(sums + (numbers * _signed(_GOLDEN))[:, None])


def _mix_pairs(pairs: Any) -> Any:
    """Return a bijection of (n, 2) in which each half of the result knows of both."""
    first = _mix(pairs[:, 0].clone())
    second = _mix(pairs[:, 1] ^ first)
    return torch.stack([first + second, second], 1)


def _mix(words: Any) -> Any:
    """SplitMix64's finalizer, in place; torch's shift keeps the sign, which is masked away."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        words *= _signed(multiplier)
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words


def _splitmix(state: int) -> int:
    word = state & _MASK64
    word = (word ^ (word >> 30)) * _MULTIPLIERS[0] & _MASK64
    word = (word ^ (word >> 27)) * _MULTIPLIERS[1] & _MASK64
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _kind(tensor: Any) -> tuple[int, int]:
    return _digest_pair(f"{tensor.dtype}|{tuple(tensor.shape)}")


@functools.lru_cache(maxsize=4096)
def _digest_pair(text: str) -> tuple[int, int]:
    first, second = struct.unpack("<qq", hashlib.blake2b(text.encode(), digest_size=16).digest())
    return first, second


def _skeleton(value: object, tensors: list[Any], depth: int) -> str:
    """Return what a structure is apart from its tensors, which are collected in order."""
    if depth > DEPTH_MAX:
        raise TypeError(f"a structure nested over {DEPTH_MAX} deep has no signature")
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "T"
    kind = type(value).__name__
    if isinstance(value, float):  # NaN payloads and the sign of zero count here too
        return f"float:{struct.pack('>d', value).hex()}"
    if isinstance(value, str | bytes | bool | int | complex) or value is None:
        return f"{kind}:{value!r}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return f"{kind}:{value}"
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: repr(item[0]))
        inner = [(repr(key), _skeleton(item, tensors, depth + 1)) for key, item in items]
    elif isinstance(value, list | tuple):
        inner = [("", _skeleton(item, tensors, depth + 1)) for item in value]
    elif isinstance(value, set | frozenset):
        unordered: list[Any] = []
        parts = sorted(_skeleton(item, unordered, depth + 1) for item in value)
        if unordered:
            raise TypeError("tensors in a set have no order, so the set has no signature")
        inner = [("", part) for part in parts]
    else:
        raise TypeError(f"a {kind} has no signature")
    return f"{kind}({','.join(f'{len(key)}:{key}{len(part)}:{part}' for key, part in inner)})"
