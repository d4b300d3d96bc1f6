"""Progress without a change in the script: what is watched in torch, if the script has torch.

Importing this module loads no torch, and neither does calling it: a torch that the script has
imported is looked up, never loaded.  Each part is installed once its module is there, guarded,
private names most of all; where one is missing the page says less and training goes on.
"""

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from scout.hang import Phase
from scout.page_layout import Movement
from scout.progress import PageWriter
from worker_shim.collectives import CollectiveWatch
from worker_shim.flight_recorder import FlightRecorder
from worker_shim.groups import Groups
from worker_shim.layers import LayerWatch
from worker_shim.patching import Patches, Watcher, imported, is_traced
from worker_shim.scout_guard import ScoutGuard
from worker_shim.session import StepCounter
from worker_shim.stack_sample import StackSampler
from worker_shim.store_wait import STORE_WAIT
from worker_shim.track import DETAIL_CODES, Before, Track

_READ: Final = DETAIL_CODES["read"]
_WRITE: Final = DETAIL_CODES["write"]
_CHECKPOINT_IO: Final = (
    ("torch.serialization", "save", _WRITE),
    ("torch.serialization", "load", _READ),
    ("torch.distributed.checkpoint.state_dict_saver", "save", _WRITE),
    ("torch.distributed.checkpoint.state_dict_loader", "load", _READ),
)

TICK_S: Final = 0.5
"""Between two ticks; silence is judged by whole seconds."""
TICK_S_MIN: Final = 0.1
"""Between two ticks before the first step, and while nothing moves: there is nothing to disturb,
and a laggard shows within a tenth of a second."""
STILL_NS: Final = 500_000_000
"""Since the last step, before everything is looked at on every tick."""
SILENT_NS: Final = 1_000_000_000
"""Since anything moved, before ticks come faster."""
LOOK_NS_MAX: Final = 2_000_000_000
"""Between two looks at a rank that completes steps, for whoever asks after its death."""
INSTALL_NS: Final = 1_000_000_000
"""Between two looks whether the script has imported more of torch."""

_thread: Final = threading.get_ident
_log: Final = logging.getLogger("outrider")


class Instruments:
    """Everything of ours inside torch, in one process."""

    def __init__(
        self,
        steps: StepCounter,
        page: PageWriter,
        flight_record: Path | None = None,
        guard: ScoutGuard | None = None,
    ) -> None:
        self.track = Track(page, steps)
        self._page = page
        self._flight = FlightRecorder(flight_record)
        self._groups = Groups(self._flight.counts)
        self._patches = Patches()
        self._steps = StepWatch(self.track)
        self._collectives = CollectiveWatch(self.track, self._groups)
        self._installing = threading.Lock()
        self._waiting: list[tuple[str, Callable[[ModuleType, ModuleType], None]]] = [
            ("torch.optim.optimizer", self._watch_steps),
            ("torch.distributed.distributed_c10d", self._watch_collectives),
            ("torch.distributed.rendezvous", self._wait_for_stores),
            ("torch.utils.data.dataloader", self._watch_loaders),
            ("torch._dynamo.callback", self._watch_compiler),
        ]
        self._waiting += [
            (module, functools.partial(self._watch_checkpoint, name, detail))
            for module, name, detail in _CHECKPOINT_IO
        ]
        self._guard = guard
        if guard is not None and guard.is_asked:  # after the steps, so that they are counted first
            self._waiting.insert(1, ("torch.optim.optimizer", guard.watch))
            self._patches.later(guard.close)
        self._silent = False
        self._looked_ns = self._installed_ns = 0
        self._layers: LayerWatch | None = None
        self._sampler: StackSampler

    def install(self) -> None:
        """Install what can be installed now; what torch has not imported yet comes later.

        Registering changes dictionaries that a step iterates over, so it is best done by the
        training thread; the background thread does it only for a script that makes no call of
        ours after importing torch, long before such a script's first step.
        """
        if not self._waiting or self._silent or not self._installing.acquire(blocking=False):
            return
        try:
            torch = imported("torch")
            if torch is None:
                return
            for part in list(self._waiting):
                module = imported(part[0])
                if module is not None:
                    self._waiting.remove(part)
                    self._install_one(part, torch, module)
        finally:
            self._installing.release()

    def _install_one(
        self,
        part: tuple[str, Callable[[ModuleType, ModuleType], None]],
        torch: ModuleType,
        module: ModuleType,
    ) -> None:
        try:
            part[1](torch, module)
        except Exception as error:  # noqa: BLE001 - another torch may lack any of the names
            _log.warning(
                "outrider: %s of this torch is not watched: %s: %s",
                part[0],
                type(error).__name__,
                error,
            )

    def tick(self, now_ns: int) -> float:
        """Beat, and say where every process group stands; return the seconds until the next tick.

        For the background thread.  While steps are completed the page itself says so, and a look
        at everything else, which finds cold caches too, is due less often.
        """
        track, layers = self.track, self._layers
        track.note(now_ns, is_heard=layers is not None and layers.take_heard())
        is_stepping = now_ns - track.stepped_ns < STILL_NS
        if is_stepping and now_ns - self._looked_ns < LOOK_NS_MAX:
            return TICK_S
        self._looked_ns = now_ns
        silent_ns = self._look(now_ns)
        return TICK_S if track.stepped_ns and silent_ns < SILENT_NS else TICK_S_MIN

    def _look(self, now_ns: int) -> int:
        """Publish everything that is known; return for how long nothing moved."""
        track = self.track
        if not track.stepped_ns or now_ns - self._installed_ns >= INSTALL_NS:
            self._installed_ns = now_ns
            self.install()
        alike = self._collectives.alive
        count, groups = self._groups.sample(now_ns, with_fingerprints=alike)
        self._page.beat(now_ns, count, groups, self._observe(now_ns))
        silent_ns = track.silent_ns(now_ns)
        self._flight.look(silent_ns)
        return silent_ns

    def _observe(self, now_ns: int) -> Movement | None:
        track, layers = self.track, self._layers
        if layers is None:
            return track.observe(now_ns)
        sighting = self._sampler.sample(track.thread)
        layers.judge_silence(track.steps.step, is_seen=sighting.spot != 0)
        return track.observe(now_ns, sighting)

    def turn_to(self, page: PageWriter) -> None:
        """Publish on another page from now on, as if this process had just begun."""
        self._steps.begin_again()
        self.track.steps.begin_again()
        self.track.turn_to(page)
        self._page = page

    def renew(self) -> None:
        """Another generation begins in this process: its process groups are others."""
        if self._guard is not None:
            self._guard.renew()

    def silence(self) -> None:
        """Publish nothing from now on: in a forked child the page is not ours."""
        self._silent = True
        self.track.silence()
        self._collectives.alive = False

    def remove(self) -> None:
        """Take everything out of torch again."""
        with self._installing:
            self.silence()
            self._patches.remove()

    # --- the parts ------------------------------------------------------------------------

    def _watch_steps(self, torch: ModuleType, optimizer: ModuleType) -> None:
        self._steps.install(self._patches, torch, optimizer)
        layers = LayerWatch(self.track, torch)
        layers.install(self._patches)
        self._steps.layers = layers
        self._sampler = sampler = StackSampler(layers.is_watched)
        self._layers = layers
        step_of_any = torch.optim.Optimizer.profile_hook_step(lambda *_: None)
        sampler.know(step_of_any, Phase.OPTIMIZER)
        sampler.know(torch.autograd.backward, Phase.BACKWARD)
        sampler.know_module_call(torch.nn.Module._wrapped_call_impl)  # noqa: SLF001 - what a frame shows

    def _watch_collectives(self, torch: ModuleType, distributed: ModuleType) -> None:
        if hasattr(distributed, "ProcessGroup"):  # a torch may be built without
            self._collectives.install(self._patches, torch, distributed)

    def _wait_for_stores(self, _torch: ModuleType, rendezvous: ModuleType) -> None:
        STORE_WAIT.install(self._patches, rendezvous)

    def _watch_loaders(self, _torch: ModuleType, loader: ModuleType) -> None:
        track = self.track
        iterator = loader._BaseDataLoaderIter  # noqa: SLF001 - there is no public name
        original = iterator.__next__

        @functools.wraps(original)
        def __next__(it: Any) -> Any:  # noqa: N807 - its name
            before = track.enter(Phase.DATA)
            try:
                return original(it)
            finally:
                track.leave(before)

        self._patches.put(iterator, "__next__", __next__)

    def _watch_checkpoint(
        self, name: str, detail: int, torch: ModuleType, module: ModuleType
    ) -> None:
        track, is_compiling = self.track, torch.compiler.is_compiling

        def make(original: Any) -> Any:
            def move_checkpoint(*args: Any, **kwargs: Any) -> Any:
                if is_compiling():
                    return original(*args, **kwargs)
                before = track.declare(Phase.CHECKPOINT, None, detail)
                try:
                    return original(*args, **kwargs)
                finally:
                    track.withdraw(before)

            return move_checkpoint

        self._patches.replace_function(module, name, make)

    def _watch_compiler(self, _torch: ModuleType, callback: ModuleType) -> None:
        """A first step that compiles for minutes makes no progress and is no stall."""
        handler = callback.callback_handler
        running: list[Before | None] = []

        def start(*_args: Any) -> None:
            running.append(self.track.declare(Phase.COMPILE, None))

        def end(*_args: Any) -> None:
            if running:
                self.track.withdraw(running.pop())

        handler.register_start_callback(start)
        handler.register_end_callback(end)
        self._patches.later(lambda: handler.remove_start_callback(start))
        self._patches.later(lambda: handler.remove_end_callback(end))


class StepWatch(Watcher):
    """Publishes the job's step after every step of the script's first optimizer.

    A step that is compiled as a whole is not counted: a hook in it would break its graph.
    A script may step several optimizers in one iteration; the first one seen stands for all of
    them, and when it is gone the next one seen takes its place.
    """

    def __init__(self, track: Track) -> None:
        super().__init__("optimizer steps are")
        self._track = track
        self._first: weakref.ref[object] | None = None
        self.layers: LayerWatch | None = None
        """Asked before every counted step whether the model is to be looked up again."""

    def begin_again(self) -> None:
        """Count the first optimizer that steps from now on."""
        self._first = None

    def install(self, patches: Patches, torch: ModuleType, optimizer: ModuleType) -> None:
        """Register with torch's hooks on every optimizer."""
        self._is_compiling = is_traced(torch)
        after = optimizer.register_optimizer_step_post_hook(self._after)
        patches.later(after.remove)

    def _after(self, optimizer: object, _args: Any, _kwargs: Any) -> None:
        first = self._first
        if self._is_compiling() or not self.alive:
            return
        if (first is None or first() is not optimizer) and not self._becomes_first(optimizer):
            return
        track = self._track
        track.thread = _thread()
        track.stepped()
        if self.layers is not None and self.layers.wants_look:
            self.layers.look(optimizer)

    def _becomes_first(self, optimizer: object) -> bool:
        if self._first is not None and self._first() is not None:
            return False
        try:
            self._first = weakref.ref(optimizer)
        except TypeError as error:
            self.fail(error)
            return False
        return True
