"""What breaks a rank from within, on a signal: Python imports it by itself, training knows nothing.

SIGUSR2 flips one bit in the largest matrix that the process trains, as a failing memory cell
would; SIGUSR1 makes its modules slow, as a throttled processor would.  Only the demo's processes
have this folder on their path.
"""

import contextlib
import ctypes
import gc
import signal
import sys
import time
from typing import Any, Final

BIT: Final = 24
"""An exponent bit of fp32: the value becomes four times as large or small, and stays a number."""
SLOWER: Final = 4.0


def flip_a_bit(*_: Any) -> None:
    """Flip bit `BIT` of one element of the largest parameter."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    parameters = [it for it in gc.get_objects() if type(it) is torch.nn.Parameter]
    largest = max(parameters, key=lambda it: it.numel(), default=None)
    if largest is not None:
        # Behind torch's back: a memory cell tells nobody that it changed.
        place = largest.data_ptr() + largest.element_size() * (largest.numel() // 3)
        ctypes.c_int32.from_address(place).value ^= 1 << BIT


def slow_down(*_: Any) -> None:
    """Make every matrix product of this process's model take `SLOWER` times as long."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    kind = torch.nn.Linear
    original = kind.forward

    def forward(module: Any, x: Any) -> Any:
        began = time.perf_counter()
        result = original(module, x)
        until = time.perf_counter() + (SLOWER - 1) * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
        return result

    kind.forward = forward


with contextlib.suppress(ValueError):  # only a main thread may
    signal.signal(signal.SIGUSR2, flip_a_bit)
    signal.signal(signal.SIGUSR1, slow_down)
