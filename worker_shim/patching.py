"""Putting something of ours around a function of torch's, and taking it away again.

A function is replaced where it is defined, where its package shows it, and in every loaded module
that imported it by name.  A torch that the script has imported is looked up, never loaded.
"""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

MODULES_MAX: Final = 20_000
"""Loaded modules that are searched for a name imported before us; torch alone brings 2,000."""
NAMES_MAX: Final = 5_000
"""Names of one module that are searched; larger ones are generated and import nothing of torch."""

_log: Final = logging.getLogger("outrider")


class Watcher:
    """What one kind of hook does; the first error ends it, and it says so once."""

    def __init__(self, subject: str) -> None:
        self.alive = True
        self._subject = subject
        self._failing = threading.Lock()

    def fail(self, error: Exception) -> None:
        """Stop watching."""
        with self._failing:
            if self.alive:
                self.alive = False
                _log.warning(
                    "outrider: %s no longer watched: %s: %s",
                    self._subject,
                    type(error).__name__,
                    error,
                )


class Patches:
    """Everything that was replaced, so that it can be put back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def later(self, undo: Callable[[], None]) -> None:
        """Remember how to take something away."""
        self._undo.append(undo)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute; on removal the old value comes back, unless somebody changed it.

        What comes back is what stood there, not what a look at it returns: a method of a class
        in C++ is bound only as the former.
        """
        stood_there = name in vars(owner)
        old = vars(owner).get(name)
        setattr(owner, name, value)

        def undo() -> None:
            if vars(owner).get(name) is not value:
                return
            if stood_there:
                setattr(owner, name, old)
            else:
                delattr(owner, name)

        self.later(undo)

    def replace_function(self, module: ModuleType, name: str, make: Callable[[Any], Any]) -> bool:
        """Replace ``module.name`` by what ``make`` returns for it, wherever it was imported."""
        original = getattr(module, name, None)
        if original is None:
            return False
        replacement = functools.wraps(original)(make(original))
        for owner, alias in SURVEY.importers(original):
            self.put(owner, alias, replacement)
        return True

    def remove(self) -> None:
        """Put everything back, the last one first."""
        while self._undo:
            try:
                self._undo.pop()()
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                _log.warning("outrider: a hook stays in place: %s", error)


class Survey:
    """Who has which of torch's functions, looked up once for every process forked from this one.

    A look at every name counts references, and so copies every page that a fork shared: some
    14,000 page faults, two thirds of what a worker does before its first step.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        """Module -> its number of names when it was looked at; one that grew is looked at again."""
        self._owners: dict[FunctionType, list[tuple[ModuleType, str]]] = {}

    def take(self) -> None:
        """Look at everything that is loaded now."""
        for key, module, names in _modules():
            self._sizes[key] = len(names)
            for name, value in names.copy().items():
                if type(value) is FunctionType and str(value.__module__).startswith("torch"):
                    self._owners.setdefault(value, []).append((module, name))

    def importers(self, function: Any) -> list[tuple[ModuleType, str]]:
        """Return every module of a bounded number in which ``function`` has a name."""
        known = self._owners.get(function) if type(function) is FunctionType else None
        found = [it for it in known or () if vars(it[0]).get(it[1]) is function]
        seen = set(found)
        for key, module, names in _modules():
            if known is None or self._sizes.get(key) != len(names):
                every = [(module, name) for name, it in names.copy().items() if it is function]
                found += [it for it in every if it not in seen]
        return found


SURVEY: Final = Survey()


def _modules() -> Iterator[tuple[str, ModuleType, dict[str, Any]]]:
    """Yield the key, the module and the names of every loaded module that is worth a look."""
    for key, module in list(sys.modules.items())[:MODULES_MAX]:
        try:
            # The plain look does not wake a module that loads itself when it is looked at.
            names = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if type(names) is dict and len(names) <= NAMES_MAX:
            yield key, module, names


def imported(name: str) -> ModuleType | None:
    """Return a module whose import is complete: half of one must not be touched."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


def is_traced(torch: ModuleType) -> Callable[[], bool]:
    """Return what is true only where torch traces the code that asks, and costs next to nothing.

    ``torch.compiler.is_compiling`` is true in an export as well, where our hooks run as they are
    and leave no trace anyway; it costs several calls.
    """
    asks: Callable[[], bool] | None = getattr(torch.compiler, "is_dynamo_compiling", None)
    return torch.compiler.is_compiling if asks is None else asks
