"""The same training under torchrun, without Outrider and without faults, to compare with."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from coordinator.cli.errors import UserError
from coordinator.demo.cluster import Layout, end
from coordinator.wording import one_line

RUN_WITHIN_S: Final = 120.0
"""Longest wait for the undisturbed run, which takes some 20 s on two cores."""
SAID_CHARS_MAX: Final = 300
"""Longest quotation from the log of a run that failed."""

_DIGEST: Final = re.compile(r"final weights sha256 ([0-9a-f]{64})")


def run_reference(layout: Layout, world_size: int) -> str:
    """Train undisturbed and return the digest of the final weights.  Raises `UserError`."""
    folder = layout.root / "reference"
    folder.mkdir()
    log = folder / "torchrun.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world_size)]
    command += layout.training(str(folder / "data-$RANK"), "reference")
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        try:
            status = process.wait(RUN_WITHIN_S)
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"the undisturbed run took over {RUN_WITHIN_S:g} s, {_told(log)}"
            ) from error
        finally:
            end(process)
    if status != 0:
        raise UserError(f"the undisturbed run failed, {_told(log)}")
    digest = find_digest([log])
    if digest is None:
        raise UserError(f"the undisturbed run did not print its weights' digest, {_told(log)}")
    return digest


def find_digest(logs: list[Path]) -> str | None:
    """Return the last digest of final weights that one of ``logs`` holds."""
    for log in sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True):
        found = _DIGEST.findall(log.read_text(errors="replace"))
        if found:
            return str(found[-1])
    return None


def _told(log: Path) -> str:
    """Return what the run said of its failure: its log may go away with the demo's folder."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    said = one_line((errors or lines[-1:] or ["nothing"])[0], SAID_CHARS_MAX)
    return f"and said: {said}; run it with --keep DIR to have the whole log in DIR/reference"
