"""Getting the training thread out of a collective, and torch's process groups out of the process.

A collective that waits for a lost peer is called off by the backend's own ``abort`` where that
does something (NCCL).  Gloo's does not interrupt: there the group's connected sockets are shut
down, after which whoever waits on one raises within a millisecond.  A listening socket is never
touched: gloo ends the process when its own is.

Torch is looked up, never loaded, and whatever it lacks is done without.
"""

import contextlib
import gc
import logging
import os
import socket
import stat
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from worker_shim.patching import imported

DESCRIPTORS: Final = "/proc/self/fd"

_BY_GROUP: Final = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)
"""What torch keeps of every process group, besides its count of them."""
_SHUT_DOWN: Final[set[int]] = set()
"""Inodes of what was shut down before: the kernel counts them up and gives none out again."""
_UNAVAILABLE: Final = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
_log: Final = logging.getLogger("outrider")


def connections() -> frozenset[int]:
    """Return the inode of every socket that this process has open."""
    return frozenset(inode for _, inode in _sockets())


def call_off_collectives(before: frozenset[int]) -> None:
    """Make every pending collective raise.  For a thread that is not in one.

    ``before`` are `connections` that were there when no process group was, and are left alone.
    """
    for backend in _backends():
        try:
            backend.abort()
        except _UNAVAILABLE as error:
            _log.info("outrider: a backend cannot abort: %s", error)
    _shut_down_since(before)


def process_groups() -> list[Any]:
    """Return every process group of torch's, and its backends.

    Who holds these in Python while a script's model is let go of keeps DDP's reducer from being a
    group's last owner.  The reducer's end would wait for the group's threads with the interpreter's
    lock in hand, and such a thread may wait for that very lock.  Torch lets go of it for a group
    that ends in Python.
    """
    distributed = imported("torch.distributed.distributed_c10d")
    if distributed is None:
        return []
    try:
        groups = list(distributed._world.pg_map)  # noqa: SLF001 - there is no public list
    except _UNAVAILABLE:
        return []
    return [*groups, *_backends()]


def destroy_groups(before: frozenset[int]) -> None:
    """Leave every process group of torch's for good.  Raises what torch raises."""
    distributed = imported("torch.distributed.distributed_c10d")
    if distributed is None:
        return
    if not distributed.is_initialized():
        _forget_unfinished(distributed)
        return
    call_off_collectives(before)  # peers that wait for this rank hear of it at once
    distributed.destroy_process_group()


def _forget_unfinished(distributed: ModuleType) -> None:
    """Let the next ``init_process_group`` begin as in a new process.

    One that was left halfway has counted its group already, and torch names groups by that count:
    a survivor and a new process would wait for each other under two names.
    """
    world = distributed._world  # noqa: SLF001 - torch resets it only for a finished group
    for name in _BY_GROUP:
        with contextlib.suppress(AttributeError):
            getattr(world, name).clear()
    with contextlib.suppress(AttributeError):
        distributed._unregister_all_process_groups()  # noqa: SLF001 - as torch does itself
    world.group_count = 0


def _backends() -> Iterator[Any]:
    """Yield the backend of every process group, of those that have one with an ``abort``."""
    distributed = imported("torch.distributed.distributed_c10d")
    if distributed is None:
        return
    try:
        groups = list(distributed._world.pg_map)  # noqa: SLF001 - there is no public list
    except _UNAVAILABLE:
        return
    for group in groups:
        for device in getattr(group, "_device_types", ()):
            with contextlib.suppress(*_UNAVAILABLE):
                backend = group._get_backend(device)  # noqa: SLF001 - there is no public name
                if hasattr(backend, "abort"):
                    yield backend


def _shut_down_since(before: frozenset[int]) -> None:
    """Shut down connected TCP sockets that are newer than ``before`` and not Python's own.

    Torch's are made in C++.  Those of the script, a logger's or an object store's, are objects of
    the standard library's class and stay as they are.
    """
    candidates = {
        descriptor: inode
        for descriptor, inode in list(_sockets())
        if inode not in before and inode not in _SHUT_DOWN and _is_connected(descriptor)
    }
    if not candidates:  # the look at every object takes a tenth of a second
        return
    # By type and not by `isinstance`, which asks objects that answer with code of their own.
    kinds = _with_subclasses(socket.socket)
    of_python = {it.fileno() for it in gc.get_objects() if type(it) in kinds}
    for descriptor, inode in candidates.items():
        if descriptor not in of_python:
            _shut_down(descriptor, inode)
            _SHUT_DOWN.add(inode)


def _with_subclasses(kind: type) -> set[type]:
    below: list[type] = kind.__subclasses__()
    return {kind}.union(*(_with_subclasses(one) for one in below))


def collect_garbage() -> None:
    """Free what the last run held in cycles, where it is device memory that the next one needs.

    It takes a tenth of a second; elsewhere Python's own time for it will do.
    """
    torch = imported("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of every open socket."""
    with os.scandir(DESCRIPTORS) as entries:
        names = [int(entry.name) for entry in entries]
    for name in names:
        try:
            found = os.fstat(name)
        except OSError:  # the listing's own descriptor, or closed since
            continue
        if stat.S_ISSOCK(found.st_mode):
            yield name, found.st_ino


def _is_connected(descriptor: int) -> bool:
    with contextlib.suppress(OSError), _duplicate(descriptor) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        found.getpeername()  # raises where nobody is connected
        return True
    return False


def _shut_down(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError), _duplicate(descriptor) as found:
        if os.fstat(found.fileno()).st_ino == inode:  # else it was closed, and its number reused
            found.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> socket.socket:
    """Return a socket of our own for what ``descriptor`` is.  Raises `OSError` if it is closed."""
    number = os.dup(descriptor)
    try:
        return socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise
