"""``pod_resourceconfig.json``: the table of node addresses, as scripts for HyperPod read it.

Whole or not at all, also over a power cut: written aside, flushed to the disk, renamed, and the
folder flushed.  ``ips`` is ordered by group rank, ``ips_timestamp`` is the topology version.
"""

import json
import os
from pathlib import Path
from typing import Final

from sidecar.api import Start

NAME: Final = "pod_resourceconfig.json"


def write_resource_config(folder: Path | None, start: Start) -> None:
    """Write the table of ``start`` into ``folder``; without one, nothing.  Raises `OSError`."""
    if folder is None or not start.node_hosts:
        return
    hosts = start.node_hosts
    own = hosts[start.group_rank] if start.group_rank < len(hosts) else None
    table = {
        "ips": list(hosts),
        "current_pod_ip": own,
        "ips_timestamp": str(start.topology_version),
    }
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{NAME}.{os.getpid()}"
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(table, file)
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
