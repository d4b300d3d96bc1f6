"""What a worker runs: the user's command line, checked before anything starts.

Decides how a script, a module or a plain program becomes an argument vector, as torchrun does.
It refuses to know how processes are started.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
            with contextlib.suppress(OSError):
                digest.update(Path(argument).read_bytes())
            break
    return digest.hexdigest()[:12]


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise CommandError(f"program {name!r} is not on PATH or is not executable")
    return found


def _module(name: str) -> str:
    # Only the top-level name is looked up: finding a submodule would import its parents here.
    top = name.partition(".")[0]
    beside = Path(top)
    if beside.is_dir() or beside.with_suffix(".py").is_file():
        return name
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise CommandError(f"module {name!r} is not importable; is its package installed here?")
    return name


def _script(name: str) -> str:
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise CommandError(f"training script {name!r} is a directory")
    if not path.exists():
        hint = "" if path.suffix == ".py" else "; for a program that is not Python use --no-python"
        raise CommandError(f"training script {name!r} does not exist{hint}")
    if not os.access(path, os.R_OK):
        raise CommandError(f"training script {name!r} cannot be read")
    return name
