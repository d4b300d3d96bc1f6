"""Writes `requirements.lock`: what plain pip resolves today from pyproject.toml's requirements.

A fresh environment is made, the base and ``dev`` requirements are installed, and what is there is
written down.  Local version labels (``+cpu``) are cut off, so that any index's build of the same
release satisfies the pin.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
HEADER: Final = (
    "# Every package of the development environment, exactly.  Made by `make lock`; "
    "do not edit by hand.\n"
)


def requirements(pyproject: str) -> list[str]:
    """Return the base and development requirements that ``pyproject`` states."""
    document = tomllib.loads(pyproject)
    project = document["project"]
    build = document["build-system"]["requires"]
    return [*build, *project["dependencies"], *project["optional-dependencies"]["dev"]]


def locked(freeze: Iterable[str]) -> str:
    """Return the lock file for the lines of a ``pip freeze``."""
    pinned = [re.sub(r"\+.*$", "", line.strip()) for line in freeze if "==" in line]
    return HEADER + "".join(f"{line}\n" for line in sorted(pinned, key=str.lower))


def main() -> int:
    """Resolve, install, write down."""
    wanted = requirements((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *wanted], check=True)
        subprocess.run([*pip, "check"], check=True)
        frozen = subprocess.run(
            [*pip, "freeze", "--all", "--exclude", "pip"],
            check=True,
            capture_output=True,
            text=True,
        )
    text = locked(frozen.stdout.splitlines())
    (ROOT / "requirements.lock").write_text(text, encoding="utf-8")
    print(f"requirements.lock: {len(text.splitlines()) - 1} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
