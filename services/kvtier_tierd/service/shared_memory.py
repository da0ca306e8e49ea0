"""Calls of clients on the same host, which read and write the store's memory themselves.

put    Reserve: a draft under a lease      the client writes      Commit | Release
get    Acquire: a blob under a lease       the client reads       Release
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtier.errors import TierError, TierUnavailableError, UsageError
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.service.calls import Calls, rpc
from kvtier_tierd.service.leases import lease_seconds
from kvtier_tierd.service.requests import check_count, header_of, info_of, names_of, yield_to_loop
from kvtier_tierd.stores.base import SharedFile


class SharedMemoryCalls(Calls):
    """The calls of such clients. Without shared memory, Reserve and Acquire are refused."""

    @rpc
    async def Reserve(self, namespace: str, request: pb.ReserveRequest) -> pb.ReserveResponse:
        shared = self._check_shared(request.shared_token)
        check_count("headers", request.headers)
        lease_s = lease_seconds(request.lease_ms)
        extents: list[pb.Extent] = []
        names = names_of(namespace, (header.key for header in request.headers))
        infos = [info_of(header, self.options.max_blob_bytes) for header in request.headers]
        held = await self.store.exists(names)
        async with self._leasing(namespace) as leases:
            for name, info, known in zip(names, infos, held, strict=True):
                if known:
                    continue
                try:
                    self.leases.check_room(namespace, info.num_bytes, shared.num_bytes)
                    draft = await self.store.reserve(name, info)
                except TierError:
                    if not extents:
                        raise
                    break
                assert draft.offset is not None, "a shared store knows where its drafts are"
                leases.append(self.leases.grant(namespace, draft, lease_s))
                extents.append(pb.Extent(key=name.key, lease=leases[-1], offset=draft.offset))
                await yield_to_loop(len(leases))
        return pb.ReserveResponse(extents=extents, expires_ms=round(lease_s * 1000))

    @rpc
    async def Commit(self, namespace: str, request: pb.CommitRequest) -> pb.CommitResponse:
        check_count("leases", request.leases)
        drafts = self.leases.take_drafts(namespace, request.leases)
        stored = len(drafts)
        try:
            while drafts:
                draft = drafts.pop()
                await self.store.commit(draft)
                self.metrics.moved("put", namespace, draft.info.num_bytes, shared=True)
                await yield_to_loop(len(drafts))
        finally:
            for draft in drafts:
                await self.store.abort(draft)
        return pb.CommitResponse(stored=stored)

    @rpc
    async def Acquire(self, namespace: str, request: pb.AcquireRequest) -> pb.AcquireResponse:
        self._check_shared(request.shared_token)
        check_count("keys", request.keys)
        lease_s = lease_seconds(request.lease_ms)
        extents: dict[bytes, pb.Extent] = {}
        num_bytes = 0
        async with self._leasing(namespace) as leases:
            # Equal keys share a lease.
            for number, name in enumerate(names_of(namespace, dict.fromkeys(request.keys))):
                await yield_to_loop(number)
                handle = await self.store.open(name)
                if handle is None:
                    self.metrics.missed(namespace)
                    continue
                extents[name.key] = extent = pb.Extent(
                    key=name.key, header=header_of(name.key, handle.info)
                )
                if handle.offset is None:
                    handle.close()
                    continue
                leases.append(self.leases.grant(namespace, handle, lease_s))
                extent.lease, extent.offset = leases[-1], handle.offset
                num_bytes += handle.info.num_bytes
        if leases:
            # Once, because it costs about as much as a blob's lease.
            self.metrics.moved("get", namespace, num_bytes, shared=True, blobs=len(leases))
        found = [extents[key] for key in request.keys if key in extents]
        return pb.AcquireResponse(extents=found, expires_ms=round(lease_s * 1000))

    @rpc
    async def Release(self, namespace: str, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        check_count("leases", request.leases)
        for number, lease in enumerate(request.leases):
            await yield_to_loop(number)
            await self.leases.release(namespace, lease)
        return pb.ReleaseResponse()

    def _check_shared(self, token: bytes) -> SharedFile:
        shared = self.store.shared
        if shared is None:
            raise UsageError("shared memory", "a server that shares its memory", "one without")
        # Room is handed out with what others left in it, so only who reads the file anyway may ask.
        if not secrets.compare_digest(token, shared.token):
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
                await self.leases.release(namespace, number)
            raise
