"""The model, looked up once, and how far a pass through it is, at next to no price.

Torch's global module hooks would see every module, but while one is registered each call of each
module pays for it, and `torch.compile` warns and compiles again when it comes or goes; even a hook
on a single module makes its call take torch's slow path.  So a training step's forward pass is
watched from outside (`stack_sample`): the model is looked up once, from the parameters of the
script's optimizer, and with it the block that it repeats (the class with children whose instances
hold the most parameters), so that movement from one block to the next is seen.

Inside backward there is no Python on the stack that moves.  There the gradient of one parameter of
a few blocks tells that it is complete, to a function in C that only puts it into a queue of one: a
hook written in Python costs up to 30 µs a step when the caches are cold.  A full-backward hook
would wrap the block's inputs and outputs in views, which costs memory and forbids changing them in
place; this one leaves the graph, and so the numbers, as they are.

No step ends while a model is evaluated, and a pass may be too short to be seen from outside.  So a
model that its script sends into evaluation has a hook until it comes back to training.  A hook
that torch traces leaves no trace, and a pickled model forgets it.
"""

import contextlib
import functools
import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, Self

from scout.hang import Phase
from worker_shim.patching import Patches, Watcher, is_traced
from worker_shim.track import Track

GRADIENTS_MAX: Final = 2
"""Blocks of one model whose gradient is heard, evenly spaced: with the group's counts they show
movement in a pass that takes minutes."""
ROOTS_MAX: Final = 8
"""Models of one optimizer."""
LOOKS_MAX: Final = 16
"""Searches for a model in one process; each takes a tenth of a second at most."""
INSIDE_MAX: Final = 4
"""Wrappers around one model (DDP, a compiled module), each with nothing but the next inside."""

_thread: Final = threading.get_ident
_NEVER_CALLED: Final = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})


class _EvaluationHook:
    """What stands on a model while it is evaluated.

    Copied, it is itself; pickled, it becomes a call that does nothing: a model that was saved whole
    must load where we are not installed.
    """

    __slots__ = ("_has_gradients", "_is_compiling", "_track")

    def __init__(self, track: Track, torch: ModuleType) -> None:
        self._track = track
        self._is_compiling = is_traced(torch)
        self._has_gradients = torch.is_grad_enabled

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def __call__(self, _module: Any, _args: Any) -> None:
        track = self._track
        if self._is_compiling() or _thread() != track.thread:
            return
        # A model may be trained in this mode, with its statistics frozen.
        track.mark(track.phase if self._has_gradients() else Phase.EVALUATE)


class LayerWatch(Watcher):
    """Finds the model, knows its blocks and hears of their gradients."""

    def __init__(self, track: Track, torch: ModuleType) -> None:
        super().__init__("forward and backward passes are")
        self._track = track
        self._torch = torch
        self._is_compiling = is_traced(torch)
        self._hook = _EvaluationHook(track, torch)
        self._handles: list[Any] = []
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._roots: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._heard: deque[Any] = deque(maxlen=1)
        self._was_heard = False
        self._looks = 0
        self._silent_looks = 0
        self._step_before = 0
        self._looking = threading.Lock()
        self.wants_look = False
        """The optimizer that steps next should be asked for its model."""

    def is_watched(self, module: Any) -> bool:
        """Return whether ``module`` is a model or a block of it."""
        return module in self._watched

    def take_heard(self) -> bool:
        """Return whether a gradient was complete since the last call.  For one thread."""
        if not self._heard:
            return False
        self._heard.clear()
        self._was_heard = True
        return True

    def judge_silence(self, step: int, *, is_seen: bool) -> None:
        """Ask for another look when steps pass and nothing is heard: the model is another one.

        A model that is compiled whole may never be heard of, so looks become rarer.
        """
        if is_seen or self._was_heard:
            self._silent_looks = 0
        elif step != self._step_before:
            self._silent_looks += 1
            self.wants_look |= self._silent_looks.bit_count() == 1
        self._step_before, self._was_heard = step, False

    # --- finding the model ----------------------------------------------------------------

    def look(self, optimizer: Any) -> None:
        """Find the models whose parameters ``optimizer`` holds."""
        self.wants_look = False
        if not self.alive or self._looks >= LOOKS_MAX or not self._looking.acquire(blocking=False):
            return
        try:
            self._looks += 1
            self._watch(optimizer)
        except Exception as error:  # noqa: BLE001 - training must not see it, whatever it is
            self.fail(error)
        finally:
            self._looking.release()

    def _watch(self, optimizer: Any) -> None:
        module_class = self._torch.nn.Module
        held = {id(it) for group in optimizer.param_groups for it in group["params"]}
        modules = [it for it in _living(module_class) if "_modules" in it.__dict__]
        children = {id(it) for module in modules for it in module._modules.values()}  # noqa: SLF001 - `children` is a generator per module
        roots = [it for it in modules if id(it) not in children and _holds_any(it, held)]
        for root in roots[:ROOTS_MAX]:
            layers = repeated_layers(root)
            for each in _spread(layers) if len(layers) > 1 else (root,):
                if each not in self._watched:
                    self._hear(each)
            self._watched.update((root, *layers))
            for each in _wrapped(root):
                self._roots.setdefault(each, None)
                self._turned(each)

    def _hear(self, layer: Any) -> None:
        parameter = next((it for it in layer.parameters() if it.requires_grad), None)
        if parameter is not None and parameter.is_leaf:
            hook = self._heard.append
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    # --- evaluation -----------------------------------------------------------------------

    def _turned(self, module: Any) -> None:
        """Put the hook on a model that is in evaluation, take it off one that is not."""
        handle = self._roots.get(module)
        if module.training and handle is not None:
            handle.remove()
            self._roots[module] = None
            if self._track.phase == Phase.EVALUATE:
                self._track.leave(Phase.UNKNOWN)
        elif not module.training and handle is None:
            with contextlib.suppress(AttributeError, RuntimeError):  # a scripted one takes none
                self._roots[module] = module.register_forward_pre_hook(self._hook)

    def around_train(self, original: Any) -> Any:
        """Return `torch.nn.Module.train`, which `eval` calls too, with its result looked at."""

        @functools.wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            result = original(module, mode)
            if not self._is_compiling() and self.alive and module in self._roots:
                try:
                    self._turned(module)
                except Exception as error:  # noqa: BLE001 - training must not see it
                    self.fail(error)
            return result

        return train

    # --- going away -----------------------------------------------------------------------

    def remove(self) -> None:
        """Take every hook off."""
        self._put_aside()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._watched.clear()
        self._roots.clear()
        self._heard.clear()

    def _put_aside(self) -> None:
        """Take the hook off every model until its script sends it into evaluation again."""
        for module, handle in list(self._roots.items()):
            if handle is not None:
                handle.remove()
                self._roots[module] = None

    def around_script(self, original: Any) -> Any:
        """Return `torch.jit.script`, which would compile our hook, with the hook put aside."""

        def script(*args: Any, **kwargs: Any) -> Any:
            self._put_aside()
            return original(*args, **kwargs)

        return script

    def install(self, patches: Patches) -> None:
        """Look for a model whenever an optimizer is made, and see it turn to evaluation."""
        torch = self._torch
        patches.replace_function(torch.jit, "script", self.around_script)
        patches.put(torch.nn.Module, "train", self.around_train(torch.nn.Module.train))
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


def _wrapped(root: Any) -> Iterator[Any]:
    """Yield the model and, where it is a mere wrapper, what it wraps: a script may call either."""
    for _ in range(INSIDE_MAX):
        yield root
        children = [it for it in root._modules.values() if it is not None]  # noqa: SLF001 - as above
        if len(children) != 1 or any(_own_sizes(root)):
            return
        root = children[0]


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
    """Return `GRADIENTS_MAX` of the layers; the first one's gradient is the pass's end."""
    later = layers[1:]
    apart = max(1, -(-len(later) // GRADIENTS_MAX))
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
