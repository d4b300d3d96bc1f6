"""What a node shows of itself, and what it asks of those who come: a token, certificates, or both.

Read once at the start, so that what cannot be used is refused before anything runs.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sidecar.given_files import GivenFileError, read_given_text
from sidecar.roles import ANYBODY, Caller, Tokens, both, certified, subject_of
from sidecar.tls import TlsError, client_context, server_context

TOKEN_BYTES_MAX: Final = 4096


class AccessError(ValueError):
    """A token or certificates that cannot be used: ``field``, as in a node's file, and why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


@dataclass(frozen=True, slots=True)
class Access:
    """A token and a folder of certificates (see `sidecar.tls`); None is none."""

    token: str | None = field(default=None, repr=False)
    certificates: Path | None = None

    @classmethod
    def read(cls, token_file: str | None, certificates: str | None) -> "Access":
        """Return what the files hold.  Raises `AccessError`."""
        token = None if token_file is None else _token(token_file)
        folder = None if certificates is None else Path(certificates)
        access = cls(token, folder)
        try:
            access.client()
        except TlsError as error:
            raise AccessError("tls", str(error)) from None
        return access

    @property
    def asked(self) -> bool:
        """Whether those who come are asked for anything."""
        return self.token is not None or self.certificates is not None

    def headers(self) -> dict[str, str]:
        """Return what a request shows."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def client(self) -> ssl.SSLContext | None:
        """Return how to dial, None where the system decides.  Raises `TlsError`."""
        return None if self.certificates is None else client_context(self.certificates)

    def server(self) -> ssl.SSLContext | None:
        """Return how to listen, None for plain HTTP.  Raises `TlsError`."""
        if self.certificates is None:
            return None
        return server_context(self.certificates, certificate_required=self.token is None)

    def caller(self, authorization: str, certificate: "dict[str, object] | None") -> Caller | None:
        """Return who asks, None when they show nothing that opens."""
        if not self.asked:
            return ANYBODY
        subject = subject_of(certificate) if self.certificates is not None else None
        shown = None if subject is None else certified(subject)
        scheme, _, word = authorization.partition(" ")
        known = None if self.token is None or scheme != "Bearer" else self.token
        return both(shown, None if known is None else Tokens.parse(known).caller(word))


def _token(path: str) -> str:
    try:
        token = read_given_text(Path(path), TOKEN_BYTES_MAX).strip()
    except GivenFileError as error:
        raise AccessError("tokenFile", f"{path}: {error}") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise AccessError("tokenFile", f"{path} must hold one word of ASCII characters, the token")
    return token
