"""Processes that the transport benchmark talks to, and how much memory one of them holds."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.common.benchmark import ROOT
from benchmarks.common.processes import Served, accepts, free_address
from kvtier.errors import TierUnavailableError
from kvtier.tier.client import TlsFiles

SERVICE = "kvtier_tierd"
ECHO = "benchmarks.tier.transport.echo"
HAMMER = "benchmarks.tier.transport.hammer"
HOST = "127.0.0.1"
STOP_S = 20
PEM = serialization.Encoding.PEM


class Running(NamedTuple):
    address: str
    pid: int


@contextmanager
def serving(module: str, *arguments: str) -> Iterator[Running]:
    """The tier service, or what is started like it, on a free port until the block ends."""
    address = free_address()
    listen = ["--listen", address, "--insecure-local"]
    command = [sys.executable, "-m", module, *listen, *arguments]
    with tempfile.TemporaryDirectory() as name:
        served = Served(module, command, Path(name), partial(accepts, *address.split(":")))
        try:
            served.start()
            yield Running(address, served.pid)
        finally:
            served.stop(STOP_S)


@contextmanager
def hammering(address: str, namespace: str, blob_bytes: int) -> Iterator[None]:
    """Another process asks for all that its namespace may have, and more, until the block ends."""
    command = [sys.executable, "-m", HAMMER, address, namespace, str(blob_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "hammering":
            raise TierUnavailableError(f"nothing hammers at {address}")
        yield
        if process.poll() is not None:
            raise TierUnavailableError(f"what hammered at {address} ended by itself")


def resident_bytes(pid: int, shared: Path | None) -> int:
    """Return what a service costs the machine: its private and file pages, and its shared file
    as a whole, because the pages of that are there whether it has touched them or only its
    clients have."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
    file_bytes = shared.stat().st_blocks * 512 if shared is not None else 0
    return (kib["RssAnon"] + kib["RssFile"]) * 1024 + max(kib["RssShmem"] * 1024, file_bytes)


def make_certificates(folder: Path, namespace: str) -> tuple[list[str], TlsFiles]:
    """The service's flags and the client's files for mutual TLS, of one authority."""
    ca, ca_key = _certificate("ca", None)
    pairs = {"server": _certificate(HOST, ca_key), "client": _certificate(namespace, ca_key)}
    (folder / "ca.pem").write_bytes(ca)
    for name, (certificate, key) in pairs.items():
        (folder / f"{name}.pem").write_bytes(certificate)
        (folder / f"{name}.key").write_bytes(_pem(key))
    flags = ["--certificate", str(folder / "server.pem"), "--key", str(folder / "server.key")]
    flags += ["--client-ca", str(folder / "ca.pem")]
    certificate, key = pairs["client"]
    return flags, TlsFiles(ca, certificate, _pem(key))


def _certificate(name: str, signer: Any | None) -> tuple[bytes, Any]:
    """A certificate and its key; of an authority where no other signs it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    attribute = x509.NameOID.COMMON_NAME
    subject = x509.Name([x509.NameAttribute(attribute, name)])
    issuer = x509.Name([x509.NameAttribute(attribute, "ca")])
    day = timedelta(days=1)
    builder = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(), now - day, now + day
    ).add_extension(x509.BasicConstraints(signer is None, None), True)
    if name == HOST:
        address = x509.IPAddress(ipaddress.ip_address(HOST))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), False)
    return builder.sign(signer or key, hashes.SHA256()).public_bytes(PEM), key


def _pem(key: Any) -> bytes:
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return bytes(key.private_bytes(PEM, pkcs8, plain))
