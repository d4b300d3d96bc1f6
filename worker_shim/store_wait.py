"""Waiting for the rank that hosts torch's store where a call back can reach: in Python.

Torch's own store connects in C++, sleeps between two tries for longer each time, and takes a signal
for one more failed try.  A rank whose peer died before it opened the store would sit there until
the process group's timeout.  Here it waits for the port first, and torch connects at once then.
"""

import inspect
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

from worker_shim.patching import Patches

PAUSE_S_MIN: Final = 0.01
PAUSE_S_MAX: Final = 0.5
"""Between two tries, doubled from the one to the other: rank 0 imports for seconds, and thousands
of ranks wait for it."""
DIAL_S_MAX: Final = 1.0
"""Longest wait for one answer of a host that does not refuse."""


class StoreWait:
    """The wait of this process's main thread for a store; only while a block runs."""

    def __init__(self) -> None:
        self.leave_if_called_off: Callable[[], object] | None = None
        """Raises once the block is to be left.  None outside of a block, where torch waits."""

    def install(self, patches: Patches, rendezvous: ModuleType) -> None:
        """Wait before torch creates the store of ``env://`` and ``tcp://``."""

        def make(original: Any) -> Any:
            signature = inspect.signature(original)

            def create_store(*args: Any, **kwargs: Any) -> Any:
                said = signature.bind(*args, **kwargs).arguments
                if _is_client(said):
                    self.wait(said["hostname"], said["port"], said["timeout"])
                return original(*args, **kwargs)

            return create_store

        patches.replace_function(rendezvous, "_create_c10d_store", make)

    def wait(self, host: str, port: int, timeout: timedelta) -> None:
        """Return when something listens at ``port``, or when torch may say that nothing does.

        Raises what `leave_if_called_off` raises.
        """
        leave, pause_s = self.leave_if_called_off, PAUSE_S_MIN
        if leave is None or threading.current_thread() is not threading.main_thread():
            return
        deadline = time.monotonic() + timeout.total_seconds()
        while (left_s := deadline - time.monotonic()) > 0:
            leave()
            try:
                socket.create_connection((host, port), min(DIAL_S_MAX, left_s)).close()
            except OSError:
                time.sleep(random.uniform(pause_s / 2, pause_s))  # noqa: S311 - no secret
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            else:
                return


def _is_client(said: dict[str, Any]) -> bool:
    """Return True where torch will connect to a store that somebody else opens."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return agents or said["rank"] != 0


STORE_WAIT: Final = StoreWait()
