"""Holds a TCP port for a rendezvous that starts later.

A port found by binding and closing can be taken by somebody else before rank 0 listens on it.
Here it stays bound, not listening, with ``SO_REUSEADDR``: Linux never hands such a port out as a
free one, and still lets rank 0's store, which sets the same option, bind and listen beside it.
"""

import contextlib
import errno
import socket
from dataclasses import dataclass


class PortError(OSError):
    """No port could be reserved; the text says why."""


@dataclass(slots=True)
class ReservedPort:
    """A bound socket that keeps ``number`` ours until `release`."""

    number: int
    _socket: socket.socket

    def release(self) -> None:
        """Let the port go.  A store that already listens on it is not disturbed."""
        self._socket.close()


def reserve_port() -> ReservedPort:
    """Reserve a free port on every address of this machine.  Raises `PortError`."""
    try:
        holder = _bind_any()
    except OSError as error:
        raise PortError(f"cannot reserve a rendezvous port: {error.strerror}") from error
    return ReservedPort(holder.getsockname()[1], holder)


def _bind_any() -> socket.socket:
    # torch's store listens on [::] where IPv6 exists and on 0.0.0.0 elsewhere.
    if socket.has_ipv6:
        with contextlib.suppress(OSError):
            return _bind(socket.AF_INET6, "::")
    return _bind(socket.AF_INET, "0.0.0.0")  # noqa: S104 - held, never listened on


def _bind(family: socket.AddressFamily, address: str) -> socket.socket:
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind((address, 0))
    except OSError:
        holder.close()
        raise
    return holder


def port_is_taken(error: OSError) -> bool:
    """Return whether ``error`` says that somebody else listens on the port."""
    return error.errno == errno.EADDRINUSE
