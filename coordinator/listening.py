"""Where the coordinator listens, and what it asks of those who come.

It refuses to listen beyond this machine where nobody would be asked for anything.
"""

import errno
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from coordinator.admission import Admission
from sidecar.names import host_problem
from sidecar.roles import Tokens
from sidecar.tls import TlsError, server_context
from sidecar.web_pages import is_loopback

ACCEPT_BACKLOG: Final = 4_096
"""Sidecars that may dial in at the same moment, as after a restart of the coordinator."""


class CoordinatorError(Exception):
    """The coordinator cannot start; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """An address and its lock.  ``port`` 0 takes any free one.

    ``certificates`` is a folder as `sidecar.tls` reads them: everybody must show a certificate of
    its authority, or one of ``tokens`` where there are any.  ``scrapes`` is a second address, host
    and port, for numbers only, where nobody is asked for anything.
    """

    host: str = "127.0.0.1"
    port: int = 8081
    tokens: Tokens | None = None
    certificates: Path | None = None
    allow_insecure_bind: bool = False
    scrapes: tuple[str, int] | None = None

    def check(self) -> None:
        """Refuse what is no address, and to let strangers stop the job.

        Raises `CoordinatorError`.
        """
        reason = host_problem(self.host)
        if reason is not None:
            raise CoordinatorError(f"--host {reason}")
        asked = self.tokens is not None or self.certificates is not None
        if asked or self.allow_insecure_bind or is_loopback(self.host):
            return
        raise CoordinatorError(
            f"--host {self.host} can be reached from other machines, and no token is asked for;"
            " give --token-file or --tls, or --allow-insecure-bind on a network you trust"
        )

    def admission(self) -> Admission:
        """Return what is asked of whoever comes."""
        return Admission(
            tokens=self.tokens,
            certificates=self.certificates is not None,
            own_machine=is_loopback(self.host),
        )

    def context(self) -> ssl.SSLContext | None:
        """Return how to speak TLS, None without certificates.  Raises `CoordinatorError`."""
        if self.certificates is None:
            return None
        try:
            return server_context(self.certificates, certificate_required=self.tokens is None)
        except TlsError as error:
            raise CoordinatorError(f"--tls: {error}") from None


async def listen(runner: web.AppRunner, door: Door) -> str:
    """Listen, and return the URL.  Raises `CoordinatorError`."""
    context = door.context()
    options = ("--host", "--port")
    port = await _bound(runner, (door.host, door.port), options, context)
    host = f"[{door.host}]" if ":" in door.host else door.host
    return f"{'http' if context is None else 'https'}://{host}:{port}"


async def listen_for_scrapes(runner: web.AppRunner, door: Door) -> int | None:
    """Listen where only numbers are told, and return the port.  Raises `CoordinatorError`."""
    if door.scrapes is None:
        return None
    await runner.setup()
    return await _bound(runner, door.scrapes, ("--metrics-listen", "--metrics-listen"), None)


async def _bound(
    runner: web.AppRunner,
    address: tuple[str, int],
    options: tuple[str, str],
    context: ssl.SSLContext | None,
) -> int:
    (host, port), (host_option, port_option) = address, options
    site = web.TCPSite(runner, host, port, backlog=ACCEPT_BACKLOG, ssl_context=context)
    try:
        await site.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CoordinatorError(
                f"port {port} on {host} is taken; give another {port_option}, or 0 for any free one"
            ) from error
        # The resolver's own errors have negative numbers, and their text is with them.
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise CoordinatorError(
            f"cannot listen on {host}:{port} ({why}); give an address of this machine as"
            f" {host_option}"
        ) from error
    return int(runner.addresses[0][1])
