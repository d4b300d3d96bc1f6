"""Breaks the simulated hardware of the node that it runs on, as inject.sh asks.

It writes what a driver and a kernel would: the script from which the stand-in for NVIDIA's library
answers, and the kernel log that the sidecar follows.
"""
# ruff: noqa: INP001, T201 - a script that talks to a person, not a package

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

STATE: Final = Path(os.environ.get("SIMULATED_STATE", "/var/lib/outrider"))
SCRIPT, KERNEL_LOG = "nvml", "kernel.log"
FIRST_BUS, BUSES_APART = 0x18, 8
"""Where the stand-in puts its devices."""
WORDS: Final[Mapping[int, str]] = MappingProxyType(
    {
        48: "DBE (double bit error) ECC error",
        74: "NVLink: fatal error detected on link 2",
        79: "GPU has fallen off the bus.",
        94: "Contained: SM (0x1). RST: No, D-RST: No",
        95: "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
        119: "Timeout after 6s of waiting for RPC response from GPU GSP!",
    }
)


def kernel_says(text: str) -> None:
    """Append a record as the kernel's log device shows it."""
    at_us = time.monotonic_ns() // 1000
    with (STATE / KERNEL_LOG).open("a", encoding="utf-8") as log:
        log.write(f"3,1,{at_us},-;{text}\n")


def nvml_says(*lines: str) -> None:
    """Let the library answer by these lines from now on; a later line wins."""
    path = STATE / SCRIPT
    new = path.with_suffix(".new")
    new.write_text(path.read_text(encoding="utf-8") + "".join(f"{it}\n" for it in lines), "utf-8")
    new.replace(path)


def xid(gpu: str, code: str) -> str:
    """Report an error of the driver."""
    bus = FIRST_BUS + BUSES_APART * int(gpu)
    words = WORDS.get(int(code), "reported by compose/inject.sh")
    events = (STATE / SCRIPT).read_text(encoding="utf-8").count("\nevent ")
    kernel_says(f"NVRM: Xid (PCI:0000:{bus:02x}:00): {int(code)}, pid=1, name=python3, {words}")
    nvml_says(f"event {events + 1} {int(gpu)} {int(code)}")
    return f"Xid {code} on GPU {gpu}"


def ecc(gpu: str, kind: str = "uncorrected", count: str = "1") -> str:
    """Count memory errors."""
    key = {"corrected": "cor", "uncorrected": "unc"}[kind]
    nvml_says(f"{int(gpu)}.ecc_{key}_vol {int(count)}", f"{int(gpu)}.ecc_{key}_agg {int(count)}")
    return f"{count} {kind} memory errors on GPU {gpu}"


def heat(gpu: str, celsius: str = "92") -> str:
    """Heat a device up; it switches itself off at 95 degrees."""
    nvml_says(f"{int(gpu)}.temperature {int(celsius)}")
    return f"GPU {gpu} at {celsius} degrees"


def lose(gpu: str) -> str:
    """Take a device away."""
    nvml_says(f"{int(gpu)}.lost 1")
    return f"GPU {gpu} is lost"


DO: Final[Mapping[str, Callable[..., str]]] = MappingProxyType(
    {"xid": xid, "ecc": ecc, "heat": heat, "lose": lose}
)


def main() -> int:
    """Do one thing and say it."""
    name, *given = sys.argv[1:] or ["nothing"]
    try:
        print(DO[name](*given))
    except (KeyError, TypeError, ValueError) as error:
        print(f"inject: {' '.join(sys.argv[1:])} cannot be done ({error})", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"inject: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
