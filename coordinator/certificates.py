"""An authority of one's own and the certificates it gives: who is believed, and in which role.

A certificate's organizational unit is its role and its common name whose it is; see
`sidecar.roles`.  Every folder that is written is whole in itself: copy it to where it is used.
"""

import datetime as dt
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sidecar.tls import CA_NAME, CERT_NAME, KEY_NAME

CA_KEY_NAME: Final = "ca-key.pem"
CA_DAYS: Final = 3650
"""Ten years: a new authority means new folders everywhere."""
CLOCKS_DIFFER: Final = dt.timedelta(minutes=5)
"""A certificate is used on machines whose clocks are a little behind."""
SERVER: Final = "coordinator"
"""Folder and unit of the coordinator's certificate, which gives no role by itself."""


class CertificateError(ValueError):
    """Certificates that cannot be made; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One certificate.  ``hosts`` are the names and addresses under which others dial it."""

    unit: str
    name: str
    hosts: tuple[str, ...]
    days: int


class Authority:
    """A key that certifies others, kept in a folder that only its owner reads."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, folder: Path, name: str) -> Self:
        """Make a new one in ``folder``.  Raises `CertificateError` where one stands, `OSError`."""
        if (folder / CA_KEY_NAME).exists():
            raise CertificateError(
                f"{folder} holds an authority already, and whoever has its certificates would be"
                " locked out; `outrider certs issue` adds to it, or name another folder"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            _begun(subject, subject, key.public_key(), CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        self = cls(builder.sign(key, hashes.SHA256()), key)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / CA_KEY_NAME, _private(key), 0o600)
        _write(folder / CA_NAME, self.pem, 0o644)
        return self

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the one in ``folder``.  Raises `CertificateError`."""
        try:
            key = serialization.load_pem_private_key((folder / CA_KEY_NAME).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / CA_NAME).read_bytes())
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise CertificateError(f"the key in {folder} is none that `outrider certs` makes")
            certificate.verify_directly_issued_by(certificate)
        except OSError as error:
            raise CertificateError(
                f"there is no authority in {folder} ({error.strerror}); `outrider certs init`"
                " makes one"
            ) from error
        except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
            raise CertificateError(
                f"the authority in {folder} is damaged; make another with `outrider certs init`"
            ) from error
        return cls(certificate, key)

    @property
    def pem(self) -> bytes:
        """Whom others must believe."""
        pem: bytes = self._certificate.public_bytes(serialization.Encoding.PEM)
        return pem

    def issue(self, wanted: Wanted, folder: Path) -> None:
        """Write a folder for ``wanted``, over an older one.  Raises `OSError`."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = (
            (NameOID.ORGANIZATIONAL_UNIT_NAME, wanted.unit),
            (NameOID.COMMON_NAME, wanted.name),
        )
        subject = x509.Name([x509.NameAttribute(oid, text) for oid, text in attributes])
        builder = (
            _begun(subject, self._certificate.subject, key.public_key(), wanted.days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.CLIENT_AUTH]
                    + [ExtendedKeyUsageOID.SERVER_AUTH] * bool(wanted.hosts)
                ),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if wanted.hosts:
            names = x509.SubjectAlternativeName(list(_names(wanted.hosts)))
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(folder / KEY_NAME, _private(key), 0o600)
        _write(folder / CERT_NAME, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        _write(folder / CA_NAME, self.pem, 0o644)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(hosts: Iterable[str]) -> Iterable[x509.GeneralName]:
    for host in hosts:
        try:
            yield x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            yield x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a file that has its mode before it has its content, whole or not at all."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
