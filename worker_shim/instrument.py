"""Progress without a change in the script: torch's own hooks, if the script has torch.

Importing this module loads no torch, and neither does calling it: a torch that the script has
imported is looked up, never loaded.  What is read from torch is guarded, private names most of
all; where one is missing the page says less and training goes on.
"""

import logging
import struct
import sys
import threading
import weakref
from types import ModuleType
from typing import Any, Final

from scout.hang import Phase
from scout.progress import PageWriter
from worker_shim.session import StepCounter

_log: Final = logging.getLogger("outrider")


class StepHook:
    """Publishes the job's step after every step of the script's first optimizer.

    A script may step several optimizers in one iteration; the first one seen stands for all of
    them, and when it is gone the next one seen takes its place.
    """

    def __init__(self, steps: StepCounter, page: PageWriter) -> None:
        self._steps = steps
        self._page: PageWriter | None = page
        self._first: weakref.ref[object] | None = None
        self._installing = threading.Lock()
        self.installed = False

    def install(self) -> None:
        """Register with torch once it is completely imported; until then do nothing.

        Registering changes a dictionary that a step iterates over, so it is best done by the
        training thread; the background thread does it only for a script that makes no call of
        ours after importing torch, long before such a script's first step.
        """
        if self.installed or not self._installing.acquire(blocking=False):
            return
        try:
            optimizer = _imported("torch.optim.optimizer")
            if self.installed or optimizer is None or _imported("torch") is None:
                return
            self.installed = True
            register = getattr(optimizer, "register_optimizer_step_post_hook", None)
            if register is None:
                _log.warning("outrider: this torch has no optimizer step hook; progress is unknown")
                return
            register(self)
        finally:
            self._installing.release()

    def __call__(self, optimizer: object, _args: Any, _kwargs: Any) -> None:
        """Count and publish one step.  Called by torch in the training thread."""
        first = self._first() if self._first is not None else None
        if first is None:
            self._first = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        step = self._steps.advance()
        page = self._page
        if page is None:
            return
        try:
            page.publish(step, Phase.OPTIMIZER)
        except (ValueError, struct.error) as error:
            self._page = None
            _log.warning("outrider: progress is no longer published: %s", error)

    def silence(self) -> None:
        """Publish nothing from now on: in a forked child the page is not ours."""
        self._page = None


def collective_sequence() -> int | None:
    """Return how many collectives the default process group has entered, or None.

    The number grows with every collective, those started in C++ included, and may be read while
    the training thread waits in one.  A rank whose number is behind is the one waited for.
    """
    distributed = _imported("torch.distributed.distributed_c10d")
    if distributed is None:
        return None
    try:
        if not distributed.is_initialized():
            return None
        sequence = distributed._get_default_group()._get_sequence_number_for_group()  # noqa: SLF001 - there is no public name
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return sequence if isinstance(sequence, int) and sequence >= 0 else None


def _imported(name: str) -> ModuleType | None:
    """Return a module whose import is complete: half of one must not be touched."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module
