"""The connection to a tier service: a dead one is noticed soon, a living one soon found again."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from kvtier.tier.protocol import MAX_CHUNK_BYTES, MESSAGE_OVERHEAD_BYTES

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


@dataclass(frozen=True)
class TlsFiles:
    """PEM contents for mutual TLS: the certificate authority, and the client's own pair."""

    ca: bytes
    certificate: bytes
    key: bytes


def open_channel(address: str, tls: TlsFiles | None) -> grpc.Channel:
    """A channel of its own; it connects when it is first used, and again whenever it has to."""
    if tls is None:
        return grpc.insecure_channel(address, OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.secure_channel(address, credentials, OPTIONS)
