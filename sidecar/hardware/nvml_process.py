"""One helper process that queries NVML: started, heard, and killed.

Decides nothing about devices.  It keeps what the process said until somebody takes it, counts error
events instead of keeping them, and knows since when the process has been silent.
"""

import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from scout.clock import Instant
from sidecar.own_process import own_command

MESSAGES_MAX: Final = 4096
"""Answers kept; a round of sixteen devices is some forty, and nobody asks twice unanswered."""
EVENT_KINDS_MAX: Final = 1024
"""Devices times codes that are counted apart between two readings."""
REAP_S: Final = 0.5
"""A killed process is gone within milliseconds, unless the driver holds it."""

HELPER: Final = "sidecar.hardware.nvml_helper"

EventKey = tuple[int | None, int, int | None]
"""Device id in this process, Xid, MIG GPU instance."""


class NvmlProcess:
    """A running helper.  ``heard`` is called, on a thread of this object, whenever it speaks.

    Its argument is True for an error event that is the first of its kind.
    """

    def __init__(self, spec: dict[str, Any], heard: Callable[[bool], None]) -> None:
        self._heard = heard
        self._lock = threading.Lock()
        self._messages: deque[dict[str, Any]] = deque(maxlen=MESSAGES_MAX)
        self._events: dict[EventKey, int] = {}
        self._met: set[EventKey] = set()
        self.heard_at = Instant(time.monotonic_ns())
        self.ended = False
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            own_command(HELPER, json.dumps(spec)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is for the daemon to handle
        )
        threading.Thread(target=self._listen, name="nvml-helper", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, request: dict[str, Any]) -> bool:
        """Send one request.  False when the process does not take it any more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            return False
        self.heard_at = Instant(time.monotonic_ns())
        return True

    def take(self) -> list[dict[str, Any]]:
        """Return what was said since the last call, events left out."""
        with self._lock:
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def take_events(self) -> dict[EventKey, int]:
        """Return how often each error event came since the last call."""
        with self._lock:
            events, self._events = self._events, {}
        return events

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self.reap(REAP_S)

    def reap(self, wait_s: float = 0) -> bool:
        """Return whether the process is gone.  One that the driver holds outlives its killing."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            return True  # what was not written yet has no reader any more
        return True

    @property
    def exit_text(self) -> str:
        """How the process ended, in words."""
        code = self._process.poll()
        if code is None:
            return "closed its output"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                try:
                    message = json.loads(line)
                except ValueError:
                    break
                self.heard_at = Instant(time.monotonic_ns())
                urgent = False
                with self._lock:
                    if "xid" in message:
                        urgent = self._count(message)
                    else:
                        self._messages.append(message)
                self._heard(urgent)
        self.ended = True
        self._heard(False)

    def _count(self, event: dict[str, Any]) -> bool:
        """Count an event.  Returns whether it is the first of its kind: a storm is not urgent."""
        key = (event["id"], int(event["xid"]), event["instance"])
        if key in self._events or len(self._events) < EVENT_KINDS_MAX:
            self._events[key] = self._events.get(key, 0) + 1
        if key in self._met or len(self._met) >= EVENT_KINDS_MAX:
            return False
        self._met.add(key)
        return True
