"""Who a rank is compared with, and over which process groups they speak.

DDP: everybody of the data-parallel group.  HSDP: the ranks that own the same shard, along the
mesh dimension on which parameters are replicated.  Pure FSDP: the ranks among which parameters
are sharded, who can compare what they computed, but of whose own shards there is no second copy.
Source: the SCOUT guide, "Peer Groups and Consensus".
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

NO_SECOND_COPY = (
    "parameters and moments of pure FSDP have one owner each: a wrong shard reaches all peers alike"
)
TWO_PEERS = "two peers can disagree but not convict each other"


class NoPeersError(Exception):
    """There is nobody to compare with; the text says why."""


class Regime(StrEnum):
    """How parameters are spread over the peers."""

    REPLICATED = "replicated"
    HYBRID = "hybrid"
    SHARDED = "sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """A rank's peers: ``control`` and ``world`` are Gloo groups for words, ``data`` for tensors."""

    ranks: tuple[int, ...]
    rank: int
    regime: Regime
    control: Any
    data: Any
    world: Any
    device: Any

    @property
    def missing_guarantees(self) -> tuple[str, ...]:
        """What comparing these peers can never show."""
        found = [NO_SECOND_COPY] if self.regime is Regime.SHARDED else []
        return (*found, *([TWO_PEERS] if len(self.ranks) == 2 else []))  # noqa: PLR2004

    @property
    def state_is_replicated(self) -> bool:
        """Whether every peer owns the same parameters and moments."""
        return self.regime is not Regime.SHARDED


def form_peers(model: Any) -> Peers:
    """Return this rank's peers.  Every rank of the job calls it at the same point.

    Raises `NoPeersError`.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise NoPeersError("torch.distributed is not initialized")
    rank = dist.get_rank()
    everybody = list(range(dist.get_world_size()))
    parameters = list(model.parameters())
    if not parameters:
        raise NoPeersError("the model has no parameters")
    spread = next((p for p in parameters if hasattr(p, "device_mesh")), None)
    if spread is None:
        rows, regime, data = _data_parallel(model, everybody)
    else:
        rows, regime, data = _along_the_mesh(spread)
    mine = next((row for row in rows if rank in row), [rank])
    if len(mine) < 2:  # noqa: PLR2004
        raise NoPeersError(f"rank {rank} has no equivalent peer")
    control = None
    for row in rows:  # every rank takes part in making every group
        made = dist.new_group(row, backend="gloo")
        control = made if rank in row else control
    device = parameters[0].device
    world = control if len(mine) == len(everybody) else dist.new_group(everybody, backend="gloo")
    return Peers(
        ranks=tuple(mine),
        rank=rank,
        regime=regime,
        control=control,
        data=control if device.type == "cpu" else data,
        world=world,
        device=device,
    )


def _data_parallel(model: Any, everybody: list[int]) -> tuple[list[list[int]], Regime, Any]:
    wrapped = torch.nn.parallel.DistributedDataParallel
    for module in model.modules():
        if isinstance(module, wrapped):
            members = dist.get_process_group_ranks(module.process_group)
            if len(members) < len(everybody):
                raise NoPeersError("DDP over a part of the ranks needs a device mesh")
    return [everybody], Regime.REPLICATED, dist.group.WORLD


def _along_the_mesh(parameter: Any) -> tuple[list[list[int]], Regime, Any]:
    mesh, placements = parameter.device_mesh, parameter.placements
    copies = [at for at, placement in enumerate(placements) if placement.is_replicate()]
    along = copies[0] if copies and mesh.size(copies[0]) > 1 else None
    regime = Regime.HYBRID if along is not None else Regime.SHARDED
    if along is None:
        if len(placements) > 1:
            raise NoPeersError("parameters are sharded over several dimensions and nowhere copied")
        along = 0
    rows = mesh.mesh.movedim(along, -1).reshape(-1, mesh.size(along)).tolist()
    return rows, regime, mesh.get_group(along)
