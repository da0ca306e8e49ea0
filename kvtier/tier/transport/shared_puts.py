"""Puts into shared memory: reserve, copy, commit.

caller     Reserve    copy ............    Commit
service    drafts                          publishes
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtier.errors import TierProtocolError
from kvtier.tier.blobs.payload import Bytes
from kvtier.tier.transport.connection import Connection
from kvtier.tier.transport.deadline import Deadline
from kvtier.tier.transport.shared_memory import SharedMemory, copy
from kvtier.v1 import tier_pb2 as pb


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


__all__ = ["shared_put"]
