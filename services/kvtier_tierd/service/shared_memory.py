"""Calls of clients on the same host, which read and write the store's memory themselves.

put    Reserve: a draft under a lease      the client writes      Commit | Release
get    Acquire: a blob under a lease       the client reads       Release
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtier.errors import TierError, TierUnavailableError, UsageError
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.service.leases import Leases, lease_seconds
from kvtier_tierd.service.requests import (
    check_count,
    header_of,
    info_of,
    names_of,
    yield_to_loop,
)
from kvtier_tierd.stores.base import BlobStore, SharedFile


class SharedMemoryCalls:
    """Each method answers one RPC. Where the store shares no memory, every Reserve and Acquire is
    refused.

    max_blob_bytes: larger blobs are refused.
    Methods raise KvtierError for what a request may not ask, or what there is no room for.
    """

    def __init__(
        self, store: BlobStore, metrics: TierMetrics, leases: Leases, max_blob_bytes: int
    ) -> None:
        self._store, self._metrics, self._leases = store, metrics, leases
        self._max_blob_bytes = max_blob_bytes

    async def reserve(self, namespace: str, request: pb.ReserveRequest) -> pb.ReserveResponse:
        shared = self._check_shared(request.shared_token)
        check_count("headers", request.headers)
        lease_s = lease_seconds(request.lease_ms)
        extents: list[pb.Extent] = []
        names = names_of(namespace, (header.key for header in request.headers))
        infos = [info_of(header, self._max_blob_bytes) for header in request.headers]
        held = await self._store.exists(names)
        async with self._leasing(namespace) as leases:
            for name, info, known in zip(names, infos, held, strict=True):
                if known:
                    continue
                try:
                    self._leases.check_room(namespace, info.num_bytes, shared.num_bytes)
                    draft = await self._store.reserve(name, info)
                except TierError:
                    if not extents:
                        raise
                    break
                assert draft.offset is not None, "a shared store knows where its drafts are"
                leases.append(self._leases.grant(namespace, draft, lease_s))
                extents.append(pb.Extent(key=name.key, lease=leases[-1], offset=draft.offset))
                await yield_to_loop(len(leases))
        return pb.ReserveResponse(extents=extents, expires_ms=round(lease_s * 1000))

    async def commit(self, namespace: str, request: pb.CommitRequest) -> pb.CommitResponse:
        check_count("leases", request.leases)
        drafts = self._leases.take_drafts(namespace, request.leases)
        stored = len(drafts)
        try:
            while drafts:
                draft = drafts.pop()
                await self._store.commit(draft)
                self._metrics.moved("put", namespace, draft.info.num_bytes, shared=True)
                await yield_to_loop(len(drafts))
        finally:
            for draft in drafts:
                await self._store.abort(draft)
        return pb.CommitResponse(stored=stored)

    async def acquire(self, namespace: str, request: pb.AcquireRequest) -> pb.AcquireResponse:
        self._check_shared(request.shared_token)
        check_count("keys", request.keys)
        lease_s = lease_seconds(request.lease_ms)
        extents: dict[bytes, pb.Extent] = {}
        num_bytes = 0
        async with self._leasing(namespace) as leases:
            # Equal keys share a lease.
            for number, name in enumerate(names_of(namespace, dict.fromkeys(request.keys))):
                await yield_to_loop(number)
                handle = await self._store.open(name)
                if handle is None:
                    self._metrics.missed(namespace)
                    continue
                extents[name.key] = extent = pb.Extent(
                    key=name.key, header=header_of(name.key, handle.info)
                )
                if handle.offset is None:
                    handle.close()
                    continue
                leases.append(self._leases.grant(namespace, handle, lease_s))
                extent.lease, extent.offset = leases[-1], handle.offset
                num_bytes += handle.info.num_bytes
        if leases:
            # Once, because it costs about as much as a blob's lease.
            self._metrics.moved("get", namespace, num_bytes, shared=True, blobs=len(leases))
        found = [extents[key] for key in request.keys if key in extents]
        return pb.AcquireResponse(extents=found, expires_ms=round(lease_s * 1000))

    async def release(self, namespace: str, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        check_count("leases", request.leases)
        for number, lease in enumerate(request.leases):
            await yield_to_loop(number)
            await self._leases.release(namespace, lease)
        return pb.ReleaseResponse()

    def _check_shared(self, token: bytes) -> SharedFile:
        shared = self._store.shared
        if shared is None:
            raise UsageError("shared memory", "a server that shares its memory", "one without")
        if token != shared.token:
            raise TierUnavailableError("the memory that you have mapped is not mine; connect again")
        return shared

    @asynccontextmanager
    async def _leasing(self, namespace: str) -> AsyncIterator[list[int]]:
        """Numbers of leases that are granted in the block, for it to fill; where it fails, the
        client hears of none of them, and they are over."""
        numbers: list[int] = []
        try:
            yield numbers
        except BaseException:
            for number in numbers:
                await self._leases.release(namespace, number)
            raise


__all__ = ["SharedMemoryCalls"]
