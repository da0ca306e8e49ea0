"""Mutual TLS: the certificate says who is calling, and can be renewed while the service runs."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from certificates import DAY, Authority, Pair, encrypted, serial
from live_tier import InProcessTier, blob_of, fetch, in_process, key_of, payload_of
from waiting import SAFETY_S

from kvtier.errors import TierRefusedError, TierUnavailableError, UsageError
from kvtier.tier.client import TierClient, TlsFiles, TlsPaths
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc
from kvtier_tierd.limits import Limits


def replaced(path: Path, content: bytes) -> None:
    """Replace a file as people do: a new file is moved into place."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, path)


class Tls:
    """An authority, and a service's files signed by it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority()
        self.server = self.authority.issue("server")
        self.certificate, self.key = self.server.write(folder, "server")
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.pem)

    @contextmanager
    def serving(self, **options) -> Iterator[InProcessTier]:
        files = {"certificate": self.certificate, "key": self.key, "client_ca": self.ca}
        with in_process(**files | options) as tier:
            yield tier

    def files(self, common_name: str | None = "ada", **how) -> TlsFiles:
        """Return the certificates and the key that a client has."""
        pair = self.authority.issue(common_name, **how)
        return TlsFiles(self.authority.pem, pair.certificate, pair.key)

    def client(
        self, tier: InProcessTier, namespace: str = "ada", files: TlsFiles | None = None
    ) -> TierClient:
        tls = files or self.files(namespace)
        return TierClient(tier.address, namespace, timeout_s=SAFETY_S, tls=tls)

    def serial_seen(self, tier: InProcessTier) -> int:
        """Return the serial number of the certificate that a new connection is shown."""
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(*self.authority.issue("ada").write(self.folder, "looking"))
        host, _, port = tier.address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=SAFETY_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            return serial(connection.getpeercert(binary_form=True))

    def renew(self, certificate: bytes | None = None, key: bytes | None = None) -> None:
        for path, content in ((self.certificate, certificate), (self.key, key)):
            if content is not None:
                replaced(path, content)


@pytest.fixture
def tls(tmp_path):
    return Tls(tmp_path)


# ---- who is calling


def test_the_same_host_shares_memory_over_tls_too(tls, memory_directory):
    with tls.serving(shared_directory=memory_directory) as tier, tls.client(tier) as client:
        client.connect()
        assert client.shares_memory
        assert client.put(blob_of(1))
        assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}


def test_the_namespace_is_the_certificates_whatever_the_client_says(tls):
    with tls.serving() as tier:
        files = tls.files("ada")
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
        with grpc.secure_channel(tier.address, credentials) as channel:
            stub = tier_pb2_grpc.TierServiceStub(channel)
            for claim in ("bob", "", "ada"):
                told = [("kvtier-namespace", claim)]
                info = stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=told)
                assert info.namespace == "ada"
        with tls.client(tier, "bob", files) as client, pytest.raises(TierRefusedError, match="ada"):
            client.connect()


def test_a_name_may_be_in_any_script(tls):
    with tls.serving() as tier, tls.client(tier, "Ædå") as client:
        assert client.connect().namespace == "Ædå"
        assert client.put(blob_of(1, 3_000_000))
        assert fetch(client, [key_of(1)])[1] == {0: payload_of(1, 3_000_000)}


def test_limits_are_by_certificate(tls):
    with tls.serving(namespaces={"ada": Limits()}) as tier:
        with tls.client(tier, "ada") as client:
            client.connect()
        with tls.client(tier, "bob") as client, pytest.raises(TierRefusedError, match="bob"):
            client.connect()


def test_a_certificate_without_a_name_is_refused(tls):
    refused = pytest.raises(TierRefusedError, match="common name")
    with tls.serving() as tier, tls.client(tier, "ada", tls.files(None)) as client, refused:
        client.connect()


# ---- who is not let in (kvtier.tier.wire says why these are unavailable)


@pytest.mark.parametrize("who", ["foreign", "expired", "none", "plaintext"])
def test_a_client_without_a_good_certificate_finds_the_tier_unavailable(tls, who):
    with tls.serving() as tier:
        if who == "plaintext":
            client = TierClient(tier.address, "ada", timeout_s=SAFETY_S)
        elif who == "none":
            client = TierClient(
                tier.address, "ada", timeout_s=SAFETY_S, tls=TlsFiles(tls.authority.pem, None, None)
            )
        else:
            by = Authority() if who == "foreign" else tls.authority
            pair = by.issue("ada", valid=-DAY if who == "expired" else DAY)
            client = tls.client(tier, files=TlsFiles(tls.authority.pem, *pair))
        with client, pytest.raises(TierUnavailableError):
            client.connect()
        with tls.client(tier) as good:
            good.connect()


@pytest.mark.parametrize("how", ["foreign", "expired", "elsewhere", "plaintext"])
def test_a_service_without_a_good_certificate_is_unavailable(tls, how):
    by = Authority() if how == "foreign" else tls.authority
    server = by.issue(
        "server",
        valid=-timedelta(hours=1) if how == "expired" else DAY,
        host="127.0.0.2" if how == "elsewhere" else "127.0.0.1",
    )
    tls.renew(*server)
    serving = in_process() if how == "plaintext" else tls.serving()
    with serving as tier, tls.client(tier) as client, pytest.raises(TierUnavailableError):
        client.connect()


# ---- renewing


def test_a_renewed_certificate_is_used_for_new_connections_and_old_ones_go_on(tls, caplog):
    caplog.set_level("INFO")
    with tls.serving() as tier, tls.client(tier) as open_before:
        open_before.connect()
        open_before.put(blob_of(1))
        assert tls.serial_seen(tier) == serial(tls.server.certificate)
        renewed = tls.authority.issue("server")
        tls.renew(*renewed)
        assert tls.serial_seen(tier) == serial(renewed.certificate)
        assert tls.serial_seen(tier) == serial(renewed.certificate)
        with tls.client(tier) as new:
            new.connect()
            assert fetch(new, [key_of(1)])[1] == {0: payload_of(1)}
        assert open_before.exists([key_of(1)]).leading_run == 1
        assert caplog.text.count("certificates reloaded") == 1


@pytest.mark.parametrize("what", ["garbage", "missing", "another key", "wants password"])
def test_a_broken_new_file_keeps_the_old_one_until_it_is_mended(tls, what, caplog):
    with tls.serving() as tier:
        broken = tls.authority.issue("server")
        if what == "garbage":
            tls.renew(certificate=b"-----BEGIN CERTIFICATE-----\nnonsense")
        elif what == "missing":
            tls.key.unlink()
        elif what == "another key":
            tls.renew(certificate=broken.certificate)
        else:
            tls.renew(broken.certificate, encrypted(broken.key))
        for _ in range(2):
            assert tls.serial_seen(tier) == serial(tls.server.certificate)
        assert "new certificates are not used" in caplog.text
        tls.renew(*broken)
        assert tls.serial_seen(tier) == serial(broken.certificate)


def test_a_new_client_authority_is_trusted_without_a_restart(tls):
    with tls.serving() as tier:
        second = Authority()
        files = TlsFiles(tls.authority.pem, *second.issue("ada"))
        with tls.client(tier, files=files) as client, pytest.raises(TierUnavailableError):
            client.connect()
        tls.ca.write_bytes(tls.authority.pem + second.pem)
        with tls.client(tier, files=files) as client:
            client.connect()


@pytest.mark.parametrize("what", ["another key", "no authority"])
def test_files_that_make_no_sense_are_refused_at_the_start(tls, what):
    if what == "another key":
        tls.key.write_bytes(tls.authority.issue("server").key)
    else:
        tls.ca.write_text("nonsense")
    with pytest.raises(UsageError, match="--certificate"), tls.serving():
        pass


# ---- a client that renews


def written(tls: Tls, pair: Pair) -> TlsPaths:
    return TlsPaths(tls.ca, *pair.write(tls.folder, "client"))


def test_a_client_uses_a_renewed_certificate_for_its_next_connection(tls):
    paths = written(tls, tls.authority.issue("ada", valid=-DAY))
    with (
        tls.serving() as tier,
        TierClient(tier.address, "ada", timeout_s=SAFETY_S, tls=paths) as client,
    ):
        with pytest.raises(TierUnavailableError):
            client.connect()
        renewed = tls.authority.issue("ada")
        # Half of a renewal is none: the key is still the old one.
        replaced(paths.certificate, renewed.certificate)
        with pytest.raises(TierUnavailableError):
            client.connect()
        replaced(paths.key, renewed.key)
        assert client.connect().namespace == "ada"
        assert client.put(blob_of(1))


def test_files_of_a_client_that_do_not_belong_together_are_refused_at_once(tls):
    paths = written(tls, tls.authority.issue("ada"))
    replaced(paths.key, tls.authority.issue("ada").key)
    with pytest.raises(UsageError, match=r"^tier.certificate: expected"):
        TierClient("127.0.0.1:1", "ada", tls=paths, timeout_s=SAFETY_S)
