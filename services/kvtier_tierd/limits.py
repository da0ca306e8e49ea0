"""The limits of clients: who may call, and how much of the service each may use at a time.

    Budget        memory for payloads on their way, which all namespaces share
                  counted       what puts have sent and is not stored yet; what a store has read for
                                its readers
                  not counted   a store's own memory, and the chunk or two of each stream that gRPC
                                has
    Namespaces    transfers at a time, and bytes a second
    Progress      how long a stream may keep the service waiting

Clients decide how many transfers there are and how fast they go, so without a budget they decide
how large the service grows.

Under mutual TLS the namespace is the common name of the client's certificate and nothing the
client says changes it. Without, it is what the client says: a client that may connect is in every
namespace, and by default only this user's may (listening.py).

A stream that moves may take as long as it needs; one that stalls holds a transfer, and what it has
pinned or sent, from all others. What a client makes us wait, altogether, may be `stall_s` and the
time that its bytes take at SLOWEST_BYTES_PER_S, so that a byte now and then is no progress.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvtier.errors import TierExhaustedError, TierRefusedError, TierUnavailableError
from kvtier.tier.wire import DEFAULT_NAMESPACE, NAMESPACE_METADATA

# The share of the budget that one namespace may take: one that hoards leaves the others something.
NAMESPACE_SHARE = 0.5
MAX_NAMESPACE_BYTES = 200
IN_FLIGHT = 64
PACED_CHUNK_BYTES = 64 << 10
# A client with too many transfers in flight waits this long to be told so.
REFUSAL_S = 0.05
SLOWEST_BYTES_PER_S = 1e6

Result = TypeVar("Result")


class Budget:
    """capacity_bytes: of everything together. Belongs to one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._held: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        return self._held.total()

    def take(self, namespace: str, num_bytes: int) -> None:
        """Count bytes of a namespace. Raises TierExhaustedError, and counts none, beyond what the
        namespace, or all of them together, may have."""
        most = int(NAMESPACE_SHARE * self.capacity_bytes)
        if self._held[namespace] + num_bytes > most:
            raise TierExhaustedError(
                f"namespace {namespace!r} has {self._held[namespace]} bytes on their way, of the "
                f"{most} that it may have (--transfer-memory)"
            )
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise TierExhaustedError(
                f"{self.used_bytes} bytes are on their way, of the {self.capacity_bytes} that may "
                "be (--transfer-memory)"
            )
        self._held[namespace] += num_bytes

    def give_back(self, namespace: str, num_bytes: int) -> None:
        """Count bytes no longer."""
        self._held[namespace] -= num_bytes
        if not self._held[namespace]:
            del self._held[namespace]


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
        """One transfer of the namespace; raises TierExhaustedError beyond its in-flight limit.

        One that ends because its client does not read counts until the message under way is over.
        """
        limit = self.limits(namespace).in_flight
        if self._in_flight[namespace] >= limit:
            # Later: a client that asks again at once would cost the others more than its transfers.
            await asyncio.sleep(REFUSAL_S)
            raise TierExhaustedError(
                f"namespace {namespace!r} has {limit} transfers in flight, its limit"
            )
        self._in_flight[namespace] += 1
        writing: asyncio.Future[None] | None = None
        try:
            yield
        except StalledError as error:
            writing = error.writing
            raise
        finally:
            if writing is None:
                self._over(namespace)
            else:
                writing.add_done_callback(lambda _: self._over(namespace))

    def _over(self, namespace: str) -> None:
        """A transfer is over."""
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


class StalledError(TierUnavailableError):
    """A stream that its client keeps waiting. writing: the message that it does not read, if it is
    reading that it does not do; it is still under way."""

    writing: asyncio.Future[None] | None = None


class Progress:
    """The progress of one stream. stall_s: how long it may stand still."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._moved_bytes = 0
        self._waited_s = 0.0

    def moved(self, num_bytes: int) -> None:
        self._moved_bytes += num_bytes

    async def wait(self, work: Awaitable[Result]) -> Result:
        """Return the result of the work that the client is waited for. Raises StalledError when
        that takes too long."""
        earned_s = self._moved_bytes / SLOWEST_BYTES_PER_S
        allowed_s = min(self._stall_s, self._stall_s + earned_s - self._waited_s)
        began = time.monotonic()
        try:
            async with asyncio.timeout(allowed_s):
                return await work
        except TimeoutError:
            raise StalledError(
                f"the stream stalled: {self._moved_bytes} bytes moved, and then {self._stall_s} s "
                f"were over, or it is slower than {SLOWEST_BYTES_PER_S / 1e6:.0f} MB/s"
            ) from None
        finally:
            self._waited_s += time.monotonic() - began
