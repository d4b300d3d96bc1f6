"""Ready-made callbacks for `DurableCheckpointConfig`: ``torch.save`` and distributed checkpoints.

The state must hold everything a resumed run needs: model, optimizer, scheduler, position in the
data, random states, step.  ``state()`` returns it, ``restore(state)`` puts it back.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from scout.durable import DurableCheckpointConfig

State = dict[str, Any]


def torch_save(
    folder: str | os.PathLike[str],
    *,
    state: Callable[[], State],
    restore: Callable[[State], None],
    every_steps: int,
    environment_id: str = "",
) -> DurableCheckpointConfig:
    """Return callbacks that keep replicated state in one file, written by rank 0.

    For DDP; of sharded state rank 0 holds a part only.
    """
    home = Path(folder)

    def path_of(checkpoint_id: str) -> Path:
        return home / f"{checkpoint_id}.pt"

    def save(checkpoint_id: str, step: int) -> None:
        if dist.get_rank() == 0:
            home.mkdir(parents=True, exist_ok=True)
            temporary = home / f".{checkpoint_id}.{os.getpid()}"
            with temporary.open("wb") as file:
                torch.save({"step": step, "state": state()}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path_of(checkpoint_id))
            _sync(home)

    def load(checkpoint_id: str, _step: int) -> int:
        saved = torch.load(path_of(checkpoint_id), map_location="cpu", weights_only=True)
        restore(saved["state"])
        return int(saved["step"])

    def quarantine(checkpoint_id: str) -> None:
        path = path_of(checkpoint_id)
        if path.exists():
            path.replace(path.with_suffix(".rejected"))

    return DurableCheckpointConfig(
        manifest_dir=home / "manifest",
        environment_id=environment_id or _environment(),
        save_candidate=save,
        load_checkpoint=load,
        commit_candidate=_keep,
        quarantine_candidate=quarantine,
        every_steps=every_steps,
    )


def distributed_checkpoint(
    folder: str | os.PathLike[str],
    *,
    state: Callable[[], State],
    restore: Callable[[State], None],
    every_steps: int,
    environment_id: str = "",
) -> DurableCheckpointConfig:
    """Return callbacks that keep sharded or replicated state by ``torch.distributed.checkpoint``.

    For FSDP and HSDP; ``state()`` is also what a checkpoint is loaded into.
    """
    home = Path(folder)

    def save(checkpoint_id: str, step: int) -> None:
        whole = {"state": state(), "step": torch.tensor(step)}
        dcp.save(whole, checkpoint_id=str(home / checkpoint_id))

    def load(checkpoint_id: str, _step: int) -> int:
        whole: State = {"state": state(), "step": torch.tensor(0)}
        dcp.load(whole, checkpoint_id=str(home / checkpoint_id))
        restore(whole["state"])
        return int(whole["step"])

    def quarantine(checkpoint_id: str) -> None:
        if (home / checkpoint_id).exists():
            target = home / f"{checkpoint_id}.rejected"
            shutil.rmtree(target, ignore_errors=True)
            (home / checkpoint_id).rename(target)

    return DurableCheckpointConfig(
        manifest_dir=home / "manifest",
        environment_id=environment_id or _environment(),
        save_candidate=save,
        load_checkpoint=load,
        commit_candidate=_keep,
        quarantine_candidate=quarantine,
        every_steps=every_steps,
    )


def _environment() -> str:
    return f"torch {torch.__version__}"


def _keep(_checkpoint_id: str) -> None:
    """A verified checkpoint stays where it is."""


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
