"""Workers that start warm: the sidecar's side of the zygote.

Decides nothing about when a worker starts; it only offers a faster way, and every way in which it
cannot is an answer (`WarmStartError`) after which the launcher starts the worker cold.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sidecar.workers.processes import die_with_parent, uses_torch
from sidecar.workers.zygote import LENGTH

DEFAULT_MODULES: Final = ("torch", "torch._dynamo", "torch.distributed.tensor")
"""What a DDP script loads before its first step.  The second and third are what the
DistributedDataParallel constructor imports when it is first called."""
GUEST: Final = "worker_shim.warm"
"""Loaded last, when all that the script may have imported by name is there."""
MEMORY_MIB_MAX: Final = 2048
"""Largest resident size of a zygote.  torch takes 0.3 GiB; above this it is not worth its keep."""
ANSWER_S_MAX: Final = 5.0
"""Longest wait for a fork, which takes some ten milliseconds."""

_LOG: Final = logging.getLogger(__name__)


class WarmStartError(Exception):
    """No warm worker can be had; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmCommand:
    """The part of a worker's command that a zygote can run."""

    argv: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str]) -> "WarmCommand | None":
        """Return it for ``python -u script`` or ``python -u -m module``, else None."""
        if len(command) < 3 or command[0] != sys.executable or command[1] != "-u":  # noqa: PLR2004
            return None
        if command[2] != "-m" and not Path(command[2]).is_file():
            return None  # a folder or an archive with a __main__.py
        return cls(argv=tuple(command[2:]))


class WarmPool:
    """One zygote, started when it is known what the job imports."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = WarmCommand.of(command)
        self._environment = {"OMP_NUM_THREADS": "1", **environment, "PYTHONUNBUFFERED": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready = False
        self._looked_at: int | None = None
        self.begun = False

    @property
    def ready(self) -> bool:
        """Return whether a worker can be forked now."""
        return self._ready

    @property
    def pids(self) -> frozenset[int]:
        """Return the processes that belong to the pool and are nobody's orphans."""
        return frozenset() if self._process is None else frozenset({self._process.pid})

    def stepped(self, generation: int, pids: Iterable[int], modules: Sequence[str]) -> None:
        """Begin if the workers of ``generation`` use torch: once one has stepped, it is loaded."""
        if self.begun or self._looked_at == generation:
            return
        self._looked_at = generation
        if any(map(uses_torch, pids)):
            self.begin(modules)

    def begin(self, modules: Sequence[str] = DEFAULT_MODULES) -> None:
        """Start importing ``modules``, unless that was done before or cannot help."""
        if self.begun or self._command is None:
            return
        self.begun = True
        if any(importlib.util.find_spec(name.partition(".")[0]) is None for name in modules):
            return
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    *(sys.executable, "-u", "-m", "sidecar.workers.zygote"),
                    *(str(theirs.fileno()), *modules, GUEST),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - two system calls
            )
        except (OSError, subprocess.SubprocessError) as error:
            ours.close()
            _LOG.warning("workers will start cold: %s", error)
            return
        finally:
            theirs.close()
        ours.settimeout(ANSWER_S_MAX)
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._became_ready)

    def fork(self, environment: Mapping[str, str], outputs: tuple[int, int], cwd: str) -> int:
        """Return the pid of a new worker, a child of this process.  Raises `WarmStartError`."""
        if not self._ready or self._channel is None or self._command is None:
            raise WarmStartError("no zygote is ready")
        body = json.dumps(
            {"argv": self._command.argv, "env": dict(environment), "cwd": cwd}
        ).encode()
        try:
            socket.send_fds(self._channel, [LENGTH.pack(len(body))], list(outputs))
            self._channel.sendall(body)
            answer = self._read()
        except (OSError, ValueError) as error:
            self.close()
            raise WarmStartError(f"the zygote does not answer: {error}") from error
        if "pid" not in answer:
            raise WarmStartError(f"the zygote cannot fork: {answer.get('error')}")
        return int(answer["pid"])

    def start_over(self) -> None:
        """End the zygote, and begin another when the job has stepped again."""
        self.close()
        self.begun, self._looked_at = False, None

    def close(self) -> None:
        """End the zygote.  Workers that it became are not touched."""
        self._ready = False
        if self._channel is not None:
            with contextlib.suppress(RuntimeError):  # outside of a loop nothing is registered
                asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _became_ready(self) -> None:
        assert self._channel is not None, "the reader goes with the channel"
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        try:
            answer = self._read()
        except (OSError, ValueError) as error:
            answer = {"ready": False, "reason": str(error) or "it ended"}
        if not answer["ready"]:
            _LOG.info("workers will start cold: %s", answer["reason"])
            self.close()
        elif answer["rss_kib"] > MEMORY_MIB_MAX << 10:
            _LOG.info("workers will start cold: the imports take %d MiB", answer["rss_kib"] >> 10)
            self.close()
        else:
            self._ready = True
            _LOG.info("warm workers are ready (%d MiB)", answer["rss_kib"] >> 10)

    def _read(self) -> dict[str, Any]:
        assert self._channel is not None, "only read while there is a channel"
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        answer: dict[str, Any] = json.loads(self._exactly(length))
        return answer

    def _exactly(self, count: int) -> bytes:
        assert self._channel is not None, "only read while there is a channel"
        data = bytearray()
        while len(data) < count:
            chunk = self._channel.recv(count - len(data))
            if not chunk:
                raise ConnectionError("it ended")
            data += chunk
        return bytes(data)
