"""The connection of one client: a dead one is noticed soon, a living one soon found again, and one
behind another user's socket is left alone. Failures of its calls are TierErrors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvtier.addresses import socket_path
from kvtier.errors import TierError, TierRefusedError, TierUnavailableError, UsageError
from kvtier.tier.wire import (
    MAX_CHUNK_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    NAMESPACE_METADATA,
    error_of,
    frame_stub,
)
from kvtier.v1 import tier_pb2_grpc

logger = logging.getLogger(__name__)

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES),
    ("grpc.max_send_message_length", -1),
    # A service that is back is found within seconds, whichever way it went: a host that vanished
    # answers no connection attempt, and one that was cut off no packet.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Each client its own connection: a stalled one must not stall another.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy for the way out to the web is none for KV.
    ("grpc.enable_http_proxy", 0),
]


class Deadline:
    """at: time.monotonic()."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self.at - time.monotonic())

    def left_ms(self) -> int:
        """Return the milliseconds that are left, at least 1, because 0 means something else to
        those who are told."""
        return max(1, round(1000 * self.left()))


@dataclass(frozen=True)
class TlsFiles:
    """PEM contents for mutual TLS: the certificate authority, and the client's own pair."""

    ca: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class TlsPaths:
    """The paths of certificates and keys (PEM); an operator who renews a certificate replaces the
    files."""

    ca: Path
    certificate: Path
    key: Path

    def state(self) -> list[tuple[int, int]]:
        """Differs once a file was replaced. Raises OSError."""
        stats = [path.stat() for path in (self.ca, self.certificate, self.key)]
        return [(one.st_mtime_ns, one.st_ino) for one in stats]

    def read(self) -> TlsFiles:
        """Raises OSError or ValueError for files that cannot be read or do not belong together;
        ssl.SSLError is the one, PEM garbage may be the other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # A key that wants a password would be asked for on the terminal, were none given.
        context.load_cert_chain(self.certificate, self.key, password="")
        context.load_verify_locations(self.ca)
        return TlsFiles(self.ca.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes())


class RenewedTls:
    """The certificate that a client or a service is to present, looked at anew for every
    connection; one that is open keeps what it has.

    argument, expected: of the UsageError where the files cannot be used to begin with.
    """

    def __init__(self, paths: TlsPaths, argument: str, expected: str) -> None:
        self._paths = paths
        try:
            self._seen = paths.state()
            self.files = paths.read()
        except (OSError, ValueError) as error:
            raise UsageError(argument, expected, str(error)) from error

    def changed(self) -> bool:
        """Return whether `files` are others than when this was last asked."""
        try:
            state = self._paths.state()
            if state == self._seen:
                return False
            self.files = self._paths.read()
        except (OSError, ValueError) as error:
            # The operator may be replacing them just now; the next connection looks again.
            logger.warning("new certificates are not used: %s", error)
            return False
        self._seen = state
        logger.info("certificates reloaded")
        return True


def check_owner(path: Path) -> None:
    """A user who may write to a directory can put a socket there and be taken for the tier.

    path: of a unix socket. Raises TierRefusedError where it is neither this user's nor root's.
    """
    try:
        owner = path.stat().st_uid
    except OSError:
        # There is none, or none that could be opened: gRPC says so.
        return
    if owner not in (os.geteuid(), 0):
        raise TierRefusedError(
            f"tier unix:{path}: expected a socket of this user's ({os.geteuid()}) or of root's, "
            f"got one of user {owner}'s"
        )


def open_channel(address: str, tls: TlsFiles | None) -> grpc.Channel:
    """A channel of its own; it connects when it is first used, and again whenever it has to."""
    if tls is None:
        return grpc.insecure_channel(address, OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.secure_channel(address, credentials, OPTIONS)


class Connection:
    """Thread-safe. channel, stub: what is in use; `renew` may replace them.

    address, namespace, tls, interceptors: see kvtier.tier.client.TierClient.
    """

    def __init__(
        self,
        address: str,
        namespace: str,
        tls: TlsFiles | TlsPaths | None,
        interceptors: Sequence[Any] = (),
    ) -> None:
        self.address, self.namespace = address, namespace
        self._interceptors = interceptors
        self._socket = socket_path(address)
        self._metadata: tuple[tuple[str, str], ...] = ()
        if tls is None:
            if not (namespace and namespace.isascii() and namespace.isprintable()):
                raise UsageError("namespace", "printable ASCII", namespace)
            self._metadata = ((NAMESPACE_METADATA, namespace),)
        self._renewed: RenewedTls | None = None
        if isinstance(tls, TlsPaths):
            expected = "a PEM certificate with its tier.key and a tier.ca"
            self._renewed = RenewedTls(tls, "tier.certificate", expected)
            tls = self._renewed.files
        self._open(tls)

    def _open(self, tls: TlsFiles | None) -> None:
        self.channel = open_channel(self.address, tls)
        if self._interceptors:
            self.channel = grpc.intercept_channel(self.channel, *self._interceptors)
        self.stub = tier_pb2_grpc.TierServiceStub(self.channel)
        frame_stub(self.stub, self.channel)

    def renew(self) -> None:
        """Present the certificates that are there now, where they changed."""
        if self._renewed is not None and self._renewed.changed():
            # Calls that are under way end on the connection that they began on.
            self._open(self._renewed.files)

    def close(self) -> None:
        """End the calls under way, too."""
        self.channel.close()

    def call(self, method: Any, request: Any, deadline: Deadline) -> Any:
        """Call a method of the stub and return its answer. Raises TierError."""
        timeout = deadline.left()
        if self._socket is not None:
            # Every time: gRPC connects again by itself, to whatever is there by then.
            check_owner(self._socket)
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        except ValueError as error:
            # This is gRPC's way to say that the channel is closed.
            raise TierUnavailableError(f"tier {self.address}: {error}") from error

    def call_quietly(self, method: Any, request: Any, deadline: Deadline) -> None:
        """The same for a call whose failure changes nothing."""
        with contextlib.suppress(TierError):
            self.call(method, request, deadline)
