"""Collectives that the script issues: which one, in which group, and whether it waits inside.

They are watched where every public function of `torch.distributed` ends: at the methods of
torch's `ProcessGroup`.  A function that a script imported by name, stored or wrapped ends there
too, and no function of torch's changes its identity, by which torch itself compares some.  What
C++ issues (DDP's reducer, FSDP) does not pass here; `groups` sees it by its count.

A fingerprint is what has to be the same on every member: operation, members, type and shape where
the operation demands it, reduction, root, and how many the group had before.  The pieces of an
all-to-all or of an uneven gather may differ between ranks and are left out.
"""

import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from scout.page_layout import OPERATION_CODES
from worker_shim.groups import DIGEST_MASK, Groups, Position, digest, sequence_number
from worker_shim.patching import Patches, Watcher
from worker_shim.track import Track


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method of `ProcessGroup`, and which of its arguments every rank has alike.

    ``alike`` is the argument whose type, and with ``shape`` whose shape, is the same everywhere;
    ``options`` is the argument that holds the reduction and the root, where there are any.
    """

    operation: str
    alike: int | None = None
    shape: bool = True
    options: int | None = None
    reduces: bool = False
    has_root: bool = False


_SINGLE_GATHER: Final = Method(operation="all_gather_into_tensor", alike=1)
_SINGLE_SCATTER: Final = Method(operation="reduce_scatter_tensor", alike=0, options=2, reduces=True)
_SINGLE_EXCHANGE: Final = Method(operation="all_to_all_single", alike=0, shape=False)

METHODS: Final[Mapping[str, Method]] = {
    "allreduce": Method(operation="all_reduce", alike=0, options=1, reduces=True),
    "allreduce_coalesced": Method(
        operation="all_reduce_coalesced", alike=0, options=1, reduces=True
    ),
    "broadcast": Method(operation="broadcast", alike=0, options=1, has_root=True),
    "reduce": Method(operation="reduce", alike=0, options=1, reduces=True, has_root=True),
    "allgather": Method(operation="all_gather", alike=1, shape=False),
    "allgather_coalesced": Method(operation="all_gather_coalesced", alike=1, shape=False),
    "_allgather_base": _SINGLE_GATHER,
    "all_gather_single": _SINGLE_GATHER,
    "allgather_into_tensor_coalesced": _SINGLE_GATHER,
    "all_gather_single_coalesced": _SINGLE_GATHER,
    "gather": Method(operation="gather", alike=1, options=2, has_root=True),
    "scatter": Method(operation="scatter", alike=0, options=2, has_root=True),
    "reduce_scatter": Method(
        operation="reduce_scatter", alike=0, shape=False, options=2, reduces=True
    ),
    "_reduce_scatter_base": _SINGLE_SCATTER,
    "reduce_scatter_single": _SINGLE_SCATTER,
    "reduce_scatter_tensor_coalesced": _SINGLE_SCATTER,
    "reduce_scatter_single_coalesced": _SINGLE_SCATTER,
    "alltoall": Method(operation="all_to_all", alike=0, shape=False),
    "alltoall_base": _SINGLE_EXCHANGE,
    "all_to_all_single": _SINGLE_EXCHANGE,
    "barrier": Method(operation="barrier"),
    "monitored_barrier": Method(operation="monitored_barrier"),
}
"""Old and new names of torch 2.6 to 2.13; a method that is not there is not watched."""

_SEND: Final = OPERATION_CODES["send"]
_RECV: Final = OPERATION_CODES["recv"]
_MONITORED: Final = OPERATION_CODES["monitored_barrier"]
KINDS_MAX: Final = 1024
"""Different collectives whose digest is kept; a script with endless shapes starts over."""
WORKS_MAX: Final = 1024
"""Issued operations that were not waited for yet; a script that waits for none starts over."""
_SPREAD: Final = 0x9E3779B97F4A7C15
_PEER: Final = 1
"""Which argument of `send` and `recv` is the peer."""


@dataclass(slots=True, eq=False)
class _Call:
    """One operation in one group, from its issue to the end of its wait."""

    position: Position
    is_message: bool = False
    counts_when_waited: bool = False
    counted: int | None = None
    """Torch's count before, for what it counts otherwise than one for the whole group."""


class CollectiveWatch(Watcher):
    """Turns calls into positions.  Never raises into the call that it watches."""

    def __init__(self, track: Track, groups: Groups) -> None:
        super().__init__("collectives are")
        self._track = track
        self._groups = groups
        self._works: dict[int, tuple[weakref.ref[Any], _Call]] = {}
        self._kinds: dict[tuple[Any, ...], int] = {}
        self._within: set[int] = set()

    def install(self, patches: Patches, torch: ModuleType, distributed: ModuleType) -> None:
        """Put the watch around the methods that this torch has."""
        compiling = _compiling(torch)
        group_class = distributed.ProcessGroup
        for name, method in METHODS.items():
            if hasattr(group_class, name):
                describe = self._describer(method)
                self._put(patches, group_class, name, compiling, describe)
        self._put(patches, group_class, "send", compiling, self._describe_send)
        self._put(patches, group_class, "recv", compiling, self._describe_recv)
        if hasattr(group_class, "recv_anysource"):
            anybody = self._describe_recv_from_anybody
            self._put(patches, group_class, "recv_anysource", compiling, anybody)
        patches.put(distributed.Work, "wait", self._waiting(distributed.Work.wait, compiling))

    # --- issuing --------------------------------------------------------------------------

    def _put(
        self,
        patches: Patches,
        owner: Any,
        name: str,
        compiling: Callable[[], bool],
        describe: Callable[[Any, Sequence[Any]], "_Call | None"],
    ) -> None:
        original = getattr(owner, name)

        def issue(group: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.alive or compiling() or threading.get_ident() in self._within:
                return original(group, *args, **kwargs)
            call, before = self._begin(describe, group, args)
            work = None
            try:
                work = original(group, *args, **kwargs)
            finally:
                self._issued(group, work, call)
                self._end(call, before)
            return work

        patches.put(owner, name, _named(issue, name, original))

    def _begin(
        self, describe: Callable[[Any, Sequence[Any]], "_Call | None"], group: Any, args: Any
    ) -> tuple["_Call | None", tuple[int, int] | None]:
        try:
            call = describe(group, args)
            return call, None if call is None else self._enter(call.position)
        except Exception as error:  # noqa: BLE001 - the script's call goes on, whatever it is
            self.fail(error)
            return None, None

    def _enter(self, position: Position) -> tuple[int, int] | None:
        self._within.add(threading.get_ident())
        position.inside = True
        return self._track.enter_collective(
            position.group, position.fingerprint, position.operation, position.settled
        )

    def _issued(self, group: Any, work: Any, call: _Call | None) -> None:
        if call is None:
            return
        try:
            if work is not None:
                if len(self._works) >= WORKS_MAX:
                    self._works.clear()
                self._works[id(work)] = weakref.ref(work), call
            elif call.counts_when_waited:
                call.position.calls += 1
            if call.counted is not None:
                self._set_aside(group, call)
            if not call.is_message:
                count = self._groups.entered(group)
                call.position.settled = call.position.calls if count is None else count
        except Exception as error:  # noqa: BLE001 - as above
            self.fail(error)

    def _set_aside(self, group: Any, call: _Call) -> None:
        """Keep what torch counted, a collective of the whole group apart, out of its count."""
        count, before = sequence_number(group), call.counted
        if count is not None and before is not None:
            own = 0 if call.is_message else 1
            self._groups.of(group).besides += max(0, count - before - own)

    def _end(self, call: _Call | None, before: tuple[int, int] | None) -> None:
        if call is not None:
            self._within.discard(threading.get_ident())
            call.position.inside = False
            self._track.leave_collective(before)

    # --- waiting --------------------------------------------------------------------------

    def _waiting(self, original: Any, compiling: Callable[[], bool]) -> Any:
        def wait(work: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.alive or compiling() or threading.get_ident() in self._within:
                return original(work, *args, **kwargs)
            call, before = self._begin(self._call_of, work, args)
            try:
                return original(work, *args, **kwargs)
            finally:
                self._end(call, before)

        return _named(wait, "wait", original)

    def _call_of(self, work: Any, _args: Sequence[Any]) -> _Call | None:
        held, call = self._works.pop(id(work), (None, None))
        if held is None or call is None or held() is not work:
            return None
        if call.counts_when_waited:
            call.counts_when_waited = False
            call.position.calls += 1
        return call

    # --- describing -----------------------------------------------------------------------

    def _describer(self, method: Method) -> Callable[[Any, Sequence[Any]], _Call]:
        operation = OPERATION_CODES[method.operation]

        def describe(group: Any, args: Sequence[Any]) -> _Call:
            position = self._groups.of(group)
            position.calls += 1
            count = self._groups.entered(group)
            position.settled = position.calls if count is None else count + 1
            kind = self._kind(operation, method, args)
            mixed = (kind ^ position.group ^ position.settled * _SPREAD) & DIGEST_MASK
            position.fingerprint, position.operation = mixed or 1, operation
            counted = sequence_number(group) if operation == _MONITORED else None
            return _Call(position, counted=counted)

        return describe

    def _kind(self, operation: int, method: Method, args: Sequence[Any]) -> int:
        """Return a digest of what every member must have alike, their group apart."""
        alike = (operation, *_alike(method, args))
        known = self._kinds.get(alike)
        if known is None:
            if len(self._kinds) >= KINDS_MAX:
                self._kinds.clear()
            known = self._kinds[alike] = digest(repr(alike))
        return known

    def _describe_send(self, group: Any, args: Sequence[Any]) -> _Call:
        call = self._message(group, args)
        call.position.calls += 1
        call.position.operation = _SEND
        return call

    def _describe_recv(self, group: Any, args: Sequence[Any]) -> _Call:
        """A message that is asked for early is not waited for yet: it counts from its wait on."""
        call = self._message(group, args)
        call.position.operation = _RECV
        call.counts_when_waited = True
        return call

    def _describe_recv_from_anybody(self, group: Any, _args: Sequence[Any]) -> _Call:
        return self._message(group, ())

    def _message(self, group: Any, args: Sequence[Any]) -> _Call:
        pair = self._groups.pair(group, int(args[_PEER])) if len(args) > _PEER else None
        position = self._groups.untold() if pair is None else pair
        return _Call(position, is_message=True, counted=sequence_number(group))


def _alike(method: Method, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return what every rank passes alike; its text is the same in every process."""
    if method.alike is None or method.alike >= len(args):
        return ()
    told = _tensors(args[method.alike], method.shape)
    if method.options is None or method.options >= len(args):
        return told
    options = args[method.options]
    if method.reduces:
        reduction = getattr(options, "reduceOp", None)
        told += (getattr(reduction, "op", reduction),)
    if method.has_root:
        told += (getattr(options, "rootRank", None),)
    return told


def _tensors(value: Any, with_shape: bool) -> tuple[Any, ...]:
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (list, tuple)):
        return (value.dtype, tuple(value.shape)) if with_shape else (value.dtype,)
    if with_shape:
        return tuple(_tensors(it, with_shape) for it in value)
    return _tensors(value[0], with_shape) if value else ()


def _compiling(torch: ModuleType) -> Callable[[], bool]:
    """Return what tells that torch traces our code: traced, we must leave no trace."""
    compiler = getattr(torch, "compiler", None)
    is_compiling = getattr(compiler, "is_compiling", None)
    return is_compiling if callable(is_compiling) else bool


def _named(function: Any, name: str, original: Any) -> Any:
    """Name our function like the method it stands for.

    A class in Python that inherits from torch's is asked by C++ for its own version of a method,
    and is recognized as having none by the name of the frame that asks.
    """
    code = function.__code__.replace(co_name=name)
    renamed = types.FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )
    renamed.__doc__ = original.__doc__
    return renamed
