"""Which modules are the embedding, the hidden layers and the output: by structure and by use.

Hidden layers are the outermost modules of one type that repeat side by side and hold most of the
parameters.  The rest shows in one forward pass: the embedding turns integers into numbers, and
the output is what the model returns, or else the last matrix after the hidden layers.  No list of
names is consulted; what a model does not have is simply not checked.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from scout.replay.tree import tensors_of
from scout.settings import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The modules of each recipe, as (name, module)."""

    modules: dict[Recipe, tuple[tuple[str, Any], ...]]

    @property
    def missing(self) -> tuple[Recipe, ...]:
        """Recipes for which the model has no module."""
        wanted = (Recipe.EMBEDDING, Recipe.HIDDEN, Recipe.OUTPUT)
        return tuple(recipe for recipe in wanted if not self.modules.get(recipe))


def hidden_layers(model: Any) -> tuple[tuple[str, Any], ...]:
    """Return the repeated layers, in order; empty when nothing repeats."""
    runs = [*_runs(model, "", lambda module: any(True for _ in module.children()))]
    if not runs:  # a plain stack of matrices repeats leaves
        runs = [*_runs(model, "", lambda module: any(True for _ in module.parameters()))]
    return max(runs, key=lambda run: sum(size_of(it) for _, it in run), default=())


def _runs(
    module: Any, prefix: str, counts: Callable[[Any], bool]
) -> Iterable[tuple[tuple[str, Any], ...]]:
    """Yield every group of two and more children of one type and of the same parameters."""
    alike: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
    for name, child in module.named_children():
        if counts(child) and size_of(child):
            shapes = tuple((tuple(it.shape), it.dtype) for it in child.parameters())
            alike.setdefault((type(child), shapes), []).append((f"{prefix}{name}", child))
    found = [tuple(run) for run in alike.values() if len(run) > 1]
    yield from found
    inside = {id(it) for run in found for _, it in run}
    for name, child in module.named_children():
        if id(child) not in inside:
            yield from _runs(child, f"{prefix}{name}.", counts)


def size_of(module: Any) -> int:
    """Return how many parameters a module has."""
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(slots=True)
class Discovery:
    """Watches one forward pass of the model, then knows the catalogue.

    ``done`` is called once with it, and every hook is gone by then.
    """

    model: Any
    done: Callable[[Catalogue], None]
    _handles: list[Any] = field(default_factory=list)
    _hidden: tuple[tuple[str, Any], ...] = ()
    _seen: list[tuple[str, Any, bool, set[int]]] = field(default_factory=list)
    _last_hidden: int = 0

    def start(self) -> None:
        """Put the hooks in place."""
        self._hidden = hidden_layers(self.model)
        within = {id(it) for _, layer in self._hidden for it in layer.modules()}
        layers = {id(layer) for _, layer in self._hidden}
        for name, module in self.model.named_modules():
            if id(module) in layers:
                self._handles.append(module.register_forward_hook(self._layer_ran))
            elif id(module) not in within and name:
                leaf = _Leaf(self, name)
                self._handles.append(module.register_forward_hook(leaf, with_kwargs=True))
        self._handles.append(self.model.register_forward_hook(self._model_ran))

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def note(self, name: str, module: Any, inputs: Any, output: Any) -> None:
        """A module outside the hidden layers ran."""
        reads_integers = any(
            not it.is_floating_point() and not it.is_complex() and it.numel()
            for it in tensors_of(inputs)
        )
        outputs = {id(it) for it in tensors_of(output) if it.is_floating_point()}
        if size_of(module):
            self._seen.append((name, module, reads_integers, outputs))

    def _layer_ran(self, *_args: Any) -> None:
        self._last_hidden = len(self._seen)

    def _model_ran(self, _model: Any, _inputs: Any, output: Any) -> None:
        if not self._handles:
            return
        self.stop()
        returned = {id(it) for it in tensors_of(output)}
        modules = {Recipe.HIDDEN: self._hidden}
        if (embedding := self._embedding()) is not None:
            modules[Recipe.EMBEDDING] = (embedding,)
        if (head := self._output(returned)) is not None:
            modules[Recipe.OUTPUT] = (head,)
        self._seen.clear()
        self.done(Catalogue(modules=modules))

    def _embedding(self) -> tuple[str, Any] | None:
        """Return the largest module that reads integers and holds no other such module."""
        readers = [it for it in self._seen if it[2] and it[3] and not self._is_around(it[1])]
        largest = max(readers, key=lambda it: size_of(it[1]), default=None)
        return None if largest is None else largest[:2]

    def _output(self, returned: set[int]) -> tuple[str, Any] | None:
        """Return the module whose result the model returns, or the last matrix after the layers."""
        candidates = [it for it in self._seen if not self._is_around(it[1]) and not it[2]]
        for name, module, _, outputs in reversed(candidates):
            if outputs & returned:
                return name, module
        for name, module, _, outputs in reversed(self._seen[self._last_hidden :]):
            matrix = any(it.dim() > 1 for it in module.parameters(recurse=False))
            if matrix and outputs and not any(True for _ in module.children()):
                return name, module
        return None

    def _is_around(self, module: Any) -> bool:
        """Whether a module holds hidden layers, or another module that was seen."""
        inner = {id(it) for it in module.modules()} - {id(module)}
        around_layer = any(id(layer) in inner for _, layer in self._hidden)
        return around_layer or any(id(it[1]) in inner for it in self._seen)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A forward hook that knows its module's name."""

    discovery: Discovery
    name: str

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self.discovery.note(self.name, module, (args, kwargs), output)
