"""The options of a tier service: one frozen object, validated once."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.addresses import default_address, host_of, socket_path
from kvtier.errors import TierRefusedError, UsageError
from kvtier.tier.transport.connection import TlsPaths
from kvtier_tierd.limits import IN_FLIGHT, NAMESPACE_SHARE, Limits, Namespaces, check_namespace
from kvtier_tierd.stores.memory import MemoryOptions
from kvtier_tierd.stores.options import StoreOptions

GIB = 1 << 30
MIB = 1 << 20
METRICS_HOST = "127.0.0.1"


@dataclass(frozen=True)
class TierOptions:
    """The options of a service; `kvtier tier --help` says what those mean that are flags.

    store:            which store, and what it is told; see kvtier_tierd.stores.registry.
    shared_directory: where the file for clients on the same host is made; None: no sharing.
    namespaces:       limits by name; empty: every name is welcome.
    in_flight:        transfers at a time, of a namespace that is not in `namespaces`.
    certificate, key, client_ca: all three mean mutual TLS.
    chunk_bytes:      of streamed payloads.
    transfer_bytes:   at least twice max_blob_bytes (limits.py).
    """

    listen: str = field(default_factory=default_address)
    store: StoreOptions = field(default_factory=MemoryOptions)
    shared_directory: Path | None = None
    namespaces: Mapping[str, Limits] = field(default_factory=dict)
    in_flight: int = IN_FLIGHT
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    insecure_local: bool = False
    insecure: bool = False
    chunk_bytes: int = 1 * MIB
    max_blob_bytes: int = 1 * GIB
    metrics_port: int | None = None
    metrics_host: str = METRICS_HOST
    transfer_bytes: int = 2 * GIB
    stall_s: float = 10.0
    drain_s: float = 10.0
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        self._check_tls()
        self._check_listen()
        for name in ("max_blob_bytes", "in_flight"):
            if getattr(self, name) < 1:
                flag = "--" + name.removesuffix("_bytes").replace("_", "-")
                raise UsageError(flag, "at least 1", getattr(self, name))
        if self.metrics_port is not None and not 0 <= self.metrics_port < 1 << 16:
            raise UsageError("--metrics-port", "0 … 65535", self.metrics_port)
        if not self.metrics_host:
            raise UsageError("--metrics-host", "a name or an address", self.metrics_host)
        if self.metrics_host != METRICS_HOST and self.metrics_port is None:
            raise UsageError("--metrics-host", "--metrics-port beside it", self.metrics_host)
        if not NAMESPACE_SHARE * self.transfer_bytes >= self.max_blob_bytes:
            # A namespace has half of this memory, and a blob has to fit in that.
            expected = f"at least twice --max-blob, {2 * self.max_blob_bytes} bytes"
            raise UsageError("--transfer-memory", expected, self.transfer_bytes)
        if not 0 < self.stall_s <= 3600:
            raise UsageError("--stall-s", "more than 0 and up to 3600 seconds", self.stall_s)
        if not 0 <= self.drain_s <= 3600:
            raise UsageError("--drain-s", "0 … 3600 seconds", self.drain_s)
        for name in self.namespaces:
            try:
                check_namespace(name)
            except TierRefusedError as error:
                raise UsageError("--namespace", str(error), name) from error

    def _check_tls(self) -> None:
        tls = (self.certificate, self.key, self.client_ca)
        if any(tls) and not all(tls):
            expected = "--certificate, --key and --client-ca together"
            raise UsageError("--certificate", expected, [str(path) for path in tls if path])
        for name, path in zip(("--certificate", "--key", "--client-ca"), tls, strict=True):
            if path is not None and not path.is_file():
                raise UsageError(name, "an existing PEM file", str(path))

    def _check_listen(self) -> None:
        if self.socket_path is not None:
            if self.tls:
                raise UsageError("--listen", "host:port with TLS", self.listen)
            return
        host = host_of(self.listen)
        if host is None:
            raise UsageError("--listen", "host:port, [address]:port or unix:/path", self.listen)
        local = _is_loopback(host)
        if self.tls or self.insecure or (local and self.insecure_local):
            return
        risk = "--insecure: every client that reaches it may read and write"
        if local:
            risk = "--insecure-local: every user of this machine may read and write there"
        raise UsageError("--listen", f"a unix socket, TLS, or {risk}", self.listen)

    @property
    def socket_path(self) -> Path | None:
        """The path of the unix socket to listen on, if it is one."""
        return socket_path(self.listen, "--listen")

    @property
    def for_all_users(self) -> bool:
        """Return whether every user of this machine may connect without a certificate."""
        return self.insecure_local or self.insecure

    @property
    def tls(self) -> TlsPaths | None:
        if self.certificate is None or self.key is None or self.client_ca is None:
            return None
        return TlsPaths(self.client_ca, self.certificate, self.key)

    def served(self) -> Namespaces:
        return Namespaces(self.namespaces, Limits(in_flight=self.in_flight))


def _is_loopback(host: str) -> bool:
    """Return whether the host is a loopback address, by its number, not by its looks:
    127.example.com may be any host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
