"""Whether a folder that does not exist yet could be made and written, asked without making it."""

import os
from pathlib import Path

from sidecar.given_files import system_reason


def folder_problem(folder: Path) -> str | None:
    """Return why ``folder`` (absolute) cannot be made and written, None where it can."""
    for place in (folder, *folder.parents):
        try:
            place.stat()
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            return f"{folder} cannot be used ({system_reason(error)})"
        if not place.is_dir():
            return f"{folder} cannot be made: {place} is not a directory"
        if not os.access(place, os.W_OK | os.X_OK):
            return f"{folder} cannot be written: {place} does not let us"
        return None
    return None
