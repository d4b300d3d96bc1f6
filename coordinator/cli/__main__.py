"""``python -m coordinator.cli`` is ``outrider``, also where its script is not on the path."""

from coordinator.cli.start import entry

entry()
