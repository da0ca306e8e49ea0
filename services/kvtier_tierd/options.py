"""The options of a tier service: one frozen object, validated once."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.addresses import default_address, socket_path
from kvtier.errors import TierRefusedError, UsageError
from kvtier.tier.wire import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from kvtier_tierd.limits import IN_FLIGHT, NAMESPACE_SHARE, Limits, Namespaces, check_namespace
from kvtier_tierd.stores.memory import MemoryOptions
from kvtier_tierd.stores.options import StoreOptions

GIB = 1 << 30
MIB = 1 << 20
METRICS_HOST = "127.0.0.1"


@dataclass(frozen=True)
class TierOptions:
    """listen:            host:port or unix:/path; port 0 picks a free one.
    store:             which store, and what it is told; see kvtier_tierd.stores.registry.
    shared_directory:  where the file for clients on the same host is made; None: no sharing.
    namespaces:        limits by name; empty: every name is welcome.
    in_flight:         transfers at a time, of a namespace that is not in `namespaces`.
    certificate, key, client_ca: PEM files; all three mean mutual TLS.
    insecure_local:    plaintext for every user of this machine: on loopback addresses, and in
                       directories that others enter.
    insecure:          plaintext for other machines as well.
    chunk_bytes:       of streamed payloads. max_blob_bytes: larger blobs are refused.
    refresh_workers:   threads that refresh contexts near their data; 0: none does.
    metrics_port:      of Prometheus metrics, /livez and /readyz; None: none, 0: a free one.
    metrics_host:      the name or address that they are served on.
    transfer_bytes:    for payloads on their way, at least twice max_blob_bytes (limits.py).
    stall_s:           how long a stream may stand still.
    drain_s:           how long running calls may take to end at SIGTERM.
    otlp_traces_endpoint: of an OpenTelemetry collector; None: nothing is traced.
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
    refresh_workers: int = 0
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
        if not 0 <= self.refresh_workers <= 1024:
            raise UsageError("--refresh-workers", "0 … 1024", self.refresh_workers)
        if not MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            expected = f"{MIN_CHUNK_BYTES} … {MAX_CHUNK_BYTES}"
            raise UsageError("chunk_bytes", expected, self.chunk_bytes)
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
        if socket_path(self.listen, "--listen") is not None:
            if self.tls:
                raise UsageError("--listen", "host:port with TLS", self.listen)
            return
        host, port = self._host_and_port()
        if not host or not port.isascii() or not port.isdigit() or int(port) >= 1 << 16:
            raise UsageError("--listen", "host:port, [address]:port or unix:/path", self.listen)
        if self.tls or self.insecure:
            return
        if not _is_loopback(host):
            expected = (
                "a unix socket, TLS, or --insecure: every client that reaches it may read and write"
            )
            raise UsageError("--listen", expected, self.listen)
        if not self.insecure_local:
            expected = (
                "a unix socket, TLS, or --insecure-local: every user of this machine may read "
                "and write there"
            )
            raise UsageError("--listen", expected, self.listen)

    def _host_and_port(self) -> tuple[str, str]:
        """The host without brackets; empty where there is none."""
        host, _, port = self.listen.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            return host[1:-1], port
        return ("" if ":" in host else host), port

    @property
    def socket_path(self) -> Path | None:
        """The path of the unix socket to listen on, if it is one."""
        return socket_path(self.listen, "--listen")

    @property
    def for_all_users(self) -> bool:
        """Return whether every user of this machine may connect without a certificate."""
        return self.insecure_local or self.insecure

    @property
    def tls(self) -> bool:
        return self.certificate is not None

    def served(self) -> Namespaces:
        return Namespaces(self.namespaces, Limits(in_flight=self.in_flight))

    def quotas(self) -> dict[str, int]:
        return self.served().quotas()


def _is_loopback(host: str) -> bool:
    """Return whether the host is a loopback address, by its number, not by its looks:
    127.example.com may be any host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
