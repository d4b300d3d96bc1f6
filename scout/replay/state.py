"""Comparing what peers own: every parameter and every optimizer moment, some bytes at a time.

The tensors are cut into pieces of a bounded size; each check signs the next pieces, so that all
are covered in a known number of checks.  A sweep signs all of them at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from scout.replay.optimizer import is_partitioned
from scout.signature import local_part, row_sums, sign_tensors

PIECE_BYTES_MAX: Final = 16 << 20
"""A larger tensor is compared in several pieces."""
PARAMETERS: Final = "state.parameters"
MOMENTS: Final = "state.moments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements ``start`` to ``stop`` of a flattened tensor of ``surface``."""

    surface: str
    name: str
    tensor: Any
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """How much of memory it is."""
        return int((self.stop - self.start) * self.tensor.element_size())

    def values(self) -> Any:
        """Return the elements."""
        return self.tensor.reshape(-1)[self.start : self.stop]


class StateWalk:
    """Goes through a model's and its optimizers' state, piece by piece."""

    def __init__(self, model: Any, optimizers: Sequence[Any], bytes_per_check: int) -> None:
        self._model = model
        self._optimizers = [it for it in optimizers if not is_partitioned(it)]
        self._budget = bytes_per_check
        self._cursor = 0

    def pieces(self) -> list[Piece]:
        """Return everything there is now, in an order that is the same on all peers."""
        names = {id(it): name for name, it in self._model.named_parameters()}
        cut: list[Piece] = []
        for name, parameter in self._model.named_parameters():
            cut += _cut(PARAMETERS, name, local_part(parameter))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    name = names.get(id(parameter), "a parameter outside the model")
                    for key in sorted(key for key in state if torch.is_tensor(state[key])):
                        cut += _cut(MOMENTS, f"{name}.{key}", local_part(state[key]))
        return cut

    def total_bytes(self) -> int:
        """Return the size of everything there is now."""
        return sum(piece.size_bytes for piece in self.pieces())

    def turn(self) -> list[Piece]:
        """Return the next pieces within the budget, at least one, and move on."""
        pieces = self.pieces()
        chosen: list[Piece] = []
        left = self._budget
        while pieces and len(chosen) < len(pieces):
            piece = pieces[self._cursor % len(pieces)]
            if chosen and piece.size_bytes > left:
                break
            chosen.append(piece)
            left -= piece.size_bytes
            self._cursor = (self._cursor + 1) % len(pieces)
        return chosen


def contract(pieces: Sequence[Piece]) -> str:
    """Return what must be equal on all peers for the pieces to be comparable."""
    return "|".join(
        f"{it.surface} {it.name} {it.tensor.dtype} {it.start}-{it.stop}" for it in pieces
    )


def digests(pieces: Sequence[Piece]) -> Any:
    """Return the pieces' signatures as int64 of shape (n, 2)."""
    return sign_tensors([piece.values() for piece in pieces])


def rows(piece: Piece) -> Any:
    """Return the sums of the piece's rows, to find where peers differ."""
    return row_sums(piece.values())


def _cut(surface: str, name: str, tensor: Any) -> Iterator[Piece]:
    per_piece = max(1, PIECE_BYTES_MAX // tensor.element_size())
    for start in range(0, tensor.numel(), per_piece):
        stop = min(start + per_piece, tensor.numel())
        yield Piece(surface=surface, name=name, tensor=tensor, start=start, stop=stop)
