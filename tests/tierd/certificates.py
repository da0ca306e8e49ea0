"""Certificates for tests: authorities, and what they sign."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PEM = serialization.Encoding.PEM
DAY = timedelta(days=1)


class Pair(NamedTuple):
    """PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """NAME.pem and NAME.key."""
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, content in zip(paths, self, strict=True):
            path.write_bytes(content)
        return paths


def subject(common_name: str | None) -> x509.Name:
    if common_name is None:
        return x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "unnamed")])
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def replaced(path: Path, content: bytes) -> None:
    """Replace a file as people do: a new file is moved into place."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


class Authority:
    """A certificate authority. pem: its certificate."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = f"authority {x509.random_serial_number()}"
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        extensions = {
            x509.BasicConstraints(True, None): True, usage: True, self._identifier: False,
        }  # fmt: skip
        self.pem = self._signed(self._name, self._key, DAY, extensions)

    def _signed(
        self,
        common_name: str | None,
        key: ec.EllipticCurvePrivateKey,
        valid: timedelta,
        extensions: Mapping[x509.ExtensionType, bool],
    ) -> bytes:
        """A certificate. extensions: with whether each is critical."""
        end = datetime.now(UTC) + valid
        builder = x509.CertificateBuilder(
            subject(self._name), subject(common_name), key.public_key(),
            x509.random_serial_number(), end - 3 * DAY, end,
        )  # fmt: skip
        for extension, critical in extensions.items():
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(PEM)

    def issue(
        self, common_name: str | None, *, host: str = "127.0.0.1", valid: timedelta = DAY
    ) -> Pair:
        """A certificate for a client or, at `host`, a server; one that ended for valid < 0."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        # Python 3.13 trusts no certificate that does not say which key signed it.
        signer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        secret = key.private_bytes(
            PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(self._signed(common_name, key, valid, {names: False, signer: False}), secret)


def serial(certificate: bytes) -> int:
    """Return the serial number of a certificate in PEM or DER."""
    if certificate.startswith(b"-----"):
        return x509.load_pem_x509_certificate(certificate).serial_number
    return x509.load_der_x509_certificate(certificate).serial_number


def encrypted(key: bytes) -> bytes:
    """A key that wants a password."""
    loaded = serialization.load_pem_private_key(key, None)
    cipher = serialization.BestAvailableEncryption(b"secret")
    return loaded.private_bytes(PEM, serialization.PrivateFormat.PKCS8, cipher)
