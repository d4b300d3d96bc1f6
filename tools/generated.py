"""Committed files that a program writes: written anew, or compared with what it would write."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


def write_or_compare(
    argv: Sequence[str] | None, program: str, target: str, files: Mapping[Path, str]
) -> int:
    """Write ``files`` (path -> text), or with ``--check`` say which differ; return the exit status.

    ``program`` is the module that is run, ``target`` the make target that writes them.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--check", action="store_true", help="compare only")
    if not parser.parse_args(argv).check:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
        return 0
    stale = [path for path, text in files.items() if not _says(path, text)]
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        print(f"not what {program} writes: {names}; run `make {target}`")
    return 1 if stale else 0


def _says(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text
