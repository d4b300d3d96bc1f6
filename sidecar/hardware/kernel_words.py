"""Findings about the kernel's log in words, and names that its lines give devices.

Decides no severity; it only says what was judged.
"""

import re
from typing import Final

from sidecar.hardware.catalogue import Catalogue
from sidecar.hardware.kernel_events import KernelKind, KernelNote
from sidecar.hardware.pci import normalise_pci
from sidecar.hardware.xid import NvlinkReport, SxidEvent, XidEvent

_NAMED: Final = re.compile(
    r"NVRM: GPU at (?P<pci>(?:PCI:)?[0-9a-fA-F:.]{7,20}): (?P<uuid>GPU-[0-9a-fA-F-]{8,40})"
)
_HALF: Final = re.compile(r"NVRM: The NVIDIA GPU (?P<pci>[0-9a-fA-F:.]{7,20})\b")
_NAME_CHARS_MAX: Final = 64


def xid_words(event: XidEvent, gpu: int | None, catalogue: Catalogue, action: str) -> str:
    """Return one sentence about an Xid: which, where, what it means, what to do."""
    who = f"GPU {gpu}" if gpu is not None else "a GPU that is not among this node's known ones"
    words = f"Xid {event.code} on {who} (PCI {event.pci}"
    if event.gpu_instance is not None:
        words += f", MIG instance {event.gpu_instance}"
    if event.link is not None and event.link >= 0:
        words += f", NVLink {event.link}"
    words += f"): {catalogue.meaning_of(event.code).meaning}"
    if isinstance(event.detail, NvlinkReport):
        words += f", {event.detail.unit}"
        words += ", made on purpose by a test" if event.injected else ""
    if event.previous is not None:
        words += f", here Xid {event.previous}"
    if event.pid is not None:
        words += f", by {_process(event.process)} (pid {event.pid})"
    return f"{words}; {action}"


def sxid_words(event: SxidEvent) -> tuple[str, str]:
    """Return one sentence about an NVSwitch's line, and what to do."""
    action = (
        "drain the node and reset GPUs and switches together" if event.fatal else "watch the switch"
    )
    link = "" if event.link is None else f", link {event.link}"
    where = f"NVSwitch {event.switch} (PCI {event.pci}{link})"
    return f"SXid {event.code} on {where}: {event.text[:200]}; {action}", action


def note_words(note: KernelNote, gpu: int | None) -> str:
    """Return one sentence about any other line."""
    if note.kind is KernelKind.OOM_KILL:
        where = {"MEMCG": "the memory limit of its container", "NONE": "all memory of the node"}
        limit = where.get(note.detail.get("constraint", "NONE"), "a memory limit")
        return (
            f"the kernel's OOM killer ended {_process(note.process)} (pid {note.pid}): "
            f"{limit} was used up"
        )
    who = note.subject if gpu is None else f"GPU {gpu} (PCI {note.pci})"
    if note.kind is KernelKind.PCIE and "what" in note.detail:
        how = note.detail.get("how", "")
        what = f"{note.detail['what'].lower()} PCI Express error"
        return f"{who}: {what}" + (f" ({how.lower()})" if how else "")
    process = "" if note.pid is None else f" [{_process(note.process)}, pid {note.pid}]"
    return f"{who}: {note.meaning}{process}"


def learn_uuid(text: str) -> tuple[str, str] | None:
    """Return the PCI address and UUID of a GPU that the driver introduces."""
    found = _NAMED.match(text)
    pci = normalise_pci(found["pci"]) if found else None
    return None if found is None or pci is None else (pci, found["uuid"])


def lost_address(text: str) -> str | None:
    """Return the address in the first of the lines over which the driver tells of a lost GPU."""
    found = _HALF.match(text)
    return normalise_pci(found["pci"]) if found else None


def _process(name: str | None) -> str:
    return "a process" if not name else name[:_NAME_CHARS_MAX]
