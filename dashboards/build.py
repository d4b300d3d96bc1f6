"""Writes every dashboard's JSON beside its builder, or checks that the committed one is the same.

python -m dashboards.build            write
python -m dashboards.build --check    compare, and say which one differs
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import (
    checkpoints,
    control_plane,
    incident,
    localize,
    node,
    overview,
    recovery,
)
from dashboards.parts import Builder

FOLDER: Final = Path(__file__).resolve().parent

DASHBOARDS: Final[Mapping[str, Callable[[], Builder]]] = {
    f"{overview.UID}.json": overview.overview,
    f"{localize.UID}.json": localize.localize,
    f"{node.UID}.json": node.node,
    f"{checkpoints.UID}.json": checkpoints.checkpoints,
    f"{recovery.UID}.json": recovery.recovery,
    f"{control_plane.UID}.json": control_plane.control_plane,
    f"{incident.UID}.json": incident.incident,
}
"""File name -> builder."""


def render(builder: Callable[[], Builder]) -> str:
    """Return the JSON text of one dashboard, the same for the same builder."""
    return f"{JSONEncoder(sort_keys=True, indent=2).encode(builder().build())}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.build")
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args(argv)
    stale: list[str] = []
    for name, builder in DASHBOARDS.items():
        path = FOLDER / name
        text = render(builder)
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
            print(f"wrote dashboards/{name}")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        print(f"not what the builders print: {', '.join(stale)}; run `make dashboards`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
