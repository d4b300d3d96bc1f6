"""Whether a request comes from a page of somebody else's in a browser on this machine.

A server that asks nobody for anything, because only this machine reaches it, is reached by every
page that its user opens: directly, or under a name that its owner points here (DNS rebinding).
Decides from a request's headers only.
"""

import ipaddress
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

_OWN_FETCHES: Final = ("", "same-origin", "none")
_FOLLOWED_LINK: Final = ("", "navigate")


def page_problem(headers: Mapping[str, str], *, names_checked: bool) -> str | None:
    """Return why a request is not served, as a sentence, or None.

    Programs send no ``Origin``; browsers do with all that could change something, and say with
    ``Sec-Fetch-Site`` what another site made them ask.  With ``names_checked`` the server is one
    on a loopback address: any other name in ``Host`` was pointed here by others.
    """
    host = headers.get("Host", "")
    origin = headers.get("Origin")
    if origin is not None and _host_of(origin) != host.lower():
        return f"requests of pages from {origin!a} are not served"
    site, mode = headers.get("Sec-Fetch-Site", ""), headers.get("Sec-Fetch-Mode", "")
    if site not in _OWN_FETCHES and mode not in _FOLLOWED_LINK:
        return "requests that another site's page makes are not served"
    name = _name(host)
    if not names_checked or name is None or name == "localhost" or _is_address(name):
        return None
    return f"this server is not called {name!a}; ask it by its address"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens at ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_of(origin: str) -> str | None:
    """Return the host and port in an ``Origin``, None where there is none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
