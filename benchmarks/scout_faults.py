"""A small language model, and faults for one of its ranks.

Faults are real: bits of live tensors, code that computes something else, time that passes.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

VOCABULARY: Final = 101

Orders = dict[str, Any]


class Block(nn.Module):  # type: ignore[misc]
    """A residual MLP with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        """Map (batch, time, width) to the same shape."""
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):  # type: ignore[misc]
    """A language model whose parts bear no name that a list would hold."""

    def __init__(self, width: int, layers: int, *, headless: bool) -> None:
        super().__init__()
        self.lexicon = nn.Embedding(VOCABULARY, width)
        self.stack = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.classifier = None if headless else nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        """Map (batch, time) to logits."""
        x = self.stack(self.lexicon(tokens))
        if self.classifier is None:
            return nn.functional.linear(x, self.lexicon.weight)
        return self.classifier(x)


def flip(tensor: Any, element: int, bit: int) -> None:
    """Flip one bit of one element of this rank's part of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    width = local.element_size()
    raw = local.detach().view(-1).view(torch.uint8)
    raw[(element % local.numel()) * width + bit // 8] ^= 1 << (bit % 8)


class SwapValue(torch.autograd.Function):  # type: ignore[misc]
    """Puts other values in place of a result, and lets its gradient pass."""

    @staticmethod
    def forward(_context: Any, _result: Any, other: Any) -> Any:
        """Return ``other``."""
        return other

    @staticmethod
    def backward(_context: Any, gradient: Any) -> Any:
        """Return the gradient unchanged."""
        return gradient, None


class FlipGradient(torch.autograd.Function):  # type: ignore[misc]
    """Lets values pass, and flips a bit of their gradient."""

    @staticmethod
    def forward(context: Any, value: Any, element: int, bit: int) -> Any:
        """Return ``value``."""
        context.at = element, bit
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        """Return the gradient with a bit flipped."""
        wrong = gradient.contiguous().clone()
        flip(wrong, *context.at)
        return wrong, None, None


def flipped_output(result: Any, element: int, bit: int) -> Any:
    """Return ``result`` with a bit flipped, as a broken unit would leave it."""
    other = result.detach().contiguous().clone()
    flip(other, element, bit)
    return SwapValue.apply(result, other)


class Fault:
    """One fault of one rank, from one step on until it is lifted."""

    def __init__(self, orders: Orders, model: Any, optimizer: Any) -> None:
        fault = orders.get("fault", {})
        self.kind = fault.get("kind", "") if fault.get("rank") == dist.get_rank() else ""
        self.step = fault.get("step", 3)
        self.at = fault.get("element", 7), fault.get("bit", 30)
        self.ms = fault.get("ms", 0.0)
        self.factor = fault.get("factor", 1.0)
        self.layer = fault.get("layer", 1)
        self.model, self.optimizer = model, optimizer
        self._undo: list[Callable[[], None]] = []

    def before(self, step: int) -> None:
        """Begin, if this is the rank and the step."""
        if step != self.step or not self.kind:
            return
        element, bit = self.at
        match self.kind:
            case "output":
                self._change_blocks(lambda out: flipped_output(out, element, bit))
            case "gradient":
                self._change_blocks(lambda out: FlipGradient.apply(out, element, bit))
            case "slow":
                self._change_blocks(self._pause)
            case "slower":
                self._slow_down()
            case "raise":
                self._change_blocks(_raise_in_replay)
            case "optimizer":
                self._change_optimizer()
            case "uncalled":
                self._uncalled()

    def after(self, step: int) -> None:
        """Corrupt what is owned, once the optimizer has stepped, but before the step's check."""
        if step != self.step:
            return
        layer = self.model.stack[self.layer]
        if self.kind == "weight":
            flip(layer.up.weight, *self.at)
        elif self.kind == "embedding":
            flip(self.model.lexicon.weight, *self.at)
        elif self.kind == "moment":
            flip(self.optimizer.state[layer.up.weight]["exp_avg"], *self.at)

    def lift(self) -> None:
        """Put the code back."""
        while self._undo:
            self._undo.pop()()

    def _change_blocks(self, change: Callable[[Any], Any]) -> None:
        original = Block.forward

        def forward(block: Any, x: Any) -> Any:
            return change(original(block, x))

        Block.forward = forward
        self._undo.append(lambda: setattr(Block, "forward", original))

    def _pause(self, result: Any) -> Any:
        time.sleep(self.ms / 1000)
        return result

    def _slow_down(self) -> None:
        """Make the blocks of this rank take ``factor`` of their time."""
        original = Block.forward

        def forward(block: Any, x: Any) -> Any:
            began = time.process_time()
            result = original(block, x)
            own = time.process_time() - began
            # A backward pass is twice a forward pass, and the whole is to take so much longer.
            until = time.process_time() + 3 * (self.factor - 1) * own
            while time.process_time() < until:
                pass
            return result

        Block.forward = forward
        self._undo.append(lambda: setattr(Block, "forward", original))

    def _change_optimizer(self) -> None:
        kind = type(self.optimizer)
        original = kind.step
        element, bit = self.at

        def step(optimizer: Any, closure: Any = None) -> Any:
            done = original(optimizer, closure)
            flip(optimizer.param_groups[0]["params"][0], element, bit)
            return done

        kind.step = step
        self._undo.append(lambda: setattr(kind, "step", original))

    def _uncalled(self) -> None:
        """Run this rank's layers around the calls that hooks see."""
        stack = self.model.stack

        def forward(x: Any) -> Any:
            for layer in stack:
                x = layer.forward(x)
            return x

        stack.forward = forward
        self._undo.append(lambda: delattr(stack, "forward"))


def _raise_in_replay(result: Any) -> Any:
    frame = sys._getframe()  # noqa: SLF001 - the fault is to strike only there
    while frame is not None:
        if frame.f_globals.get("__name__") == "scout.replay.recipes":
            raise RuntimeError("no kernel for this")
        frame = frame.f_back  # type: ignore[assignment]
    return result
