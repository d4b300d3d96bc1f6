"""Micro-phases inside forward and backward, at a price that does not grow with the model.

Torch's global module hooks would see every module, but while one is registered each call of each
module pays for it, and `torch.compile` warns and compiles again when it comes or goes.  So the
model is looked up once, from the parameters of the script's optimizer, and hooks go on its
outermost module and on the block that it repeats (the class with children whose instances hold
the most parameters): a handful of calls a step.

Inside backward a hook on one parameter of each block tells that its gradient is complete.  A
full-backward hook would wrap the block's inputs and outputs in views, which costs memory and
forbids changing them in place; this one leaves the graph, and so the numbers, as they are.

A hook that torch traces leaves no trace, and a pickled model forgets its hooks.
"""

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, Self

from scout.hang import Phase
from worker_shim.patching import Patches, Watcher, is_traced
from worker_shim.track import Track

LAYERS_MAX: Final = 2
"""Hooked blocks of one model, evenly spaced: with its beginning, its end and the group's counts
they show movement in a pass that takes minutes.  A call out of C++ costs up to 30 µs when the
caches are cold, so one that takes milliseconds should not make many."""
ROOTS_MAX: Final = 8
"""Models of one optimizer."""
LOOKS_MAX: Final = 16
"""Searches for a model in one process; each takes a tenth of a second at most."""

_BACKWARD: Final = int(Phase.BACKWARD)
_thread: Final = threading.get_ident
_NEVER_CALLED: Final = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})


class _Hook:
    """What stays on a model.  Copied, it is itself; pickled, it becomes a call that does nothing.

    The price of a hook is paid dozens of times a step, so what repeats itself ends early here.
    """

    __slots__ = ("_is_compiling", "_on_change", "_track")

    def __init__(
        self, track: Track, is_compiling: Callable[[], bool], on_change: Callable[[Any], None]
    ) -> None:
        self._track = track
        self._is_compiling = is_compiling
        self._on_change = on_change

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A model saved whole must load where we are not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


class _ForwardHook(_Hook):
    __slots__ = ()

    def __call__(self, module: Any, _args: Any) -> None:
        if self._is_compiling():
            return
        track = self._track
        if _thread() == track.thread:
            track.moves += 1
            if track.phase != track.forward_phase:
                self._on_change(module)


class _GradientHook(_Hook):
    __slots__ = ()

    def __call__(self, parameter: Any) -> None:
        if self._is_compiling():
            return
        track = self._track
        track.moves += 1
        if track.phase != _BACKWARD:
            self._on_change(parameter)


class LayerWatch(Watcher):
    """Finds the model and keeps its hooks."""

    def __init__(self, track: Track, torch: ModuleType) -> None:
        super().__init__("forward and backward passes are")
        self._track = track
        self._torch = torch
        self._is_compiling = is_traced(torch)
        self._has_gradients = torch.is_grad_enabled
        self._handles: list[Any] = []
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._looks = 0
        self._silent_steps = 0
        self._passes = 0
        """Forward passes seen, so that hooks that fall silent are noticed."""
        self._passes_before = 0
        self._looking = threading.Lock()
        self._forward = _ForwardHook(track, self._is_compiling, self._on_forward)
        self._gradient = _GradientHook(track, self._is_compiling, self._on_gradient)

    # --- what torch calls -----------------------------------------------------------------

    def _on_forward(self, module: Any) -> None:
        self._passes += 1
        is_evaluating = not (module.training or self._has_gradients())
        self._track.mark(Phase.EVALUATE if is_evaluating else self._track.forward_phase)

    def _on_gradient(self, _parameter: Any) -> None:
        self._track.mark(Phase.BACKWARD)

    def around_backward(self, original: Any) -> Any:
        """Return `torch.autograd.backward` with its beginning and end published."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            track = self._track
            if self._is_compiling() or not self.alive or _thread() != track.thread:
                return original(*args, **kwargs)
            around = track.forward_phase
            track.forward_phase = Phase.BACKWARD
            track.mark(Phase.BACKWARD)
            try:
                return original(*args, **kwargs)
            finally:
                track.forward_phase = around
                track.mark(Phase.BACKWARD)

        return backward

    # --- finding the model ----------------------------------------------------------------

    def look(self, optimizer: Any) -> None:
        """Find and hook the models whose parameters ``optimizer`` holds."""
        if not self.alive or self._looks >= LOOKS_MAX or not self._looking.acquire(blocking=False):
            return
        try:
            self._looks += 1
            self._hook(optimizer)
        except Exception as error:  # noqa: BLE001 - training must not see it, whatever it is
            self.fail(error)
        finally:
            self._looking.release()

    def stepping(self, optimizer: Any) -> None:
        """Look again when no hook was heard of since the last step: the model is another one.

        A model that is compiled whole is never heard of, so looks become rarer.
        """
        if self._passes != self._passes_before:
            self._passes_before, self._silent_steps = self._passes, 0
            return
        self._silent_steps += 1
        if self._silent_steps.bit_count() == 1:
            self.look(optimizer)

    def _hook(self, optimizer: Any) -> None:
        module_class = self._torch.nn.Module
        held = {id(it) for group in optimizer.param_groups for it in group["params"]}
        modules = [it for it in _living(module_class) if "_modules" in it.__dict__]
        children = {id(it) for module in modules for it in module._modules.values()}  # noqa: SLF001 - `children` is a generator per module
        roots = [it for it in modules if id(it) not in children and _holds_any(it, held)]
        for root in roots[:ROOTS_MAX]:
            for layer in (root, *_spread(repeated_layers(root))):
                self._hook_one(layer, is_root=layer is root)

    def _hook_one(self, layer: Any, *, is_root: bool) -> None:
        if layer in self._hooked:
            return
        try:
            self._handles.append(layer.register_forward_pre_hook(self._forward))
        except (AttributeError, RuntimeError):
            return  # a scripted module takes no hooks
        self._hooked.add(layer)
        parameter = next((it for it in layer.parameters() if it.requires_grad), None)
        if parameter is not None and not is_root and parameter.is_leaf:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient))

    # --- going away -----------------------------------------------------------------------

    def remove(self) -> None:
        """Take every hook off."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._hooked.clear()

    def around_script(self, original: Any) -> Any:
        """Return `torch.jit.script`, which would compile our hooks, with the hooks put aside."""

        def script(*args: Any, **kwargs: Any) -> Any:
            self.remove()
            return original(*args, **kwargs)

        return script

    def install(self, patches: Patches) -> None:
        """Watch backward, and look for a model whenever an optimizer is made."""
        torch = self._torch
        patches.replace_function(torch.autograd, "backward", self.around_backward)
        patches.replace_function(torch.jit, "script", self.around_script)
        optimizer_class = torch.optim.Optimizer
        made = optimizer_class.__init__

        @functools.wraps(made)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - its name
            made(optimizer, *args, **kwargs)
            if not self._is_compiling():
                self.look(optimizer)

        patches.put(optimizer_class, "__init__", __init__)
        patches.later(self.remove)


def _living(module_class: type) -> Iterator[Any]:
    """Yield every module that is alive, by a look at types that wakes no lazy object."""
    known: dict[type, bool] = {}
    for item in gc.get_objects():
        kind = type(item)
        is_module = known.get(kind)
        if is_module is None:
            is_module = known[kind] = module_class in getattr(kind, "__mro__", ())
        if is_module:
            yield item


def _holds_any(module: Any, held: set[int]) -> bool:
    return any(id(it) in held for it in module.parameters())


# --- the repeated block ---------------------------------------------------------------------


@dataclass(slots=True)
class _Kind:
    layers: list[Any] = field(default_factory=list)
    parameters: int = 0


def repeated_layers(root: Any) -> Sequence[Any]:
    """Return the instances of the block that ``root`` repeats, in order; empty if there is none.

    Of all classes with children that occur at least twice outside one another, the one whose
    instances hold the most parameters; of several, the one with the most instances.  A plain
    sequence stands for a block only where nothing else does.
    """
    kinds: dict[type, _Kind] = {}
    _collect(root, kinds, frozenset(), set())
    repeated = {kind: it for kind, it in kinds.items() if len(it.layers) > 1}
    proper = [it for kind, it in repeated.items() if kind.__name__ != "Sequential"]
    best = max(
        proper or repeated.values(), key=lambda it: (it.parameters, len(it.layers)), default=None
    )
    if best is None:
        return ()
    return best.layers


def _spread(layers: Sequence[Any]) -> Sequence[Any]:
    """Return `LAYERS_MAX` of the layers; the first follows the model's own beginning too soon."""
    later = layers[1:]
    apart = max(1, -(-len(later) // LAYERS_MAX))
    return later[apart // 2 :: apart]


def _collect(
    module: Any, kinds: dict[type, _Kind], inside: frozenset[type], visited: set[int]
) -> int:
    """Note the outermost instances of each class under ``module``; return its parameters."""
    if id(module) in visited:
        return 0
    visited.add(id(module))
    kind = type(module)
    counts = bool(module._modules) and kind.__name__ not in _NEVER_CALLED and kind not in inside  # noqa: SLF001 - `named_children` drops shared ones
    within = inside | {kind} if counts else inside
    if counts:
        kinds.setdefault(kind, _Kind()).layers.append(module)
    size = sum(_own_sizes(module))
    for child in module._modules.values():  # noqa: SLF001 - as above
        if child is not None:
            size += _collect(child, kinds, within, visited)
    if counts:
        kinds[kind].parameters += size
    return size


def _own_sizes(module: Any) -> Iterable[int]:
    for parameter in module._parameters.values():  # noqa: SLF001 - `parameters` recurses
        if parameter is not None:
            try:
                yield int(parameter.numel())
            except (RuntimeError, ValueError):
                continue  # a lazy parameter has no size yet
