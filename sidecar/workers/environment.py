"""What a worker finds in its environment: torchrun's variables and Outrider's own.

A pure function of the start command, the node's size and the sidecar's own environment.  User
values win only where torchrun lets them win (``OMP_NUM_THREADS``) and where the start says so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sidecar.api import CheckpointPointer, Start, Update
from worker_shim.messages import (
    CHECKPOINTS_ENV,
    GENERATION_ENV,
    MODEL_CHECKPOINT,
    PROGRESS_PAGE_ENV,
    PROGRESS_TOKEN_ENV,
    SOCKET_ENV,
)

LAUNCH_MARK_ENV: Final = "OUTRIDER_LAUNCH_MARK"
"""Stands in the environment of a worker and of all that it starts, so that an orphan is known."""

ROLE_NAME: Final = "default"
MAX_RESTARTS: Final = 0
"""Restarts inside the launcher: none, the coordinator decides about restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where one worker stands and which of the node's things belong to it."""

    local_rank: int
    nproc: int
    job: str
    socket_path: str
    page_path: str
    page_token: int
    error_file: str
    launch_mark: str


def worker_environment(
    start: Start, place: WorkerPlace, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the whole environment of one worker of ``start``."""
    defaults = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    launcher = {
        "TORCHELASTIC_MAX_RESTARTS": str(MAX_RESTARTS),
        "TORCHELASTIC_RUN_ID": place.job,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": place.error_file,
    }
    ours = {
        SOCKET_ENV: place.socket_path,
        PROGRESS_PAGE_ENV: place.page_path,
        PROGRESS_TOKEN_ENV: str(place.page_token),
        GENERATION_ENV: str(start.generation),
        CHECKPOINTS_ENV: _chosen(start.checkpoints),
        LAUNCH_MARK_ENV: place.launch_mark,
    }
    ranks = rank_variables(start, place.local_rank, place.nproc)
    return {**defaults, **inherited, **ranks, **launcher, **start.env, **ours}


def rank_variables(start: Start | Update, local_rank: int, nproc: int) -> dict[str, str]:
    """Return where one worker stands in its job, as torchrun's variables."""
    rank = start.group_rank * nproc + local_rank
    world_size = start.nnodes * nproc
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(start.group_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": ROLE_NAME,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_WORLD_SIZE": str(start.nnodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "JOB_RESTART_COUNT": str(start.fault_count),
        "TORCHELASTIC_RESTART_COUNT": str(start.fault_count),
    }


def _chosen(checkpoints: Sequence[CheckpointPointer]) -> str:
    """Return what every rank is to load, as `worker_shim.messages.CHECKPOINTS_ENV` says."""
    return json.dumps(
        {
            item.prefix: {"step": item.step, MODEL_CHECKPOINT: item.path, **dict(item.others)}
            for item in checkpoints
        }
    )
