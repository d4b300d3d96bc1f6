"""Both ends of an encrypted connection, made from one folder of three files.

``ca.pem`` is whom we believe, ``cert.pem`` with ``key.pem`` who we are; `outrider certs` writes
such folders.  Both ends show a certificate.  It decides nothing about roles.
"""

import os
import ssl
import stat
from pathlib import Path
from typing import Final

CA_NAME: Final = "ca.pem"
CERT_NAME: Final = "cert.pem"
KEY_NAME: Final = "key.pem"


class TlsError(ValueError):
    """A folder of certificates that cannot be used; the text names the way out."""


def server_context(folder: Path, *, certificate_required: bool) -> ssl.SSLContext:
    """Return how to listen.  Without ``certificate_required`` a token may stand for one.

    Raises `TlsError`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if certificate_required else ssl.CERT_OPTIONAL
    return _loaded(context, folder)


def client_context(folder: Path) -> ssl.SSLContext:
    """Return how to dial: the peer must be certified by our CA, under the name we dialled.

    Raises `TlsError`.
    """
    return _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), folder)


def _loaded(context: ssl.SSLContext, folder: Path) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for name in (CA_NAME, CERT_NAME, KEY_NAME):
        _check_file(folder / name, secret=name == KEY_NAME)
    try:
        context.load_verify_locations(folder / CA_NAME)
        context.load_cert_chain(folder / CERT_NAME, folder / KEY_NAME, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(
            f"the certificates in {folder} cannot be used ({error}); write them anew with"
            " `outrider certs`"
        ) from None
    return context


def _check_file(path: Path, *, secret: bool) -> None:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise TlsError(
            f"{path} cannot be read ({error.strerror}); `outrider certs` writes folders with"
            f" {CA_NAME}, {CERT_NAME} and {KEY_NAME}"
        ) from None
    if secret and mode & (stat.S_IROTH | stat.S_IWOTH):
        raise TlsError(f"everybody on this machine can read {path}; `chmod 600` it")


def _no_password() -> str:
    raise ValueError("the key asks for a password, and nobody is there to type it")
