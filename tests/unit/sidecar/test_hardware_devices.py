"""Names of devices, MIG devices, and who computes where."""

from sidecar.hardware.devices import DEVICES_MAX, Gpu, MigSlice, Roster, rank_devices, visible
from sidecar.hardware.readings import NODE, Device

SLICES = (
    MigSlice(uuid="MIG-11111111-aaaa", gpu_instance=3, compute_instance=0),
    MigSlice(uuid="MIG-22222222-bbbb", gpu_instance=5, compute_instance=0),
)
GPUS = [
    Gpu(device=Device(index=0, uuid="GPU-aaaa0000", pci="0000:18:00")),
    Gpu(device=Device(index=1, uuid="GPU-bbbb0000", pci="0000:3b:00"), slices=SLICES),
]


def test_a_mig_device_is_found_by_both_its_names() -> None:
    """A fault of the whole device would not reach the ranks on its slices."""
    for name in ("MIG-2222", "MIG-22222222-bbbb", "MIG-GPU-bbbb0000/5/0"):
        seen = visible(GPUS, {"CUDA_VISIBLE_DEVICES": name})
        assert [(s.device.index, s.slice) for s in seen.slots] == [(1, SLICES[1])], name
    ranks = rank_devices(
        GPUS, {0: {"CUDA_VISIBLE_DEVICES": "MIG-1111"}, 1: {"CUDA_VISIBLE_DEVICES": "MIG-2222"}}
    )
    assert ranks.ranks_on(Device(pci="0000:3b:00")) == (0, 1)


def test_a_list_of_names_ends_at_what_is_no_name() -> None:
    """CUDA sees fewer devices than the map says, and the ranks shift."""
    seen = visible(GPUS, {"CUDA_VISIBLE_DEVICES": "GPU-bbbb,1,GPU-aaaa"})
    assert [slot.device.index for slot in seen.slots] == [1]
    assert seen.ended_by == "1"


def test_one_device_needs_no_order() -> None:
    """A node with one device would warn for nothing."""
    assert visible(GPUS[:1], {"CUDA_VISIBLE_DEVICES": "0"}).ambiguous is None
    assert visible(GPUS, {}).ambiguous is not None


def test_names_of_one_device_meet_however_they_come() -> None:
    """The same fault from two sources would be two faults."""
    roster = Roster()
    by_pci = roster.resolve(Device(pci="00000000:3B:00.0"))
    full = roster.resolve(Device(index=1, uuid="GPU-b", pci="0000:3b:00"))
    by_uuid = roster.resolve(Device(uuid="gpu-b"))
    by_index = roster.resolve(Device(index=1))
    assert {by_pci, full, by_uuid, by_index} == {1}
    assert roster[1] == Device(index=1, uuid="GPU-b", pci="0000:3b:00")
    assert roster.resolve(NODE) == 0


def test_an_index_that_moved_does_not_rename_a_device() -> None:
    """The neighbour of a lost device would be blamed for it."""
    roster = Roster()
    third = roster.resolve(Device(index=3, uuid="GPU-3", pci="0000:30:00"))
    fourth = roster.resolve(Device(index=4, uuid="GPU-4", pci="0000:38:00"))
    moved = roster.resolve(Device(index=3, uuid="GPU-4", pci="0000:38:00"))
    assert (moved, roster[moved].index) == (fourth, 4)
    assert third != fourth


def test_a_full_roster_refuses_new_names() -> None:
    """Invented names would grow for ever."""
    roster = Roster()
    for number in range(DEVICES_MAX + 10):
        roster.resolve(Device(uuid=f"GPU-{number}"))
    assert roster.resolve(Device(uuid="GPU-new")) is None
    assert len(roster.places()) == DEVICES_MAX + 1
