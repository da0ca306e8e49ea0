"""The RPCs of `proto/kvtier/v1/tier.proto` over one store; what moves payloads is done
by one of the parts.

Runs in one event loop. A client that goes away cancels its call wherever that waits, so whatever a
call holds of the store is given back on the way out: a draft by its abort, a pin by its handle's
close, and what a client holds between calls by its lease.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

from kvtier import __version__
from kvtier.tier.wire import negotiate
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc
from kvtier_tierd.limits import Budget, Namespaces
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.monitoring.tracing import Traces
from kvtier_tierd.service.calls import Calls, writer
from kvtier_tierd.service.leases import Leases
from kvtier_tierd.service.near_data import Refreshes
from kvtier_tierd.service.requests import MAX_KEYS, check_count, is_intact, names_of
from kvtier_tierd.service.shared_memory import SharedMemoryCalls
from kvtier_tierd.service.streams import PutRequests, Streams
from kvtier_tierd.stores.base import BlobStore, SharedFile

# Other calls have a turn after so many keys were looked up.
KEYS_A_TURN = 1 << 11
DELETED_TOGETHER = 1 << 8

Request = TypeVar("Request")
Response = TypeVar("Response")


def rpc(
    handler: Callable[[TierService, str, Request], Awaitable[Response]],
) -> Callable[[TierService, Request, Any], Awaitable[Response]]:
    """A method that gRPC calls, made of one that works for a namespace."""

    @functools.wraps(handler)
    async def call(self: TierService, request: Request, context: Any) -> Response:
        async with self.calls.calling(handler.__name__, context) as namespace:
            return await handler(self, namespace, request)

    return call


class TierService(tier_pb2_grpc.TierServiceServicer):
    """The gRPC servicer.

    refreshes:      what answers Refresh.
    chunk_bytes:    of a Get stream's chunks.
    max_blob_bytes: larger blobs are refused.
    budget:         counts what puts have sent and the store does not have yet.
    stall_s:        how long a stream may stand still.
    traces:         where calls are traced.
    """

    def __init__(
        self,
        store: BlobStore,
        namespaces: Namespaces,
        metrics: TierMetrics,
        refreshes: Refreshes,
        *,
        chunk_bytes: int,
        max_blob_bytes: int,
        budget: Budget,
        stall_s: float,
        traces: Traces,
    ) -> None:
        self.store = store
        self.namespaces = namespaces
        self.metrics = metrics
        self.refreshes = refreshes
        self.chunk_bytes = chunk_bytes
        self.max_blob_bytes = max_blob_bytes
        self.stall_s = stall_s
        self.leases = Leases(store)
        self.calls = Calls(namespaces, metrics, traces)
        self._streams = Streams(
            store,
            namespaces,
            metrics,
            chunk_bytes=chunk_bytes,
            max_blob_bytes=max_blob_bytes,
            budget=budget,
            stall_s=stall_s,
        )
        self._same_host = SharedMemoryCalls(store, metrics, self.leases, max_blob_bytes)

    # -- about blobs --

    @rpc
    async def GetServerInfo(
        self, namespace: str, request: pb.GetServerInfoRequest
    ) -> pb.GetServerInfoResponse:
        shared = self.store.shared or SharedFile("", 0, b"")
        return pb.GetServerInfoResponse(
            protocol_version=negotiate(request.protocol_versions),
            server_version=__version__,
            store=self.store.kind,
            namespace=namespace,
            capacity_bytes=self.store.stats().capacity_bytes,
            max_blob_bytes=self.max_blob_bytes,
            chunk_bytes=self.namespaces.chunk_bytes(namespace, self.chunk_bytes),
            shared_path=shared.path,
            shared_bytes=shared.num_bytes,
            shared_token=shared.token,
            refreshes=self.refreshes.enabled,
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

    # -- same host --

    @rpc
    async def Reserve(self, namespace: str, request: pb.ReserveRequest) -> pb.ReserveResponse:
        return await self._same_host.reserve(namespace, request)

    @rpc
    async def Commit(self, namespace: str, request: pb.CommitRequest) -> pb.CommitResponse:
        return await self._same_host.commit(namespace, request)

    @rpc
    async def Acquire(self, namespace: str, request: pb.AcquireRequest) -> pb.AcquireResponse:
        return await self._same_host.acquire(namespace, request)

    @rpc
    async def Release(self, namespace: str, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        return await self._same_host.release(namespace, request)

    # -- streams --

    @rpc
    async def Put(self, namespace: str, requests: PutRequests) -> pb.PutResponse:
        return await self._streams.put(namespace, requests)

    # Writes instead of yielding: a generator that gRPC has left closes its handle some time later.
    async def Get(  # type: ignore[override]
        self, request: pb.GetRequest, context: Any
    ) -> None:
        async with self.calls.calling("Get", context) as namespace:
            await self._streams.get(namespace, request, writer(context, self.stall_s))

    async def Refresh(  # type: ignore[override]
        self, requests: AsyncIterator[pb.RefreshRequest], context: Any
    ) -> None:
        async with self.calls.calling("Refresh", context) as namespace:
            await self.refreshes.serve(namespace, requests, writer(context, self.stall_s))


__all__ = ["TierService"]
