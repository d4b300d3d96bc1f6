"""Who may do what: the three roles, and how a token file and a certificate give them.

Decides from texts that were read already; it opens no file and speaks to nobody.
"""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self

ANY_NODE: Final = "*"
"""Common name of a sidecar's certificate that may speak for every node."""
TOKENS_MAX: Final = 64
"""Tokens in one file: each is compared with each request's."""


class Role(StrEnum):
    """What somebody may do."""

    VIEWER = "viewer"
    """Look at everything."""
    OPERATOR = "operator"
    """Look, and order: restart, stop, exclude, include, tell of a node's health."""
    SIDECAR = "sidecar"
    """Dial in as a node; and look, because a node asks which job it is in."""


EVERY_ROLE: Final = frozenset(Role)
_INCLUDED: Final[Mapping[Role, frozenset[Role]]] = MappingProxyType(
    {
        Role.VIEWER: frozenset({Role.VIEWER}),
        Role.OPERATOR: frozenset({Role.OPERATOR, Role.VIEWER}),
        Role.SIDECAR: frozenset({Role.SIDECAR, Role.VIEWER}),
    }
)


class TokenFileError(ValueError):
    """A token file that cannot be used; the text is the end of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, as far as it was proved.  ``name`` is None where nothing names them.

    ``node`` is the only node that a sidecar's certificate may speak for, None for any.
    """

    roles: frozenset[Role]
    proof: str
    """``certificate``, ``token``, or ``nothing`` where nobody is asked for one."""
    name: str | None = None
    node: str | None = None


ANYBODY: Final = Caller(roles=EVERY_ROLE, proof="nothing")
"""Whoever reaches a loopback address on which nobody is asked."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Words that open, each with the roles that it gives."""

    words: tuple[tuple[str, frozenset[Role]], ...] = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the tokens of a file: one word for every role, or lines of ``ROLE WORD``.

        Raises `TokenFileError`.
        """
        lines = [line.split() for line in text.splitlines() if line.split()]
        lines = [words for words in lines if len(lines) == 1 or not words[0].startswith("#")]
        if len(lines) == 1 and len(lines[0]) == 1:
            return cls(((_word(lines[0][0]), EVERY_ROLE),))
        found: dict[str, frozenset[Role]] = {}
        for words in lines:
            if len(words) != 2 or words[0] not in tuple(Role):  # noqa: PLR2004 - role and word
                break
            if words[1] in found:
                raise TokenFileError("gives two roles the same word; draw one for each")
            found[_word(words[1])] = _INCLUDED[Role(words[0])]
        if not found or len(found) != len(lines) or len(found) > TOKENS_MAX:
            raise TokenFileError(
                "must hold one word of ASCII characters, the token, or up to"
                f" {TOKENS_MAX} lines of ROLE WORD with the roles {', '.join(Role)}"
            )
        return cls(tuple(found.items()))

    def caller(self, shown: str) -> Caller | None:
        """Return who shows ``shown``; every word is compared, so that time tells nothing."""
        given = shown.encode(errors="surrogateescape")
        found = [roles for word, roles in self.words if hmac.compare_digest(given, word.encode())]
        return Caller(roles=found[0], proof="token") if found else None


def certified(subject: Iterable[Iterable[tuple[str, str]]]) -> Caller:
    """Return whom a verified certificate's ``subject`` names, in the form of `ssl`.

    Its organizational units are roles; others give nothing.
    """
    parts = [pair for group in subject for pair in group]
    units = [value for key, value in parts if key == "organizationalUnitName"]
    name = next((value for key, value in parts if key == "commonName"), None)
    roles = frozenset[Role]().union(*(_INCLUDED[Role(u)] for u in units if u in tuple(Role)))
    return Caller(
        roles=roles, proof="certificate", name=name, node=None if name == ANY_NODE else name
    )


def both(one: Caller | None, other: Caller | None) -> Caller | None:
    """Return who shows a certificate and a token; the certificate names them."""
    if one is None or other is None:
        return one or other
    if Role.SIDECAR in other.roles:  # the token is for any node
        return Caller(roles=one.roles | other.roles, proof=one.proof, name=one.name)
    return Caller(roles=one.roles | other.roles, proof=one.proof, name=one.name, node=one.node)


def subject_of(certificate: Mapping[str, Any] | None) -> Any:
    """Return the subject in what `ssl` says of a peer's certificate, None where it showed none."""
    return None if not certificate else certificate.get("subject", ())


def _word(word: str) -> str:
    if not word.isascii() or not word.isprintable():
        raise TokenFileError("must hold words of printable ASCII characters")
    return word
