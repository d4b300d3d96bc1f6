"""One spelling for a PCI device, however it was written."""

import re
from typing import Final

_PCI: Final = re.compile(
    r"(?:PCI:)?(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})"
    r"(?:\.[0-7])?",
    re.IGNORECASE,
)


def normalise_pci(address: str) -> str | None:
    """Return ``domain:bus:device`` in lower case, or None when it is no PCI address.

    The driver, NVML and lspci write one address in four ways: with and without domain, with four
    and with eight digits of it, with and without function.  A GPU is one device, so the function
    is left out.
    """
    found = _PCI.fullmatch(address.strip())
    if found is None:
        return None
    domain, bus, device = (int(found[part] or "0", 16) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}"
