"""Gets from shared memory: pin, copy in two threads, give back.

    caller         Acquire   copy ............
    other thread             copy ........      Release
    service        pins                         unpins

The caller does not wait for the Release: a call costs as much as copying some megabytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

from kvtier.errors import TierProtocolError
from kvtier.tier.transport.connection import Connection
from kvtier.tier.transport.deadline import Deadline
from kvtier.tier.transport.landing import Arriving, Land, Landing
from kvtier.tier.transport.lanes import Job, Lanes
from kvtier.tier.transport.shared_memory import SharedMemory
from kvtier.v1 import tier_pb2 as pb

RELEASE_S = 1.0
# `close` waits so long for leases to be given back; the service ends them by itself otherwise.
CLOSE_S = 0.2


class SharedGets:
    """The gets of one client; thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lanes = Lanes()

    def get(
        self,
        shared: SharedMemory,
        keys: Sequence[bytes],
        land: Land,
        deadline: Deadline,
        outcome: list[Landing],
    ) -> list[int]:
        """Land what is in the shared memory, and set its outcomes.

        Returns the positions of blobs that are held, but not there. Raises TierError.
        """
        response = self._acquire(shared, keys, deadline)
        try:
            return self._land(shared, response, keys, land, deadline, outcome)
        finally:
            self._lanes.later(functools.partial(self._release, response))

    def close(self) -> None:
        """Close the lanes. What was read is given back before, if that is a matter of a moment."""
        released = self._lanes.later(lambda: None)
        with contextlib.suppress(TimeoutError):
            if released is not None:
                released.result(CLOSE_S)
        self._lanes.close()

    def _acquire(
        self, shared: SharedMemory, keys: Sequence[bytes], deadline: Deadline
    ) -> pb.AcquireResponse:
        request = pb.AcquireRequest(
            keys=keys, lease_ms=deadline.left_ms(), shared_token=shared.token
        )
        acquire = self._connection.stub.Acquire
        response: pb.AcquireResponse = self._connection.call(acquire, request, deadline)
        return response

    def _land(
        self,
        shared: SharedMemory,
        response: pb.AcquireResponse,
        keys: Sequence[bytes],
        land: Land,
        deadline: Deadline,
        outcome: list[Landing],
    ) -> list[int]:
        address, namespace = self._connection.address, self._connection.namespace
        elsewhere: list[int] = []
        copies: list[Job] = []
        positions = iter(range(len(keys)))
        for extent in response.extents:
            position = next((i for i in positions if keys[i] == extent.key), None)
            if position is None:
                raise TierProtocolError(f"tier {address}: a blob that was not asked for")
            if not extent.lease:
                elsewhere.append(position)
                continue
            if extent.header.key != extent.key:
                raise TierProtocolError(f"tier {address}: the header of another blob")
            arriving = Arriving(position, extent.header, namespace, land)
            source = shared.view(extent.offset, extent.header.num_bytes)
            copies.append(functools.partial(_copy, source, arriving, deadline, outcome))
        self._lanes.run(copies)
        return elsewhere

    def _release(self, response: pb.AcquireResponse) -> None:
        """Best effort: a lease that is not given back ends by itself."""
        leases = [extent.lease for extent in response.extents if extent.lease]
        if leases:
            request = pb.ReleaseRequest(leases=leases)
            release = self._connection.stub.Release
            self._connection.call_quietly(release, request, Deadline(RELEASE_S))


def _copy(
    source: memoryview, arriving: Arriving, deadline: Deadline, outcome: list[Landing]
) -> None:
    arriving.copy(source, deadline.at)
    outcome[arriving.position] = arriving.finish()


__all__ = ["SharedGets"]
