"""Whether a request shows the coordinator's token, and how to ask for it.

Programs show it as a bearer token.  A browser cannot; for looking at things it may show the token
as the password of any name.  What changes something takes the bearer token only, because a
browser adds a password to requests that other sites make it send.
"""

import hmac
from base64 import b64decode
from binascii import Error as Base64Error
from typing import Final

from aiohttp import web

_READING: Final = frozenset({"GET", "HEAD"})
PAGES: Final = "/incidents"
"""Where the pages for browsers begin."""


def admits(request: web.Request, token: str) -> bool:
    """Return whether ``request`` shows ``token``."""
    given = request.headers.get("Authorization", "")
    scheme, _, shown = given.partition(" ")
    if scheme.lower() == "basic" and request.method in _READING:
        try:
            shown = b64decode(shown, validate=True).decode().partition(":")[2]
        except (Base64Error, ValueError):
            return False
        return _same(shown, token)
    return _same(given, f"Bearer {token}")


def challenge(request: web.Request) -> str:
    """Return how the token is asked for: a browser that opens a page is asked for a password."""
    if request.path == PAGES or request.path.startswith(f"{PAGES}/"):
        return 'Basic realm="outrider, the token as password"'
    return "Bearer"


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), expected.encode())
