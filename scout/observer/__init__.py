"""Hang detection for jobs without a coordinator: a process of its own beside every rank.

``start_observer()`` in the training script, before ``worker_shim.attach()``, is all there is to
it.  The observer reads the rank's progress page, exchanges what it sees with the observers of the
other ranks, judges as a coordinator would, and writes what it found into a file.  Whatever
becomes of it, training goes on.
"""

from scout.observer.config import ObserverConfig
from scout.observer.start import ObserverHandle, start_observer

__all__ = ["ObserverConfig", "ObserverHandle", "start_observer"]
