"""What a node may be called, where it may be reached, and what may be said of it.

One place for both ends: a node's own configuration is refused by it before anything starts, and
the coordinator refuses by it whatever presents itself all the same.  Every answer is None, or
why not as the end of a sentence.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from sidecar.api import Hello

NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Job and node names become folder names and metric labels."""
HOST_CHARS_MAX: Final = 253
"""As long as a name in the DNS may be."""
PART_CHARS_MAX: Final = 63
"""Of a host's name, between two dots."""
LABELS_MAX: Final = 64
LABEL_KEY_CHARS_MAX: Final = 128
LABEL_VALUE_CHARS_MAX: Final = 256
"""A label says where a node stands; these are the sizes of a scheduler's own."""
GPUS_MAX: Final = 1024
VERSION_CHARS_MAX: Final = 64
SHOWN_CHARS_MAX: Final = 80

_HOST: Final = re.compile(r"[A-Za-z0-9_:%.\[\]-]+")
"""Names, and addresses of both families with their zone."""


def name_problem(name: str) -> str | None:
    """Say why ``name`` is none for a job or a node."""
    if NAME.fullmatch(name):
        return None
    return (
        f"{shown(name)} is not a name; use up to 63 letters, digits, `.`, `_`, `-`, "
        "with a letter or digit at both ends"
    )


def host_problem(host: str) -> str | None:
    """Say why nobody could be reached at ``host``."""
    if len(host) > HOST_CHARS_MAX:
        return f"{shown(host)} is longer than the {HOST_CHARS_MAX} characters of a host's name"
    if not _HOST.fullmatch(host):
        return f"{shown(host)} is not a host's name or address, such as node-7 or 10.0.0.7"
    parts = () if ":" in host else host.removesuffix(".").split(".")
    if not all(1 <= len(part) <= PART_CHARS_MAX for part in parts):
        return f"{shown(host)} has a part that is empty or longer than {PART_CHARS_MAX} characters"
    return None


def labels_problem(labels: Mapping[str, str]) -> str | None:
    """Say why these are no labels of a node."""
    if len(labels) > LABELS_MAX:
        return f"{len(labels)} of them are too many; give {LABELS_MAX} at most"
    for key, value in labels.items():
        if not 1 <= len(key) <= LABEL_KEY_CHARS_MAX or not key.isprintable():
            return f"{shown(key)} is no name; use 1 to {LABEL_KEY_CHARS_MAX} printable characters"
        if len(value) > LABEL_VALUE_CHARS_MAX or not value.isprintable():
            return (
                f"the value {shown(value)} of {shown(key)} cannot be used; use up to "
                f"{LABEL_VALUE_CHARS_MAX} printable characters"
            )
    return None


def url_problem(url: str, schemes: tuple[str, ...] = ("http", "https")) -> str | None:
    """Say why nobody can be asked at ``url``."""
    example = f"{shown(url)} is not a URL such as {schemes[0]}://host:8081"
    if not url.isascii() or not url.isprintable() or " " in url:
        return f"{example}; write it in ASCII, without spaces"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return example
    if parts.scheme not in schemes or not host or port == 0:
        return example
    if parts.query or parts.fragment or parts.username is not None:
        return f"{example}; leave out what is before @ and behind ? or #"
    reason = host_problem(host)
    return reason if reason is None else f"{example}: {reason}"


def hello_problem(hello: Hello) -> str | None:
    """Say why a sidecar that presents itself so can serve no job, and what it must change."""
    checks = (
        ("node name", "--node-name", name_problem(hello.node)),
        ("host", "--host", host_problem(hello.host)),
        ("labels", "--label", labels_problem(hello.labels)),
        ("API port", "--http-port", _port_problem(hello.http_port)),
        ("devices", "--gpu", _gpus_problem(hello.gpus)),
        ("version", "", _text_problem(hello.agent_version)),
        ("incarnation", "", _text_problem(hello.incarnation)),
    )
    for what, option, reason in checks:
        if reason is not None:
            hint = f"; start it with another {option}" if option else ""
            return f"the sidecar's {what} cannot be used: {reason}{hint}"
    return None


def shown(text: str) -> str:
    """Return foreign ``text`` quoted, printable and not too long to be read."""
    safe = ascii(text) if not text.isprintable() else repr(text)
    return safe if len(safe) <= SHOWN_CHARS_MAX else f"{safe[: SHOWN_CHARS_MAX - 1]}\u2026"


def _port_problem(port: int) -> str | None:
    in_range = 1 <= port <= 65_535  # noqa: PLR2004 - TCP's range
    return None if in_range else f"{port} is not a port from 1 to 65535"


def _gpus_problem(gpus: tuple[int, ...]) -> str | None:
    if len(gpus) > GPUS_MAX or len(set(gpus)) != len(gpus):
        return f"give each of up to {GPUS_MAX} devices once"
    wrong = next((index for index in gpus if not 0 <= index < GPUS_MAX), None)
    return None if wrong is None else f"{wrong} is not the index of a device"


def _text_problem(text: str) -> str | None:
    if len(text) <= VERSION_CHARS_MAX and text.isprintable():
        return None
    return f"{shown(text)} is not one word of up to {VERSION_CHARS_MAX} characters"
