"""What a worker runs: the user's command line, checked before anything starts.

Decides how a script, a module or a plain program becomes an argument vector, as torchrun does.
It refuses to know how processes are started.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from sidecar.given_files import GivenFileError, read_given

LOOK_S_MAX: Final = 60.0
"""Longest wait for a package that only its own import can find modules in."""
SCRIPT_BYTES_MAX: Final = 16 << 20


class CommandError(ValueError):
    """The command cannot be run; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """The user's command.  ``argv[0]`` is a script, a module or a program.

    ``module`` runs ``argv[0]`` as ``python -m``; ``no_python`` runs it as a program.
    """

    argv: tuple[str, ...]
    module: bool = False
    no_python: bool = False

    def resolve(self, python: str = sys.executable) -> tuple[str, ...]:
        """Return the argument vector to execute.  Raises `CommandError`."""
        if not self.argv or not self.argv[0]:
            raise CommandError("no training script given; put it after `--`")
        if self.module and self.no_python:
            raise CommandError("--module and --no-python exclude each other; give one of them")
        target, *arguments = self.argv
        if self.no_python:
            return (_program(target), *arguments)
        if self.module:
            return (python, "-u", "-m", _module(target), *arguments)
        return (python, "-u", _script(target), *arguments)


def script_version(argv: Sequence[str]) -> str:
    """Return a digest of a command line and of the script's own file, 12 hexadecimal digits.

    What the script imports is not read: it tells an edited script from the same one, no more.
    """
    digest = hashlib.sha256("\0".join(argv).encode(errors="surrogateescape"))
    for argument in argv[1:]:
        if argument.endswith(".py"):
            with contextlib.suppress(GivenFileError):
                digest.update(read_given(Path(argument), SCRIPT_BYTES_MAX))
            break
    return digest.hexdigest()[:12]


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise CommandError(f"program {name!r} is not on PATH or is not executable")
    return found


def _module(name: str) -> str:
    """Return ``name`` where ``python -m`` will find something to run under it."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise CommandError(f"module {name!r} is not a module's name; write it as in an import")
    if not _is_found(name) and not _is_found_by_import(name):
        raise CommandError(
            f"module {name!r} is not importable, or is a package without __main__; "
            "is it installed here?"
        )
    return name


def _is_found(name: str) -> bool:
    """Look for the module's file as Python would, and import nothing for it.

    False does not mean that there is none: a package may make its own modules when it is imported.
    """
    places: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    top, *rest = name.split(".")
    if not rest and top in sys.builtin_module_names:
        return True
    for part in [top, *rest]:
        if places is None:  # a module, and no package
            return False
        try:
            spec = PathFinder.find_spec(part if part == top else f"{top}.{part}", places)
        except (ImportError, ValueError):
            return False
        if spec is None:
            return False
        places = spec.submodule_search_locations
    if places is None:
        return True
    main = PathFinder.find_spec(f"{name}.__main__", places)
    return main is not None


def _is_found_by_import(name: str) -> bool:
    """Ask a Python of its own: finding a submodule imports the packages that it is in."""
    code = (
        "import importlib.util, sys\n"
        "sys.path.insert(0, '')\n"
        "spec = importlib.util.find_spec(sys.argv[1])\n"
        "if spec and spec.submodule_search_locations is not None:\n"
        "    spec = importlib.util.find_spec(sys.argv[1] + '.__main__')\n"
        "sys.exit(spec is None)\n"
    )
    try:
        asked = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-c", code, name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LOOK_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # a package that takes so long to import is there
    return asked.returncode == 0


def _script(name: str) -> str:
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise CommandError(f"training script {name!r} is a directory")
    if not path.exists():
        hint = "" if path.suffix == ".py" else "; for a program that is not Python use --no-python"
        raise CommandError(f"training script {name!r} does not exist{hint}")
    if not path.is_file() and not path.is_dir():
        raise CommandError(f"training script {name!r} is a device or a pipe, not a file")
    if not os.access(path, os.R_OK):
        raise CommandError(f"training script {name!r} cannot be read")
    return name
