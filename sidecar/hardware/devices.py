"""Which device is meant: by index, UUID or PCI address, and which local rank computes on it.

Decides how names of one device meet (`Roster`) and what ``CUDA_VISIBLE_DEVICES`` leaves visible.
An index alone is the weakest name: CUDA orders devices by speed unless told otherwise, and NVML's
indices move when a lost device drops out of its list.  Asks no driver.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sidecar.hardware.pci import normalise_pci
from sidecar.hardware.readings import NODE, Device

_NUMBER: Final = re.compile(r"\s*([+-]?\d+)")
"""What strtol reads: leading digits count and the rest of the entry does not."""
_OLD_MIG: Final = re.compile(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """One MIG device of a GPU."""

    uuid: str
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this node with its MIG devices, if it is cut into any."""

    device: Device
    slices: tuple[MigSlice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What one CUDA ordinal stands for."""

    device: Device
    slice: MigSlice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """What a process sees, by CUDA ordinal, and how sure that is.

    ``ambiguous`` says why another order is possible; ``ended_by`` is the entry at which CUDA
    stops reading the list, with everything after it.
    """

    slots: tuple[Slot, ...]
    ambiguous: str | None = None
    ended_by: str | None = None


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Visible:
    """Return which of ``gpus`` (in PCI order) a process with this environment sees.

    Follows CUDA: an invalid entry ends the list, a repeated one empties it, UUIDs may be
    shortened as long as they stay unique, an empty list hides everything.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    by_index = environment.get("CUDA_DEVICE_ORDER", "").strip().upper() != "PCI_BUS_ID"
    doubt = (
        "indices follow the speed of the devices unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set"
        if by_index and len(gpus) > 1
        else None
    )
    if text is None:
        return Visible(slots=tuple(_whole(gpu) for gpu in gpus), ambiguous=doubt)
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    named = bool(entries) and entries[0].upper().startswith(("GPU-", "MIG-"))
    slots: list[Slot] = []
    ended = None
    for entry in entries:
        slot = _by_name(entry, gpus) if named else _by_number(entry, gpus)
        if slot is None:
            ended = entry
            break
        if slot in slots:
            return Visible(slots=(), ended_by=entry)
        slots.append(slot)
    return Visible(
        slots=tuple(slots), ambiguous=doubt if slots and not named else None, ended_by=ended
    )


def _whole(gpu: Gpu) -> Slot:
    # A process that names nothing sees the first MIG device of a GPU that is cut.
    return Slot(device=gpu.device, slice=gpu.slices[0] if gpu.slices else None)


def _by_number(entry: str, gpus: Sequence[Gpu]) -> Slot | None:
    match = _NUMBER.match(entry)
    number = int(match[1]) if match else -1
    return _whole(gpus[number]) if 0 <= number < len(gpus) else None


def _by_name(entry: str, gpus: Sequence[Gpu]) -> Slot | None:
    old = _OLD_MIG.fullmatch(entry)
    if old:
        found = [
            Slot(device=gpu.device, slice=piece)
            for gpu in gpus
            for piece in gpu.slices
            if _starts(gpu.device.uuid, old[1])
            and (piece.gpu_instance, piece.compute_instance) == (int(old[2]), int(old[3]))
        ]
    elif entry.upper().startswith("MIG-"):
        found = [
            Slot(device=gpu.device, slice=piece)
            for gpu in gpus
            for piece in gpu.slices
            if _starts(piece.uuid, entry)
        ]
    elif entry.upper().startswith("GPU-"):
        found = [_whole(gpu) for gpu in gpus if _starts(gpu.device.uuid, entry)]
    else:
        return None
    return found[0] if len(found) == 1 else None


def _starts(uuid: str | None, prefix: str) -> bool:
    return uuid is not None and uuid.lower().startswith(prefix.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevices:
    """Which device each local rank computes on, and why that may be wrong."""

    by_rank: Mapping[int, Slot]
    doubts: tuple[str, ...] = ()

    def ranks_on(self, device: Device) -> tuple[int, ...]:
        """Return the local ranks that compute on ``device``, in order."""
        return tuple(
            sorted(rank for rank, slot in self.by_rank.items() if same(slot.device, device))
        )


def rank_devices(gpus: Sequence[Gpu], environments: Mapping[int, Mapping[str, str]]) -> RankDevices:
    """Map local ranks to devices from the environment that each worker was started with.

    A worker that sees one device uses it; one that sees several uses the ordinal of its own
    local rank, as every launcher's convention has it.
    """
    by_rank: dict[int, Slot] = {}
    doubts: list[str] = []
    for rank, environment in sorted(environments.items()):
        seen = visible(gpus, environment)
        if len(seen.slots) == 1:
            by_rank[rank] = seen.slots[0]
        elif rank < len(seen.slots):
            by_rank[rank] = seen.slots[rank]
        else:
            doubts.append(f"local rank {rank} sees {len(seen.slots)} devices")
        if seen.ambiguous and seen.ambiguous not in doubts:
            doubts.append(seen.ambiguous)
        if seen.ended_by is not None:
            doubts.append(f"local rank {rank}: CUDA stops reading at '{seen.ended_by[:80]}'")
    return RankDevices(by_rank=by_rank, doubts=tuple(doubts))


def same(one: Device, other: Device) -> bool:
    """Whether two names mean one device, by the strongest name that both carry."""
    if one.uuid and other.uuid:
        return one.uuid.lower() == other.uuid.lower()
    if one.pci and other.pci:
        return one.pci == other.pci
    return one.index is not None and one.index == other.index


DEVICES_MAX: Final = 256
"""A node has at most a few dozen devices; names beyond this are a source's noise."""


NODE_PLACE: Final = 0


@dataclass(slots=True)
class Roster:
    """Every device ever seen, so that a device keeps its identity when its neighbours vanish.

    A device's place in the roster never changes; what is known of it may grow.  The node itself
    has the place `NODE_PLACE`.
    """

    _devices: list[Device] = field(default_factory=lambda: [NODE])

    def __getitem__(self, place: int) -> Device:
        return self._devices[place]

    def places(self) -> range:
        """Return every place that is taken."""
        return range(len(self._devices))

    def resolve(self, device: Device) -> int | None:
        """Return the place of the device that is meant, and remember what is known of it.

        The index of the first sight is kept: later ones may have moved.  None means that the
        roster is full, which only a source that makes names up can bring about.
        """
        if device.is_node:
            return NODE_PLACE
        if device.pci:
            device = replace(device, pci=normalise_pci(device.pci) or device.pci.lower())
        for place, known in enumerate(self._devices):
            if same(known, device):
                self._devices[place] = Device(
                    index=device.index if known.index is None else known.index,
                    uuid=known.uuid or device.uuid,
                    pci=known.pci or device.pci,
                )
                return place
        if len(self._devices) > DEVICES_MAX:
            return None
        self._devices.append(device)
        return len(self._devices) - 1
