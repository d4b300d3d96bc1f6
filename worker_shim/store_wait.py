"""Waiting for the rank that hosts torch's store where a call back can reach: in Python.

Torch's own store connects in C++, sleeps between two tries for half a second and longer each time,
and takes a signal for one more failed try.  Warm workers begin within milliseconds of each other,
and half of the time that is when rank 0 does not listen yet; and in a block that is called off, a
rank whose peer died before it opened the store would sit there until the process group's timeout.
Here it waits for the port first, and torch connects at once then.
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
OUTSIDE_S_MAX: Final = 10.0
"""Longest wait outside of a block: after it torch waits as long as the script told it to."""
DIAL_S_MAX: Final = 1.0
"""Longest wait for one answer of a host that does not refuse."""


class StoreWait:
    """The wait of this process's main thread for a store."""

    def __init__(self) -> None:
        self.leave_if_called_off: Callable[[], object] | None = None
        """Raises once the block is to be left.  None outside of a block."""

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
        if threading.current_thread() is not threading.main_thread():
            return
        leave, pause_s, limit_s = self.leave_if_called_off, PAUSE_S_MIN, timeout.total_seconds()
        if leave is None:
            limit_s = min(limit_s, OUTSIDE_S_MAX)
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            if leave is not None:
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
