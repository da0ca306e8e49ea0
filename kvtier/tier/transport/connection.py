"""The connection of one client: its channel and stub, and calls whose failures are TierErrors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import grpc

from kvtier.addresses import socket_path
from kvtier.errors import TierError, TierUnavailableError, UsageError
from kvtier.tier.transport.channel import (
    RenewedTls,
    TlsFiles,
    TlsPaths,
    check_owner,
    open_channel,
)
from kvtier.tier.transport.deadline import Deadline
from kvtier.tier.wire.framing import frame_stub
from kvtier.tier.wire.protocol import NAMESPACE_METADATA
from kvtier.tier.wire.status import error_of
from kvtier.v1 import tier_pb2_grpc


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
            self._renewed = RenewedTls(tls)
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


__all__ = ["Connection"]
