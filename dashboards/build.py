"""Writes every dashboard's JSON beside its builder, or checks that the committed one is the same.

python -m dashboards.build            write
python -m dashboards.build --check    compare, and say which one differs
"""

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
from tools.generated import write_or_compare

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
    files = {FOLDER / name: render(builder) for name, builder in DASHBOARDS.items()}
    return write_or_compare(argv, "dashboards.build", "dashboards", files)


if __name__ == "__main__":
    sys.exit(main())
