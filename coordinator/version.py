"""The version that logs, metrics and the API name."""

from importlib import metadata


def version() -> str:
    """Return the installed distribution's version, or ``unknown`` in a bare source tree."""
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:
        return "unknown"
