"""``pod_resourceconfig.json``: the table of node addresses, as scripts for HyperPod read it.

Whole or not at all, also over a power cut: written aside, flushed to the disk, renamed, and the
folder flushed.  ``ips`` is ordered by group rank, ``ips_timestamp`` is the table's version, or the
operator's own token for it.
"""

import json
import os
from pathlib import Path
from typing import Final

from sidecar.rank_table import RankTable

NAME: Final = "pod_resourceconfig.json"


def write_resource_config(folder: Path | None, table: RankTable, group_rank: int) -> None:
    """Write ``table`` into ``folder``; without one, nothing.  Raises `OSError`.

    ``group_rank`` is that of the node itself.
    """
    if folder is None or not table.hosts:
        return
    own = table.hosts[group_rank] if group_rank < len(table.hosts) else None
    written = {
        "ips": list(table.hosts),
        "current_pod_ip": own,
        "ips_timestamp": table.token,
    }
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{NAME}.{os.getpid()}"
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(written, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / NAME)
    finally:
        draft.unlink(missing_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
