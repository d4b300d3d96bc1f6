"""How peers tell each other small words: one gather of integers, and texts where they are needed.

Whatever the number of surfaces, a check costs one gather of their digests.  Texts are JSON,
nothing is pickled.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def gather(words: Sequence[int], group: Any) -> list[list[int]]:
    """Return everybody's ``words`` (signed 64 bits, equally many everywhere), in group order."""
    mine = torch.tensor(list(words), dtype=torch.int64)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    return [[int(word) for word in one.tolist()] for one in theirs]


def gather_texts(value: Any, group: Any) -> list[Any]:
    """Return everybody's JSON value, in group order."""
    data = json.dumps(value).encode()
    sizes = [one[0] for one in gather([len(data)], group)]
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    theirs = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(theirs, mine, group=group)
    return [json.loads(bytes(one[:size].tolist())) for one, size in zip(theirs, sizes, strict=True)]


def gather_rows(rows: Any, group: Any) -> list[Any]:
    """Return everybody's int64 tensor of one and the same shape, in group order, on the CPU."""
    mine = rows.cpu().contiguous()
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    return theirs


def maximum(words: Sequence[int], group: Any) -> list[int]:
    """Return the largest of everybody's words, position by position."""
    agreed = torch.tensor(list(words), dtype=torch.int64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    return [int(word) for word in agreed.tolist()]


def broadcast(tensors: Sequence[Any], source: int, group: Any, *, is_source: bool) -> list[Any]:
    """Return ``source``'s tensors (a global rank) on every peer; ours say shape, dtype and device.

    The tensors that come back are nobody else's, the source's too.
    """
    received = []
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        whole = whole.clone() if is_source else torch.empty_like(whole)
        if whole.numel():
            dist.broadcast(whole.reshape(-1).view(torch.uint8), source, group=group)
        received.append(whole)
    return received


def bits_of(value: float) -> int:
    """Return a float's bits as a word that travels with the others."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def float_of(word: int) -> float:
    """Return the float that `bits_of` packed."""
    return float(struct.unpack("<d", struct.pack("<q", word))[0])
