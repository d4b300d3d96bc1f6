"""Starting an observer from the training script, which it must never disturb.

The observer is another program: it imports neither the script nor torch, so that a script without
a main guard is not run again.  Whatever goes wrong is one line in the rank's log and a handle
that says ``degraded``.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from scout.observer.config import ObserverConfig, meeting
from scout.progress import create_page

PAGE_ENV: Final = "OUTRIDER_PROGRESS_PAGE"
TOKEN_ENV: Final = "OUTRIDER_PROGRESS_TOKEN"  # noqa: S105 - the name of a variable
END_WITHIN_S: Final = 2.0

_log: Final = logging.getLogger("outrider")


class ObserverHandle:
    """An observer that was started, or could not be."""

    def __init__(
        self,
        process: "subprocess.Popen[str] | None",
        config: ObserverConfig | None,
        trouble: str = "",
        owned_page: Path | None = None,
    ) -> None:
        self._process = process
        self._trouble = trouble
        self._owned_page = owned_page
        self.config = config

    def status(self) -> Mapping[str, Any]:
        """Return what the observer last wrote: ``state``, ``reason`` and the ``report``, if any.

        ``state`` is ``starting``, ``waiting`` (for other ranks), ``watching``, ``reporting`` or
        ``degraded``.  Never raises.
        """
        if self._process is None or self.config is None:
            return {"state": "degraded", "reason": self._trouble, "report": None}
        code = self._process.poll()
        if code is not None:
            reason = f"the observer ended with status {code}"
            return {"state": "degraded", "reason": reason, "report": None}
        try:
            body: dict[str, Any] = json.loads(Path(self.config.status).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {"state": "starting", "reason": "", "report": None}
        return body

    def close(self) -> None:
        """End the observer.  It ends with this process anyway."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._owned_page is not None:
            with contextlib.suppress(OSError):
                self._owned_page.unlink()


def start_observer(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    run_id: str | None = None,
    generation: int | None = None,
    address: str | None = None,
    port: int | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    secret: str = "",
    **thresholds: float,
) -> ObserverHandle:
    """Start this rank's observer and return at once.  Never raises.

    What is not given comes from the environment that torchrun sets.  With ``address`` or ``port``
    the observers meet over TCP, with ``state_dir`` alone in files of that folder, otherwise over
    TCP at the master's address on a port derived from the run and its generation.  ``thresholds``
    are those of `ObserverConfig`, such as ``stall_timeout_s``.  Call it before
    ``worker_shim.attach()``, which then publishes to the page that the observer reads.
    """
    environment = os.environ
    try:
        run = run_id or environment.get("TORCHELASTIC_RUN_ID") or "run"
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = Path(state_dir) if state_dir is not None else None
        given = meeting(
            address=address,
            port=port,
            folder=None if folder is None else os.fspath(folder.absolute()),
            fallback=environment.get("MASTER_ADDR", "127.0.0.1"),
        )
        config = ObserverConfig(
            rank=int(environment["RANK"]) if rank is None else rank,
            world_size=int(environment["WORLD_SIZE"]) if world_size is None else world_size,
            local_rank=int(environment.get("LOCAL_RANK", "0"))
            if local_rank is None
            else local_rank,
            host=socket.gethostname(),
            run=run,
            generation=int(restarts) if generation is None else generation,
            pid=os.getpid(),
            page=environment.get(PAGE_ENV, ""),
            token=int(environment.get(TOKEN_ENV, "0")),
            status="",
            address=given[0],
            port=given[1],
            folder=given[2],
            secret=secret,
            **thresholds,  # type: ignore[arg-type] # every one of them is a number
        )
        return _start(config, folder)
    except Exception as error:  # noqa: BLE001 - training must not see it, whatever it is
        return _degraded(f"{type(error).__name__}: {error}")


def _start(wanted: ObserverConfig, folder: Path | None) -> ObserverHandle:
    home = folder or Path(tempfile.gettempdir())
    home.mkdir(parents=True, exist_ok=True)
    config = replace(
        wanted,
        gpu=_gpu(os.environ, wanted.local_rank),
        status=os.fspath(home / f"outrider-observer-{wanted.key[:12]}-rank-{wanted.rank}.json"),
    )
    owned: Path | None = None
    if not config.page:
        owned, token = _own_page(config)
        config = replace(config, page=os.fspath(owned), token=token)
        os.environ[PAGE_ENV], os.environ[TOKEN_ENV] = config.page, str(token)
    root = os.fspath(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    process = subprocess.Popen(
        [sys.executable, "-m", "scout.observer"],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None, "it was asked for"
    process.stdin.write(config.to_json() + "\n")
    process.stdin.close()
    return ObserverHandle(process, config, owned_page=owned)


def _own_page(config: ObserverConfig) -> tuple[Path, int]:
    """Make the page that a sidecar would have made.  Raises `OSError`, `ProgressPageError`."""
    memory = Path("/dev/shm")  # noqa: S108 - named after what it is; the page is mode 0600
    home = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    token = secrets.randbits(63)
    page = home / f"outrider-page-{config.key[:12]}-{config.rank}-{token:016x}"
    create_page(page, token)
    return page, token


def _gpu(environment: Mapping[str, str], local_rank: int) -> int | None:
    """Return the physical device of a local rank, where the environment tells."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [] if visible is None else visible.split(",")
    device = devices[local_rank].strip() if local_rank < len(devices) else ""
    return int(device) if device.isascii() and device.isdigit() and len(device) < 4 else None  # noqa: PLR2004


def _degraded(trouble: str) -> ObserverHandle:
    _log.warning("outrider: hangs are not observed: %s", trouble)
    return ObserverHandle(None, None, trouble)
