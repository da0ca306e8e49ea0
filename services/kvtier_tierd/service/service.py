"""The RPCs of `proto/kvtier/v1/tier.proto` over one store; what moves payloads is done
by one of the parts.

Runs in one event loop. A client that goes away cancels its call wherever that waits, so whatever a
call holds of the store is given back on the way out: a draft by its abort, a pin by its handle's
close, and what a client holds between calls by its lease.
"""

from __future__ import annotations

import asyncio

import numpy as np

from kvtier import __version__
from kvtier.tier.wire import MAX_KEYS, negotiate, shared_digest
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc
from kvtier_tierd.service.calls import rpc
from kvtier_tierd.service.requests import check_count, is_intact, names_of
from kvtier_tierd.service.shared_memory import SharedMemoryCalls
from kvtier_tierd.service.streams import StreamCalls

# Other calls have a turn after so many keys were looked up.
KEYS_A_TURN = 1 << 11
DELETED_TOGETHER = 1 << 8


class TierService(SharedMemoryCalls, StreamCalls, tier_pb2_grpc.TierServiceServicer):  # type: ignore[misc]
    """The gRPC servicer."""

    @rpc
    async def GetServerInfo(
        self, namespace: str, request: pb.GetServerInfoRequest
    ) -> pb.GetServerInfoResponse:
        shared = self.store.shared
        path, num_bytes = ("", 0) if shared is None else (shared.path, shared.num_bytes)
        return pb.GetServerInfoResponse(
            protocol_version=negotiate(request.protocol_versions),
            server_version=__version__,
            store=self.store.kind,
            namespace=namespace,
            capacity_bytes=self.store.stats().capacity_bytes,
            max_blob_bytes=self.options.max_blob_bytes,
            chunk_bytes=self.namespaces.chunk_bytes(namespace, self.options.chunk_bytes),
            shared_path=path,
            shared_bytes=num_bytes,
            shared_token=b"" if shared is None else shared_digest(shared.token),
        )

    @rpc
    async def Exists(self, namespace: str, request: pb.ExistsRequest) -> pb.ExistsResponse:
        check_count("keys", request.keys, MAX_KEYS)
        held: list[bool] = []
        for begin in range(0, len(request.keys), KEYS_A_TURN):
            keys = request.keys[begin : begin + KEYS_A_TURN]
            held += await self.store.exists(names_of(namespace, keys))
            await asyncio.sleep(0)
        run = held.index(False) if False in held else len(held)
        present = np.packbits(np.array(held, bool), bitorder="little").tobytes()
        self.metrics.looked_up(namespace, sum(held), len(held))
        return pb.ExistsResponse(leading_run=run, present=present)

    @rpc
    async def Delete(self, namespace: str, request: pb.DeleteRequest) -> pb.DeleteResponse:
        check_count("keys", request.keys)
        names, deleted = names_of(namespace, request.keys), 0
        for begin in range(0, len(names), DELETED_TOGETHER):
            some = names[begin : begin + DELETED_TOGETHER]
            # Together, because a disk can write many deletions at once.
            deleted += sum(await asyncio.gather(*(self.store.delete(name) for name in some)))
        return pb.DeleteResponse(deleted=deleted)

    @rpc
    async def Quarantine(
        self, namespace: str, request: pb.QuarantineRequest
    ) -> pb.QuarantineResponse:
        """A client says that these do not verify: those that do not verify here, either, are taken
        out of service."""
        check_count("keys", request.keys)
        bad = []
        async with self.namespaces.transfer(namespace):
            for name in names_of(namespace, dict.fromkeys(request.keys)):
                handle = await self.store.open(name)
                if handle is None:
                    continue
                try:
                    fine = await is_intact(name, handle)
                finally:
                    handle.close()
                if not fine:
                    await self.store.quarantine(name)
                    self.metrics.quarantined(namespace)
                    bad.append(name.key)
        return pb.QuarantineResponse(quarantined=bad)

    @rpc
    async def Stats(self, namespace: str, request: pb.StatsRequest) -> pb.StatsResponse:
        stats = self.store.stats()
        quota = self.namespaces.limits(namespace).quota_bytes
        return pb.StatsResponse(
            store=stats.kind,
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.used_bytes,
            blobs=stats.blobs,
            evictions=stats.evictions,
            quarantined=stats.quarantined,
            namespace_bytes=stats.namespaces.get(namespace, 0),
            namespace_quota_bytes=stats.capacity_bytes if quota is None else quota,
        )
