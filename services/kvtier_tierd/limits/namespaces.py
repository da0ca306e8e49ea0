"""The namespaces of clients, and how much of the service each may use at a time.

Under mutual TLS the namespace is the common name of the client's certificate and nothing the
client says changes it. Without, it is what the client says: a client that may connect is in every
namespace, and by default only this user's may (network/sockets.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvtier.errors import TierExhaustedError, TierRefusedError
from kvtier.tier.wire.protocol import DEFAULT_NAMESPACE, NAMESPACE_METADATA

MAX_NAMESPACE_BYTES = 200
IN_FLIGHT = 64
PACED_CHUNK_BYTES = 64 << 10
# A client with too many transfers in flight waits this long to be told so.
REFUSAL_S = 0.05


@dataclass(frozen=True)
class Limits:
    """The limits of one namespace. quota_bytes: of stored payload, None as much as the store
    holds; in_flight: transfers at a time; bytes_per_s: of its streams together, None as fast as
    it goes."""

    quota_bytes: int | None = None
    in_flight: int = IN_FLIGHT
    bytes_per_s: int | None = None


@dataclass
class Namespaces:
    """known: limits by namespace; empty: every name is welcome, under `default`."""

    known: Mapping[str, Limits] = field(default_factory=dict)
    default: Limits = field(default_factory=Limits)
    _in_flight: Counter[str] = field(default_factory=Counter)
    # When the next bytes of a namespace that has a rate may move (time.monotonic).
    _due: dict[str, float] = field(default_factory=dict)

    def limits(self, namespace: str) -> Limits:
        """Raises TierRefusedError for a namespace that is not served."""
        if self.known and namespace not in self.known:
            raise TierRefusedError(f"namespace {namespace!r} is not served here")
        return self.known.get(namespace, self.default)

    def quotas(self) -> dict[str, int]:
        return {n: x.quota_bytes for n, x in self.known.items() if x.quota_bytes is not None}

    @asynccontextmanager
    async def transfer(self, namespace: str) -> AsyncIterator[None]:
        """One transfer of the namespace; raises TierExhaustedError beyond its in-flight limit."""
        limit = self.limits(namespace).in_flight
        if self._in_flight[namespace] >= limit:
            # Later: a client that asks again at once would cost the others more than its transfers.
            await asyncio.sleep(REFUSAL_S)
            raise TierExhaustedError(
                f"namespace {namespace!r} has {limit} transfers in flight, its limit"
            )
        self._in_flight[namespace] += 1
        try:
            yield
        finally:
            self._in_flight[namespace] -= 1
            if not self._in_flight[namespace]:
                del self._in_flight[namespace]

    def chunk_bytes(self, namespace: str, most: int) -> int:
        """The chunks of its streams: small where there is a rate to keep, so that no stream waits
        for a large one."""
        paced = self.limits(namespace).bytes_per_s is not None
        return min(most, PACED_CHUNK_BYTES) if paced else most

    async def pace(self, namespace: str, num_bytes: int) -> None:
        """Wait until this many more bytes are within the namespace's rate."""
        rate = self.limits(namespace).bytes_per_s
        if rate is None:
            return
        now = time.monotonic()
        due = max(now, self._due.get(namespace, now))
        self._due[namespace] = due + num_bytes / rate
        await asyncio.sleep(due - now)


def namespace_of(context: Any) -> str:
    """The namespace of a call. Raises TierRefusedError where there is none to be had."""
    identity = context.auth_context()
    if b"ssl" in identity.get("transport_security_type", ()):
        (common_name, *_) = identity.get("x509_common_name") or [b""]
        if not common_name:
            raise TierRefusedError("a client certificate without a common name")
        name = bytes(common_name).decode(errors="replace")
    else:
        told = dict(context.invocation_metadata() or ())
        name = str(told.get(NAMESPACE_METADATA, DEFAULT_NAMESPACE))
    check_namespace(name)
    return name


def check_namespace(name: str) -> None:
    """Raise TierRefusedError for what cannot be a namespace."""
    if not name or len(name.encode()) > MAX_NAMESPACE_BYTES or not name.isprintable():
        raise TierRefusedError(
            f"a namespace of 1 to {MAX_NAMESPACE_BYTES} printable bytes, got {name!r}"
        )
