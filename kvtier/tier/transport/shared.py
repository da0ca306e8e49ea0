"""Payloads through the service's memory, which the client has mapped.

    put    caller         Reserve    copy ............    Commit
           service        drafts                          publishes

    get    caller         Acquire    copy ............
           other thread              copy ........        Release
           service        pins                            unpins

A second thread helps to copy and to check, which let go of Python's lock: one core does so at less
than the speed of memory, two get near it. The caller's thread is the other one, so nothing ever
waits for a thread that is busy elsewhere; and the caller does not wait for the Release, which costs
as much as copying some megabytes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvtier.errors import TierProtocolError
from kvtier.tier.blobs.payload import Bytes
from kvtier.tier.transport.connection import Connection, Deadline
from kvtier.tier.transport.landing import Arriving, Land, Landing
from kvtier.tier.transport.shared_memory import SharedMemory, copy
from kvtier.v1 import tier_pb2 as pb

RELEASE_S = 1.0
# `close` waits so long for leases to be given back; the service ends them by itself otherwise.
CLOSE_S = 0.2

Job = Callable[[], None]


class Lanes:
    """Thread-safe; calls at the same time share the second thread. No job may wait for another."""

    def __init__(self) -> None:
        # Its thread begins with its first job.
        self._second = ThreadPoolExecutor(1, thread_name_prefix="kvtier-landing")

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all of them, in any order, in this thread and in the other one.

        Returns when none is running any more. Raises what one that failed raised; those that had
        not begun by then never do.
        """
        waiting = deque(jobs)
        helping = self.later(lambda: _drain(waiting)) if len(waiting) > 1 else None
        try:
            _drain(waiting)
        finally:
            # A helper that has not begun by now has nothing left to do.
            if helping is not None and not helping.cancel():
                helping.result()

    def later(self, job: Job) -> Future[None] | None:
        """Run it in the other thread, in the order given; not at all, and None, once closed."""
        # Closed, or Python ends.
        with contextlib.suppress(RuntimeError):
            return self._second.submit(job)
        return None

    def close(self) -> None:
        """Jobs under way end by themselves; from now on `run` runs them all in its own thread."""
        self._second.shutdown(wait=False)


def _drain(waiting: deque[Job]) -> None:
    try:
        while (job := _next(waiting)) is not None:
            job()
    except BaseException:
        waiting.clear()
        raise


def _next(waiting: deque[Job]) -> Job | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None


def shared_put(
    connection: Connection,
    shared: SharedMemory,
    header: pb.BlobHeader,
    payload: Sequence[Bytes],
    deadline: Deadline,
) -> bool:
    """Store one blob; False where it is held already. Raises TierError."""
    request = pb.ReserveRequest(
        headers=[header], lease_ms=deadline.left_ms(), shared_token=shared.token
    )
    asked_at = time.monotonic()
    response: pb.ReserveResponse = connection.call(connection.stub.Reserve, request, deadline)
    if not response.extents:
        return False
    leases = [extent.lease for extent in response.extents]
    try:
        if len(leases) > 1:
            raise TierProtocolError(f"tier {connection.address}: more room than asked for")
        into = shared.view(response.extents[0].offset, header.num_bytes)
        lease_over = asked_at + response.expires_ms / 1000
        copy(payload, into, until=min(deadline.at, lease_over))
    except BaseException:
        # Best effort: a lease that is not given back ends by itself.
        release = pb.ReleaseRequest(leases=leases)
        connection.call_quietly(connection.stub.Release, release, deadline)
        raise
    connection.call(connection.stub.Commit, pb.CommitRequest(leases=leases), deadline)
    return True


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
        request = pb.AcquireRequest(
            keys=keys, lease_ms=deadline.left_ms(), shared_token=shared.token
        )
        acquire = self._connection.stub.Acquire
        response: pb.AcquireResponse = self._connection.call(acquire, request, deadline)
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
