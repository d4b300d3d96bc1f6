"""Builds the stand-in for NVIDIA's library and writes the script that it answers from.

Used by tests and by whoever wants to show hardware faults on a machine without a GPU.  The loader
finds the library by the environment of a process that is started afterwards, so it is the helper
that meets it and not the test.
"""

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("fakenvml.c")
COMPILE_S = 60
WELL = {
    "temperature": 55,
    "shutdown": 95,
    "power": 700_000,
    "ecc_unc_vol": 0,
    "ecc_unc_agg": 0,
    "ecc_cor_vol": 0,
    "ecc_cor_agg": 0,
    "remap_failure": 0,
    "pcie_replay": 0,
    "throttle": 0,
    "nvlinks": 4,
    "links_replay": 0,
    "links_recovery": 0,
    "links_crc_flit": 0,
    "links_crc_data": 0,
    "fabric_state": 3,
    "fabric_summary": 1,
    "field230": 0,
}


def compiler() -> str | None:
    """Return the system's C compiler, if there is one."""
    return shutil.which("gcc") or shutil.which("cc")


@functools.cache
def library_folder() -> Path:
    """Build the library once per process and return the folder it is in."""
    folder = Path(tempfile.mkdtemp(prefix="fakenvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program = compiler()
    assert program is not None
    subprocess.run(
        [program, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread",
         "-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1", SOURCE],
        check=True,
        timeout=COMPILE_S,
    )  # fmt: skip
    return folder


class FakeNvml:
    """The script of one imaginary node.  `environment` makes a process meet it."""

    def __init__(self, folder: Path, count: int = 8) -> None:
        self.script = folder / "nvml-script"
        self.rules: dict[str, object] = {"node.count": count}
        self.rules.update({f"all.{key}": value for key, value in WELL.items()})
        self.events: list[tuple[int, int]] = []
        self.write()

    @property
    def environment(self) -> dict[str, str]:
        folders = [str(library_folder()), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_LIBRARY_PATH": ":".join(folder for folder in folders if folder),
            "FAKE_NVML_SCRIPT": str(self.script),
        }

    def set(self, **rules: object) -> None:
        """Change what is answered: ``gpu3_temperature=93``, ``all_…``, ``node_…``; None removes."""
        for name, value in rules.items():
            owner, _, key = name.partition("_")
            rule = f"{owner.removeprefix('gpu')}.{key}"
            if value is None:
                self.rules.pop(rule, None)
            else:
                self.rules[rule] = value
        self.write()

    def raise_xid(self, place: int, xid: int) -> None:
        self.events.append((place, xid))
        self.write()

    def write(self) -> None:
        lines = [f"{rule} {value}" for rule, value in self.rules.items()]
        lines += [
            f"event {number} {place} {xid}" for number, (place, xid) in enumerate(self.events, 1)
        ]
        new = self.script.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        new.replace(self.script)
