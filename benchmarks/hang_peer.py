"""The same stalls under lm-resiliency's out-of-band observer, where that package is installed.

It needs an interpreter of its own: name one that can import ``lm_resiliency`` and ``torch`` in
``LM_RESILIENCY_PYTHON``.  Without it the column stays empty, and a note says so.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCRIPT: Final = Path(__file__).resolve().parent / "hang_peer_worker.py"
RANKS: Final = 4
WITHIN_S: Final = 60.0
STALLS: Final = (
    ("SIGSTOP", "stop", 0),
    ("sleep in data loading", "data", 1),
    ("sleep in forward", "forward", 2),
    ("sleep in backward", "backward", 3),
    ("sleep in optimizer", "optimizer", 1),
    ("SIGKILL", "kill", 2),
)
"""Name in our table, where, and the culprit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """Whom the peer named."""

    name: str
    rank: int
    said: str
    is_right: bool


def peer_results() -> tuple[list[PeerResult], str]:
    """Return what the peer made of its stalls, and a note where it could not be asked."""
    python = os.environ.get("LM_RESILIENCY_PYTHON", "")
    if not python:
        return [], "lm-resiliency: not compared, LM_RESILIENCY_PYTHON is not set"
    check = subprocess.run([python, "-c", "import lm_resiliency, torch"], check=False)
    if check.returncode:
        return [], f"lm-resiliency: not compared, {python} cannot import it"
    return [_run(python, *stall) for stall in STALLS], ""


def _run(python: str, name: str, where: str, rank: int) -> PeerResult:
    with tempfile.TemporaryDirectory(prefix="outrider-peer-") as folder:
        shared = {
            **os.environ,
            "PEER_DIR": folder,
            "PEER_WHERE": where,
            "PEER_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
        }
        # Without torchrun, which ends every rank as soon as one of them dies.
        processes = [
            subprocess.Popen(
                [python, str(SCRIPT)],
                env={**shared, "RANK": str(number), "LOCAL_RANK": str(number)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for number in range(RANKS)
        ]
        try:
            reports = _await_reports(Path(folder))
        finally:
            for process in processes:
                os.killpg(process.pid, signal.SIGKILL)  # its observer too
                process.wait()
    named = {tuple(report["failed_ranks"]) for report in reports}
    took = min((report["after_s"] for report in reports), default=None)
    after = "" if took is None else f", {took:.2f} s"
    whom = " / ".join(str(list(ranks)) for ranks in sorted(named)) or "nobody"
    return PeerResult(name=name, rank=rank, said=whom + after, is_right=named == {(rank,)})


def _await_reports(folder: Path) -> list[dict[str, object]]:
    """Wait for the first report, and a moment for those of the other ranks."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline and not list(folder.glob("report-*")):
        time.sleep(0.1)
    time.sleep(3.0)
    return [json.loads(line) for file in folder.glob("report-*") for line in file.open()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    found, note = peer_results()
    sys.stdout.write("\n".join([*(f"{it.name}: {it.said}" for it in found), note]) + "\n")
