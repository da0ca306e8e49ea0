"""Leases: how long a client on the same host may use a stretch of the shared memory.

A client that dies, stops or forgets cannot pin memory: a lease that is not given back in time is
over, its draft aborted or its blob unpinned. The client may then still be writing or reading
there; the reader of such bytes finds that they do not verify.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import TierExhaustedError, TierProtocolError
from kvtier_tierd.stores.base import BlobStore, Draft, Handle

MAX_LEASE_S = 60.0
# The shares of the shared memory that drafts may take before they are committed: those of one
# namespace, and those of all together. Room that is reserved is taken from blobs that a client may
# want.
NAMESPACE_SHARE, TOTAL_SHARE = 0.25, 0.5
DEFAULT_LEASE_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """A leased draft or handle, its namespace, and the time of its end (time.monotonic)."""

    namespace: str
    held: Draft | Handle
    expires_at: float


class Leases:
    """All leases of a service; its event loop owns them. expired: how many were not given back."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        # A lease of the service that was here before must not be one of this.
        self._ids = itertools.count(secrets.randbits(62) + 1)
        self._leases: dict[int, Lease] = {}
        # The bytes that each namespace's drafts hold.
        self._reserved: Counter[str] = Counter()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def check_room(self, namespace: str, num_bytes: int, shared_bytes: int) -> None:
        """Raises TierExhaustedError where a draft would be more than its namespace, or all of them,
        may have leased of the shared memory. The only one of a namespace may be larger than that.
        """
        own, total = self._reserved[namespace], self._reserved.total()
        if own and own + num_bytes > NAMESPACE_SHARE * shared_bytes:
            most, whose = NAMESPACE_SHARE, f"namespace {namespace!r} has"
        elif total > TOTAL_SHARE * shared_bytes:
            most, whose = TOTAL_SHARE, "all namespaces together have"
        else:
            return
        raise TierExhaustedError(
            f"{whose} reserved and not committed as much of the shared memory as may be "
            f"({most:.0%} of {shared_bytes} bytes)"
        )

    def grant(self, namespace: str, held: Draft | Handle, lease_s: float) -> int:
        """Lease a draft or an open handle; returns the lease's number, never 0."""
        number = next(self._ids)
        self._leases[number] = Lease(namespace, held, time.monotonic() + lease_s)
        if isinstance(held, Draft):
            self._reserved[namespace] += held.info.num_bytes
        return number

    def _pop(self, number: int) -> Lease:
        lease = self._leases.pop(number)
        if isinstance(lease.held, Draft):
            self._reserved[lease.namespace] -= lease.held.info.num_bytes
            if not self._reserved[lease.namespace]:
                del self._reserved[lease.namespace]
        return lease

    def take_drafts(self, namespace: str, numbers: Sequence[int]) -> list[Draft]:
        """End leases of drafts, and hand the drafts over: all of them, or none.

        Raises TierProtocolError for a lease that is over, another namespace's, or of no draft.
        """
        drafts = {}
        for number in numbers:
            lease = self._leases.get(number)
            if lease is None or lease.namespace != namespace or number in drafts:
                raise TierProtocolError(f"lease {number} is over")
            if not isinstance(lease.held, Draft):
                raise TierProtocolError(f"lease {number} is for reading")
            drafts[number] = lease.held
        for number in drafts:
            self._pop(number)
        return list(drafts.values())

    async def release(self, namespace: str, number: int) -> None:
        """End a lease without using it; one that is over already is no error."""
        lease = self._leases.get(number)
        if lease is not None and lease.namespace == namespace:
            await self._drop(self._pop(number))

    async def expire(self, now: float | None = None) -> int:
        """End the leases whose time is over; returns how many."""
        now = time.monotonic() if now is None else now
        over = [number for number, lease in self._leases.items() if lease.expires_at <= now]
        leases = [self._pop(number) for number in over]
        self.expired += len(leases)
        for lease in leases:
            try:
                await self._drop(lease)
            except Exception:
                # One that cannot be dropped must not keep the others.
                logger.exception("a lease did not end as it should")
        return len(leases)

    async def close(self) -> None:
        """End all leases."""
        await self.expire(float("inf"))

    async def _drop(self, lease: Lease) -> None:
        if isinstance(lease.held, Draft):
            await self._store.abort(lease.held)
        else:
            lease.held.close()


def lease_seconds(lease_ms: int) -> float:
    """Return the length of a client's lease in seconds, from what it asked for; 0 asks for the
    default."""
    return min(lease_ms / 1000, MAX_LEASE_S) if lease_ms else DEFAULT_LEASE_S
