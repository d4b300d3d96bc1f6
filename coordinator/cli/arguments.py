"""The command line's parser and the options that several commands share."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from coordinator.cli.errors import UserError
from sidecar.given_files import GivenFileError, read_given_text
from sidecar.names import host_problem, shown
from sidecar.roles import TokenFileError, Tokens

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

URL_ENV: Final = "OUTRIDER_COORDINATOR"
TOKEN_FILE_ENV: Final = "OUTRIDER_TOKEN_FILE"  # noqa: S105 - the name of a variable
TLS_ENV: Final = "OUTRIDER_TLS"
TOKEN_BYTES_MAX: Final = 4096
DEFAULT_PORT: Final = 8081
DEFAULT_TLS_URL: Final = f"https://127.0.0.1:{DEFAULT_PORT}"
DEFAULT_URL: Final = f"http://127.0.0.1:{DEFAULT_PORT}"


class Parser(argparse.ArgumentParser):
    """argparse, with one-line errors and no guessing of abbreviated options."""

    def __init__(self, prog: str, description: str, **options: object) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,  # type: ignore[arg-type]
        )

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the help; unlike argparse's own, one that cannot be printed is an error."""
        (sys.stdout if file is None else file).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage first."""
        raise UserError(f"{message} (`{self.prog} --help` lists what it takes)")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add which coordinator to ask, and as whom."""
    parser.add_argument(
        "--coordinator",
        metavar="URL",
        default=os.environ.get(URL_ENV) or None,
        help=f"coordinator to ask (default: ${URL_ENV} or {DEFAULT_URL})",
    )
    add_access(parser)


def target(args: argparse.Namespace) -> str:
    """Return the URL of the coordinator that is meant."""
    default = DEFAULT_URL if args.tls is None else DEFAULT_TLS_URL
    url: str = default if args.coordinator is None else args.coordinator
    return url.rstrip("/")


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add what is shown to the other side: a token, certificates, or both."""
    add_token_file(parser)
    default = os.environ.get(TLS_ENV)
    parser.add_argument(
        "--tls",
        metavar="DIR",
        type=given_path,
        default=Path(default) if default else None,
        help="speak TLS with the certificates in DIR, which `outrider certs` wrote (default:"
        f" ${TLS_ENV})",
    )


def add_token_file(parser: argparse.ArgumentParser) -> None:
    """Add the file that holds the bearer token."""
    default = os.environ.get(TOKEN_FILE_ENV)
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        type=given_path,
        default=Path(default) if default else None,
        help=f"file with the coordinator's bearer token (default: ${TOKEN_FILE_ENV})",
    )


def add_limit(parser: argparse.ArgumentParser, default: int) -> None:
    """Add ``--limit`` of a list of which the newest lines are shown."""
    parser.add_argument(
        "--limit",
        type=positive,
        default=default,
        metavar="N",
        help=f"how many of the newest to show (default: {default})",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the choice of JSON instead of tables."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def read_token(path: Path | None) -> str | None:
    """Return the one token in ``path``, which is shown.  Raises `UserError`."""
    if path is None:
        return None
    token = _token_text(path).strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"--token-file {path} must hold one word of ASCII characters, the token")
    return token


def given_path(text: str) -> Path:
    """Return the path that ``text`` is; an empty one is mostly a variable that is not set."""
    return Path(given_name(text))


def given_name(text: str) -> str:
    """Return ``text``, which names a file or a folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name a file or a folder")
    return text


def read_tokens(path: Path | None) -> Tokens | None:
    """Return the tokens in ``path``, which are asked for.  Raises `UserError`."""
    if path is None:
        return None
    try:
        return Tokens.parse(_token_text(path))
    except TokenFileError as error:
        raise UserError(f"--token-file {path} {error}") from error


def address(text: str) -> tuple[str, int]:
    """Return the host and port of ``HOST:PORT``."""
    host, _, number = text.rpartition(":")
    if host_problem(host) is not None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not HOST:PORT, such as 10.0.0.7:9400")
    return host.strip("[]"), port(number)


def _token_text(path: Path) -> str:
    try:
        return read_given_text(path, TOKEN_BYTES_MAX)
    except GivenFileError as error:
        raise UserError(f"--token-file {path} cannot be read: {error}") from error


def positive(text: str) -> int:
    """Return a number from 1 on."""
    return _number(text, 1, 1_000_000, "a number from 1 on")


def workers(text: str) -> int:
    """Return a number of workers of one node."""
    return _number(text, 1, 1024, "a number of workers from 1 to 1024")


def port(text: str) -> int:
    """Return a port; 0 means any free one."""
    return _number(text, 0, 65_535, "a port from 0 (any free one) to 65535")


def seconds(text: str) -> float:
    """Return a duration that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number of seconds")
    return value


def _number(text: str, least: int, most: int, what: str) -> int:
    short = len(text) <= len(str(most))  # Python refuses to read thousands of digits
    if not short or not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not {what}")
    return int(text)
