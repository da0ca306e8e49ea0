"""Mutual TLS: the certificate says who is calling, and can be renewed while the service runs."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from certificates import DAY, Authority, encrypted, replaced, serial
from live_tier import (
    InProcessTier,
    blob_of,
    failing,
    fetch,
    header_of,
    in_process,
    key_of,
    payload_of,
)
from waiting import SAFETY_S

from kvtier.errors import TierRefusedError, TierUnavailableError, UsageError
from kvtier.tier.client import TierClient, TlsFiles, TlsPaths
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc
from kvtier_tierd.limits import Limits


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

    def files(self, common_name: str | None = "ada") -> TlsFiles:
        """Return the certificates and the key that a client has."""
        return TlsFiles(self.authority.pem, *self.authority.issue(common_name))

    def client(
        self,
        tier: InProcessTier,
        namespace: str = "ada",
        files: TlsFiles | TlsPaths | None = None,
        **options,
    ) -> TierClient:
        tls = files or self.files(namespace)
        return TierClient(tier.address, namespace, timeout_s=SAFETY_S, tls=tls, **options)

    @contextmanager
    def stub(self, tier: InProcessTier, namespace: str) -> Iterator[tier_pb2_grpc.TierServiceStub]:
        """Open a stub for what a client of ours would never say."""
        files = self.files(namespace)
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.certificate)
        with grpc.secure_channel(tier.address, credentials) as channel:
            yield tier_pb2_grpc.TierServiceStub(channel)

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


@pytest.mark.parametrize("shared", [True, False])
def test_a_client_of_any_name_gets_what_it_put(tls, memory_directory, shared):
    serving = tls.serving(shared_directory=memory_directory)
    with serving as tier, tls.client(tier, "Ædå", shared=shared) as client:
        assert client.connect().namespace == "Ædå"
        assert client.shares_memory == shared
        assert client.put(blob_of(1, 3_000_000))
        assert fetch(client, [key_of(1)])[1] == {0: payload_of(1, 3_000_000)}


def test_the_namespace_is_the_certificates_whatever_the_client_says(tls):
    with tls.serving(namespaces={"ada": Limits()}) as tier:
        files = tls.files("ada")
        with tls.stub(tier, "ada") as stub:
            for claim in ("bob", "", "ada"):
                told = [("kvtier-namespace", claim)]
                info = stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=told)
                assert info.namespace == "ada"
        for namespace, of, said in (
            ("bob", files, "'ada', not as 'bob'"),
            ("bob", tls.files("bob"), "'bob' is not served"),
            ("ada", tls.files(None), "common name"),
        ):
            with (
                tls.client(tier, namespace, of) as client,
                pytest.raises(TierRefusedError, match=said),
            ):
                client.connect()


def test_a_client_elsewhere_reads_nothing_that_others_left_in_the_shared_memory(
    tls, memory_directory
):
    """Reserved room is not cleared: committed unwritten, it would be read as the client's own."""
    with tls.serving(shared_directory=memory_directory) as tier, tls.stub(tier, "eve") as eve:
        with tls.client(tier, "ada") as ada:
            ada.connect()
            ada.put(blob_of(1))
            ada.delete([key_of(1)])
        told = eve.GetServerInfo(pb.GetServerInfoRequest())
        token = tier.store.shared.token
        assert token not in told.SerializeToString()
        assert token.hex()[:8] not in told.shared_path
        header = header_of(blob_of(1), "eve")
        for claim in (told.shared_token, told.shared_token[: len(token)], b""):
            with failing(grpc.StatusCode.UNAVAILABLE, "not mine"):
                eve.Reserve(pb.ReserveRequest(headers=[header], shared_token=claim))
            with failing(grpc.StatusCode.UNAVAILABLE, "not mine"):
                eve.Acquire(pb.AcquireRequest(keys=[key_of(1)], shared_token=claim))


# ---- who is not let in (kvtier.tier.wire says why these are unavailable)


@pytest.mark.parametrize("who", ["foreign", "expired", "none", "plaintext"])
def test_a_client_without_a_good_certificate_finds_the_tier_unavailable(tls, who):
    by = Authority() if who == "foreign" else tls.authority
    pair = by.issue("ada", valid=-DAY if who == "expired" else DAY)
    files = TlsFiles(tls.authority.pem, *((None, None) if who == "none" else pair))
    with tls.serving() as tier:
        if who == "plaintext":
            client = TierClient(tier.address, "ada", timeout_s=SAFETY_S)
        else:
            client = tls.client(tier, files=files)
        with client, pytest.raises(TierUnavailableError):
            client.connect()
        with tls.client(tier) as good:
            good.connect()


@pytest.mark.parametrize("how", ["foreign", "expired", "elsewhere", "plaintext"])
def test_a_service_without_a_good_certificate_is_unavailable(tls, how):
    by = Authority() if how == "foreign" else tls.authority
    valid = -timedelta(hours=1) if how == "expired" else DAY
    tls.renew(*by.issue("server", valid=valid, host=f"127.0.0.{2 if how == 'elsewhere' else 1}"))
    serving = in_process() if how == "plaintext" else tls.serving()
    with serving as tier, tls.client(tier) as client, pytest.raises(TierUnavailableError):
        client.connect()


# ---- renewing


def test_what_is_renewed_is_used_for_new_connections_and_old_ones_go_on(tls, caplog):
    caplog.set_level("INFO")
    with tls.serving() as tier, tls.client(tier) as open_before:
        open_before.connect()
        open_before.put(blob_of(1))
        assert tls.serial_seen(tier) == serial(tls.server.certificate)
        renewed = tls.authority.issue("server")
        tls.renew(*renewed)
        for _ in range(2):
            assert tls.serial_seen(tier) == serial(renewed.certificate)
        assert caplog.text.count("certificates reloaded") == 1
        # An authority of clients, too.
        second = Authority()
        files = TlsFiles(tls.authority.pem, *second.issue("ada"))
        with tls.client(tier, files=files) as client, pytest.raises(TierUnavailableError):
            client.connect()
        tls.ca.write_bytes(tls.authority.pem + second.pem)
        with tls.client(tier, files=files) as client:
            client.connect()
            assert fetch(client, [key_of(1)])[1] == {0: payload_of(1)}
        assert open_before.exists([key_of(1)]).leading_run == 1


def test_a_broken_new_file_keeps_the_old_one_until_it_is_mended(tls, caplog):
    used = tls.server
    with tls.serving() as tier:
        for what in ("garbage", "missing", "another key", "wants password"):
            caplog.clear()
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
                assert tls.serial_seen(tier) == serial(used.certificate), what
            assert "new certificates are not used" in caplog.text
            tls.renew(*broken)
            assert tls.serial_seen(tier) == serial(broken.certificate), what
            used = broken


def test_a_client_uses_a_renewed_certificate_for_its_next_connection(tls):
    paths = TlsPaths(tls.ca, *tls.authority.issue("ada", valid=-DAY).write(tls.folder, "client"))
    with tls.serving() as tier, tls.client(tier, files=paths) as client:
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


def test_files_that_do_not_belong_together_are_refused_at_the_start(tls):
    right = tls.key.read_bytes()
    tls.key.write_bytes(tls.authority.issue("server").key)
    with pytest.raises(UsageError, match="--certificate"), tls.serving():
        pass
    with pytest.raises(UsageError, match=r"^tier.certificate: expected"):
        TierClient("127.0.0.1:1", "ada", tls=TlsPaths(tls.ca, tls.certificate, tls.key))
    tls.key.write_bytes(right)
    tls.ca.write_text("nonsense")
    with pytest.raises(UsageError, match="--certificate"), tls.serving():
        pass
