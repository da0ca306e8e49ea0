"""The RPCs of `proto/kvtier/v1/tier.proto` over one store.

Runs in one event loop. Errors of kvtier.errors become status codes (kvtier.tier.status); anything
else is a bug, which gRPC logs and answers with UNKNOWN.

A client that goes away cancels its call wherever that waits, so whatever a call holds of the store
is given back on the way out: a draft by its abort, a pin by its handle's close, and what a client
holds between calls by its lease.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import grpc

from kvtier import __version__
from kvtier.errors import (
    KvtierError,
    TierError,
    TierExhaustedError,
    TierIntegrityError,
    TierUnavailableError,
    UsageError,
)
from kvtier.tier.blob import CHECKSUM_BYTES, MAX_LAYOUT_BYTES
from kvtier.tier.framing import frame_chunk
from kvtier.tier.keys import KEY_BYTES
from kvtier.tier.protocol import negotiate
from kvtier.tier.status import code_of
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc
from kvtier_tierd.leases import Leases, lease_seconds
from kvtier_tierd.metrics import TierMetrics
from kvtier_tierd.namespaces import Namespaces, namespace_of
from kvtier_tierd.near_data import Refreshes
from kvtier_tierd.stores.base import BlobInfo, BlobName, BlobStore, Draft
from kvtier_tierd.verifying import is_intact

MAX_KEYS = 1 << 16

Request = TypeVar("Request")
Response = TypeVar("Response")
PutRequests = AsyncIterator[pb.PutRequest | memoryview]


class Shared(NamedTuple):
    """Memory that clients on the same host may map: a file, its size in bytes, its token."""

    path: str
    size: int
    token: bytes


def rpc(
    handler: Callable[[TierService, str, Request], Awaitable[Response]],
) -> Callable[[TierService, Request, Any], Awaitable[Response]]:
    """What gRPC calls, made of what does the work for a namespace."""

    @functools.wraps(handler)
    async def call(self: TierService, request: Request, context: Any) -> Response:
        async with self.calling(handler.__name__, context) as namespace:
            return await handler(self, namespace, request)

    return call


class TierService(tier_pb2_grpc.TierServiceServicer):
    """See the module docstring.

    refreshes:      what answers Refresh.
    shared:         the memory that same-host clients may map, or None.
    chunk_bytes:    of a Get stream's chunks.
    max_blob_bytes: larger blobs are refused.
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
        shared: Shared | None = None,
    ) -> None:
        self.store = store
        self.refreshes = refreshes
        self.namespaces = namespaces
        self.metrics = metrics
        self.chunk_bytes = chunk_bytes
        self.max_blob_bytes = max_blob_bytes
        self.shared = shared
        self.leases = Leases(store)
        self.draining = False
        self._running: set[asyncio.Task[Any]] = set()

    # -- what every call goes through --

    @asynccontextmanager
    async def calling(self, method: str, context: Any) -> AsyncIterator[str]:
        """One call of the namespace that this yields; its errors become status codes."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        # Only then has gRPC sent the status as well.
        task.add_done_callback(self._running.discard)
        try:
            yield self._enter(context)
        except KvtierError as error:
            code = code_of(error)
            self.metrics.failed(method, code.name)
            await context.abort(code, str(error))
        except grpc.aio.AbortError:
            # Of a request that is no message; answered and counted (decoding.py).
            raise
        except Exception:
            self.metrics.failed(method, "UNKNOWN")
            raise

    def _enter(self, context: Any) -> str:
        if self.draining:
            raise TierUnavailableError("the tier is shutting down")
        namespace = namespace_of(context)
        self.namespaces.limits(namespace)
        return namespace

    async def idle(self, timeout_s: float) -> None:
        """Wait until no call is running, but no longer."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def _names(self, namespace: str, keys: Iterable[bytes]) -> list[BlobName]:
        names = [BlobName(namespace, key) for key in keys]
        if len(names) > MAX_KEYS:
            raise UsageError("keys", f"at most {MAX_KEYS}", len(names))
        for name in names:
            if len(name.key) != KEY_BYTES:
                raise UsageError("keys", f"{KEY_BYTES} bytes each", f"{len(name.key)}")
        return names

    def _info(self, header: pb.BlobHeader) -> BlobInfo:
        if header.num_bytes > self.max_blob_bytes:
            raise TierExhaustedError(
                f"a blob of {header.num_bytes} bytes; at most {self.max_blob_bytes} are allowed"
            )
        if header.num_bytes < 1:
            raise UsageError("num_bytes", "at least 1", header.num_bytes)
        if len(header.layout) > MAX_LAYOUT_BYTES:
            raise UsageError("layout", f"at most {MAX_LAYOUT_BYTES} bytes", len(header.layout))
        if len(header.checksum) != CHECKSUM_BYTES:
            raise UsageError("checksum", f"{CHECKSUM_BYTES} bytes", len(header.checksum))
        return BlobInfo(header.num_bytes, header.layout, header.checksum)

    # -- about blobs --

    @rpc
    async def GetServerInfo(
        self, namespace: str, request: pb.GetServerInfoRequest
    ) -> pb.GetServerInfoResponse:
        shared = self.shared or Shared("", 0, b"")
        return pb.GetServerInfoResponse(
            protocol_version=negotiate(request.protocol_versions),
            server_version=__version__,
            store=self.store.kind,
            namespace=namespace,
            capacity_bytes=self.store.stats().capacity_bytes,
            max_blob_bytes=self.max_blob_bytes,
            chunk_bytes=self.namespaces.chunk_bytes(namespace, self.chunk_bytes),
            shared_path=shared.path,
            shared_bytes=shared.size,
            shared_token=shared.token,
            refreshes=self.refreshes.enabled,
        )

    @rpc
    async def Exists(self, namespace: str, request: pb.ExistsRequest) -> pb.ExistsResponse:
        held = await self.store.exists(self._names(namespace, request.keys))
        run = next((i for i, one in enumerate(held) if not one), len(held))
        present = bytearray((len(held) + 7) // 8)
        for i, one in enumerate(held):
            present[i // 8] |= one << i % 8
        self.metrics.looked_up(namespace, sum(held), len(held))
        return pb.ExistsResponse(leading_run=run, present=bytes(present))

    @rpc
    async def Delete(self, namespace: str, request: pb.DeleteRequest) -> pb.DeleteResponse:
        names = self._names(namespace, request.keys)
        # Together, because a disk can write many deletions at once.
        deleted = await asyncio.gather(*(self.store.delete(name) for name in names))
        return pb.DeleteResponse(deleted=sum(deleted))

    @rpc
    async def Quarantine(
        self, namespace: str, request: pb.QuarantineRequest
    ) -> pb.QuarantineResponse:
        bad = []
        async with self.namespaces.transfer(namespace):
            for name in self._names(namespace, request.keys):
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

    def _check_shared(self, token: bytes) -> None:
        if self.shared is None:
            raise UsageError("shared memory", "a server that shares its memory", "one without")
        if token != self.shared.token:
            raise TierUnavailableError("the memory that you have mapped is not mine; connect again")

    @rpc
    async def Reserve(self, namespace: str, request: pb.ReserveRequest) -> pb.ReserveResponse:
        self._check_shared(request.shared_token)
        lease_s = lease_seconds(request.lease_ms)
        extents: list[pb.Extent] = []
        names = self._names(namespace, (header.key for header in request.headers))
        infos = [self._info(header) for header in request.headers]
        held = await self.store.exists(names)
        for name, info, known in zip(names, infos, held, strict=True):
            if known:
                continue
            try:
                draft = await self.store.reserve(name, info)
            except TierError:
                if not extents:
                    raise
                break
            assert draft.offset is not None, "a shared store knows where its drafts are"
            lease = self.leases.grant(namespace, draft, lease_s)
            extents.append(pb.Extent(key=name.key, lease=lease, offset=draft.offset))
        return pb.ReserveResponse(extents=extents, expires_ms=round(lease_s * 1000))

    @rpc
    async def Commit(self, namespace: str, request: pb.CommitRequest) -> pb.CommitResponse:
        drafts = self.leases.take_drafts(namespace, request.leases)
        stored = len(drafts)
        try:
            while drafts:
                draft = drafts.pop()
                await self.store.commit(draft)
                self.metrics.moved("put", namespace, draft.info.num_bytes, shared=True)
        finally:
            for draft in drafts:
                await self.store.abort(draft)
        return pb.CommitResponse(stored=stored)

    @rpc
    async def Acquire(self, namespace: str, request: pb.AcquireRequest) -> pb.AcquireResponse:
        self._check_shared(request.shared_token)
        lease_s = lease_seconds(request.lease_ms)
        extents, leased, num_bytes = [], 0, 0
        for name in self._names(namespace, request.keys):
            handle = await self.store.open(name)
            if handle is None:
                self.metrics.missed(namespace)
                continue
            header = _header(name.key, handle.info)
            if handle.offset is None:
                handle.close()
                extents.append(pb.Extent(key=name.key, header=header))
                continue
            lease = self.leases.grant(namespace, handle, lease_s)
            extents.append(
                pb.Extent(key=name.key, lease=lease, offset=handle.offset, header=header)
            )
            leased, num_bytes = leased + 1, num_bytes + handle.info.num_bytes
        if leased:
            # Once, because it costs about as much as a blob's lease.
            self.metrics.moved("get", namespace, num_bytes, shared=True, blobs=leased)
        return pb.AcquireResponse(extents=extents, expires_ms=round(lease_s * 1000))

    @rpc
    async def Release(self, namespace: str, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        for number in request.leases:
            await self.leases.release(namespace, number)
        return pb.ReleaseResponse()

    # -- streams --

    @rpc
    async def Put(self, namespace: str, requests: PutRequests) -> pb.PutResponse:
        async with self.namespaces.transfer(namespace):
            requests = aiter(requests)
            first = await anext(requests, None)
            if not isinstance(first, pb.PutRequest) or first.WhichOneof("part") != "header":
                raise UsageError("put", "a header first", "none")
            (name,) = self._names(namespace, [first.header.key])
            info = self._info(first.header)
            if not first.replace and (await self.store.exists([name]))[0]:
                return pb.PutResponse(stored=False)
            draft = await self.store.reserve(name, info)
            await self._received(draft, requests)
            await self.store.commit(draft)
            self.metrics.moved("put", namespace, info.num_bytes, shared=False)
            return pb.PutResponse(stored=True)

    async def _received(self, draft: Draft, requests: PutRequests) -> None:
        try:
            await self._receive(draft, requests)
        except BaseException:
            await self.store.abort(draft)
            raise

    async def _receive(self, draft: Draft, requests: PutRequests) -> None:
        """Fill the buffer with the chunks that follow. Raises TierIntegrityError unless they do."""
        buffer, position = draft.buffer, 0
        async for request in requests:
            if not isinstance(request, memoryview):
                raise UsageError("put", "chunks after the header", "another header")
            if position + len(request) > len(buffer):
                raise TierIntegrityError(
                    f"more than the {len(buffer)} bytes of the header were sent"
                )
            buffer[position : position + len(request)] = request
            position += len(request)
            # Nothing more is read meanwhile, so the client waits, too.
            await self.namespaces.pace(draft.name.namespace, len(request))
        if position != len(buffer):
            raise TierIntegrityError(f"{position} of {len(buffer)} bytes were sent")

    # Writes instead of yielding: a generator that nobody asks any more closes its handle some time.
    async def Get(  # type: ignore[override]
        self, request: pb.GetRequest, context: Any
    ) -> None:
        async with (
            self.calling("Get", context) as namespace,
            self.namespaces.transfer(namespace),
        ):
            for name in self._names(namespace, request.keys):
                await self._send(name, context.write)

    async def Refresh(  # type: ignore[override]
        self, requests: AsyncIterator[pb.RefreshRequest], context: Any
    ) -> None:
        async with self.calling("Refresh", context) as namespace:
            await self.refreshes.serve(namespace, requests, context.write)

    async def _send(self, name: BlobName, write: Callable[[Any], Awaitable[None]]) -> None:
        handle = await self.store.open(name)
        if handle is None:
            self.metrics.missed(name.namespace)
            await write(pb.GetResponse(missing=name.key))
            return
        try:
            await write(pb.GetResponse(header=_header(name.key, handle.info)))
            size = self.namespaces.chunk_bytes(name.namespace, self.chunk_bytes)
            for piece in handle.pieces:
                for begin in range(0, len(piece), size):
                    chunk = frame_chunk(piece[begin : begin + size])
                    await self.namespaces.pace(name.namespace, len(chunk))
                    await write(chunk)
        finally:
            handle.close()
        self.metrics.moved("get", name.namespace, handle.info.num_bytes, shared=False)


def _header(key: bytes, info: BlobInfo) -> pb.BlobHeader:
    return pb.BlobHeader(
        key=key, num_bytes=info.num_bytes, layout=info.layout, checksum=info.checksum
    )


__all__ = ["Shared", "TierService"]
