"""Asks a coordinator over HTTP and turns every way it can fail into one sentence."""

import argparse
import http.client
import json
from dataclasses import dataclass, field
from ssl import SSLError
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from coordinator.cli.arguments import TLS_ENV, TOKEN_FILE_ENV, URL_ENV, read_token, target
from coordinator.cli.errors import UNREACHABLE, UserError
from coordinator.wording import one_line
from sidecar.names import url_problem
from sidecar.tls import TlsError, client_context

ANSWER_TIMEOUT_S: Final = 10.0
"""The coordinator answers from memory or from one small file."""
ANSWER_BYTES_MAX: Final = 64 << 20
"""Largest answer that is read: the nodes of a fleet of thousands."""

_PLAIN: Final = build_opener(ProxyHandler({}))
"""Without a proxy: the coordinator is a neighbour, whatever the environment says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One coordinator's operator API."""

    url: str
    token: str | None = field(default=None, repr=False)
    opener: OpenerDirector = field(default=_PLAIN, repr=False)

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Client":
        """Return the client that the command line asks for.  Raises `UserError`."""
        url = target(args)
        reason = url_problem(url)
        if reason is not None:
            raise UserError(f"--coordinator {reason} (or set ${URL_ENV})")
        token = read_token(args.token_file)
        if args.tls is None:
            return cls(url=url, token=token)
        if not url.startswith("https:"):
            raise UserError(f"--coordinator {url} would be asked without TLS; write https://")
        try:
            handler = HTTPSHandler(context=client_context(args.tls))
        except TlsError as error:
            raise UserError(f"--tls: {error}") from error
        return cls(url=url, token=token, opener=build_opener(ProxyHandler({}), handler))

    def get(self, *path: str, **query: str | int) -> Any:
        """Return the JSON at ``path``.  Raises `UserError`."""
        return self._parsed(self.fetch(*path, **query))

    def fetch(self, *path: str, **query: str | int) -> bytes:
        """Return what is at ``path``.  Raises `UserError`."""
        tail = "&".join(f"{name}={_quoted(str(value))}" for name, value in query.items())
        address = self._address(path) + (f"?{tail}" if tail else "")
        return self._ask(Request(address))  # noqa: S310 - `of` admits http and https only

    def post(self, *path: str, **body: str) -> Any:
        """Send ``body`` to ``path`` and return the JSON answer.  Raises `UserError`."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        address = self._address(path)
        request = Request(address, data=data, headers=headers)  # noqa: S310 - as above
        return self._parsed(self._ask(request))

    def _address(self, path: tuple[str, ...]) -> str:
        return "/".join([self.url, *(_quoted(part) for part in path)])

    def _ask(self, request: Request) -> bytes:
        if self.token is not None:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with self.opener.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
                data: bytes = answer.read(ANSWER_BYTES_MAX + 1)
        except HTTPError as error:
            raise self._refused(error) from error
        except URLError as error:
            why = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
            if isinstance(error.reason, SSLError):
                raise self._not_believed(error.reason) from error
            raise self._unreachable(why or error.reason) from error
        except SSLError as error:  # it lets us begin, and then refuses what we show
            raise self._not_believed(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:  # of any odd answer
            raise self._unreachable(str(error) or type(error).__name__) from error
        return data

    def _parsed(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise self._unreachable("what answers there is no coordinator") from error

    def _refused(self, error: HTTPError) -> UserError:
        if error.code == http.client.UNAUTHORIZED:
            return UserError(
                f"the coordinator at {self.url} wants a bearer token; give --token-file (or set"
                f" ${TOKEN_FILE_ENV}), or a certificate with --tls (${TLS_ENV})"
            )
        try:
            reason = json.loads(error.read(ANSWER_BYTES_MAX))["error"]
        except (ValueError, KeyError, TypeError, OSError):
            return self._unreachable(f"it answered {error.code}, which no coordinator does")
        return UserError(one_line(str(reason)))

    def _not_believed(self, error: SSLError) -> UserError:
        return UserError(
            f"no TLS with the coordinator at {self.url} ({one_line(str(error))}); give --tls (or"
            f" set ${TLS_ENV}) with certificates of its authority, and its name as they have it"
        )

    def _unreachable(self, why: object) -> UserError:
        return UserError(
            f"cannot reach a coordinator at {self.url} ({one_line(str(why))}); start one, or name"
            f" it with --coordinator or ${URL_ENV}",
            UNREACHABLE,
        )


def _quoted(text: str) -> str:
    """Return one part of an address.  Raises `UserError` for what was not typed as text."""
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        raise UserError(f"{text!a} is not UTF-8; no node or incident has that name") from error
