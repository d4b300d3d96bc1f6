"""``outrider certs``: an authority of one's own, and certificates for those who take part."""

import argparse
import re
import socket
import sys
from pathlib import Path
from typing import Final

from coordinator.cli.errors import UserError
from sidecar.names import NAME, host_problem, shown
from sidecar.roles import ANY_NODE, Role

DAYS_DEFAULT: Final = 397
"""Thirteen months, as browsers would still take."""
DAYS_MAX: Final = 3650
CA_FOLDER: Final = "ca"
OWN_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_PERSON: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what can be done with certificates."""
    parser.usage = "outrider certs init DIR --host HOST ... | issue DIR ROLE NAME [--host HOST ...]"
    parser.add_argument("action", choices=("init", "issue"), help="begin, or add one")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where they are all kept")
    parser.add_argument(
        "role",
        nargs="?",
        choices=("coordinator", *Role),
        metavar="ROLE",
        help="with `issue`: coordinator, sidecar, operator or viewer",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="with `issue`: the node's or the person's name"
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="a name or address under which it is dialled (may be repeated); this machine's own"
        " are added with `init`",
    )
    parser.add_argument(
        "--days",
        type=int,
        default=DAYS_DEFAULT,
        metavar="N",
        help=f"how long they are valid (default: {DAYS_DEFAULT})",
    )


def run(args: argparse.Namespace) -> int:
    """Write folders of certificates."""
    _check(args)
    from coordinator.certificates import (  # noqa: PLC0415 - `--help` stays quick
        SERVER,
        Authority,
        CertificateError,
        Wanted,
    )

    folder: Path = args.folder
    try:
        if args.action == "init":
            authority = Authority.create(
                folder / CA_FOLDER, f"Outrider {socket.gethostname()}"[:64]
            )
            hosts = tuple(dict.fromkeys((*args.host, *_own_hosts())))
            wanted = [(SERVER, Wanted(unit=SERVER, name=SERVER, hosts=hosts, days=args.days))]
            names = ((Role.SIDECAR, ANY_NODE), (Role.OPERATOR, "operator"), (Role.VIEWER, "viewer"))
            wanted += [
                (role, Wanted(unit=role, name=name, hosts=OWN_HOSTS, days=args.days))
                for role, name in names
            ]
        else:
            authority = Authority.load(folder / CA_FOLDER)
            one = Wanted(unit=args.role, name=args.name, hosts=tuple(args.host), days=args.days)
            wanted = [(f"{args.role}-{args.name}", one)]
        for name, one in wanted:
            authority.issue(one, folder / name)
    except CertificateError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(
            f"the certificates cannot be written to {folder} ({error.strerror}); name a folder"
            " where you may write"
        ) from error
    for name, one in wanted:
        whose = "any node" if one.name == ANY_NODE else one.name
        sys.stdout.write(f"{folder / name}: {one.unit}, {whose}, {args.days} days\n")
    if args.action == "init":
        sys.stdout.write(
            f"keep {folder / CA_FOLDER} away from the cluster; start the coordinator with"
            f" --tls {folder / SERVER}, give nodes and people a copy of theirs\n"
        )
    return 0


def _check(args: argparse.Namespace) -> None:
    if not 1 <= args.days <= DAYS_MAX:
        raise UserError(f"--days {args.days} is not a number of days from 1 to {DAYS_MAX}")
    for host in args.host:
        reason = host_problem(host)
        if reason is not None or not re.fullmatch(r"[A-Za-z0-9.:-]+", host):
            raise UserError(f"--host {reason or f'{shown(host)} is not a name or an address'}")
    given = args.role is not None or args.name is not None
    if args.action == "init" and given:
        raise UserError("`outrider certs init` makes one of each role; `issue` takes ROLE and NAME")
    if args.action == "issue":
        if args.role is None or args.name is None:
            raise UserError("whose certificate? `outrider certs issue DIR ROLE NAME`")
        pattern = NAME if args.role == Role.SIDECAR else _PERSON
        if not pattern.fullmatch(args.name):
            raise UserError(f"{shown(args.name)} is no name for a {args.role}")
        if args.role == "coordinator" and not args.host:
            raise UserError("under which name is that coordinator dialled? give --host")


def _own_hosts() -> tuple[str, ...]:
    name = socket.gethostname()
    usable = host_problem(name) is None and "_" not in name
    return (*OWN_HOSTS, name) if usable else OWN_HOSTS
