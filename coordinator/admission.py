"""Whether a request shows that its sender may make it, and how to ask for that.

Programs show a certificate, or a token as a bearer token.  A browser cannot show the latter; for
looking at things it may show the token as the password of any name.  What changes something, and
what speaks for a node, takes the bearer token or a certificate only, because a browser adds a
password to requests that other sites make it send.
"""

from base64 import b64decode
from binascii import Error as Base64Error
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from sidecar.roles import ANYBODY, Caller, Role, Tokens, both, certified, subject_of
from sidecar.web_pages import page_problem

_READING: Final = frozenset({"GET", "HEAD"})
PAGES: Final = "/incidents"
"""Where the pages for browsers begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What is asked of whoever sends a request.

    With neither ``tokens`` nor ``certificates`` nobody is asked; ``own_machine`` says that the
    address is a loopback one, where nobody comes from elsewhere but a browser's page.
    """

    tokens: Tokens | None = None
    certificates: bool = False
    own_machine: bool = True

    def caller(self, request: web.Request, needed: Role) -> Caller | None:
        """Return who asks, None when they show nothing that opens."""
        if self.tokens is None and not self.certificates:
            return ANYBODY
        shown = None
        if self.certificates and request.transport is not None:
            subject = subject_of(request.transport.get_extra_info("peercert"))
            shown = None if subject is None else certified(subject)
        token = None if self.tokens is None else self.tokens.caller(_token(request, needed))
        return both(shown, token)

    def problem(self, request: web.Request, needed: Role) -> str | None:
        """Return why a request is none that a person or a node made."""
        if needed is Role.VIEWER and request.method in _READING and not self._open:
            return None
        return page_problem(request.headers, names_checked=self._open and self.own_machine)

    @property
    def _open(self) -> bool:
        return self.tokens is None and not self.certificates


def challenge(request: web.Request) -> str:
    """Return how the token is asked for: a browser that opens a page is asked for a password."""
    if request.path == PAGES or request.path.startswith(f"{PAGES}/"):
        return 'Basic realm="outrider, the token as password"'
    return "Bearer"


def _token(request: web.Request, needed: Role) -> str:
    """Return the token that a request shows, or nothing."""
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    if scheme == "Bearer":
        return shown
    if scheme.lower() == "basic" and request.method in _READING and needed is Role.VIEWER:
        try:
            return b64decode(shown, validate=True).decode().partition(":")[2]
        except (Base64Error, ValueError):
            return ""
    return ""
