"""The RPCs of `proto/kvtier/v1/tier.proto` over one store.

Runs in one event loop. Errors of kvtier.errors become status codes (kvtier.tier.wire.status);
anything else is a bug, which gRPC logs and answers with UNKNOWN.

A client that goes away cancels its call wherever that waits, so whatever a call holds of the store
is given back on the way out: a draft by its abort, a pin by its handle's close, and what a client
holds between calls by its lease.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sized
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeVar

import grpc
import numpy as np

from kvtier import __version__
from kvtier.errors import (
    KvtierError,
    TierError,
    TierExhaustedError,
    TierUnavailableError,
    UsageError,
)
from kvtier.tier.blobs.keys import KEY_BYTES
from kvtier.tier.blobs.payload import CHECKSUM_BYTES, MAX_LAYOUT_BYTES
from kvtier.tier.wire.framing import frame_chunk
from kvtier.tier.wire.protocol import negotiate
from kvtier.tier.wire.status import code_of
from kvtier.v1 import tier_pb2 as pb
from kvtier.v1 import tier_pb2_grpc
from kvtier_tierd.limits.budget import Budget
from kvtier_tierd.limits.namespaces import Namespaces, namespace_of
from kvtier_tierd.limits.progress import Progress, StalledError
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.service.leases import Leases, lease_seconds
from kvtier_tierd.service.near_data import Refreshes
from kvtier_tierd.service.staging import Staged
from kvtier_tierd.service.verifying import is_intact
from kvtier_tierd.stores.base import BlobInfo, BlobName, BlobStore, Draft, fill

# Of a call that looks keys up, and of one that does something for each of them.
MAX_KEYS = 1 << 16
MAX_HELD_KEYS = 1 << 12
# After so many keys the other calls have a turn: looked up, and opened or leased.
KEYS_A_TURN, HELD_KEYS_A_TURN = 1 << 11, 1 << 6
DELETED_TOGETHER = 1 << 8

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
    budget:         of what puts have sent and is not stored yet.
    stall_s:        how long a stream may stand still.
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
        shared: Shared | None = None,
    ) -> None:
        self.store = store
        self.refreshes = refreshes
        self.namespaces = namespaces
        self.metrics = metrics
        self.chunk_bytes = chunk_bytes
        self.max_blob_bytes = max_blob_bytes
        self.budget = budget
        self.stall_s = stall_s
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
            with _cancelled_with_its_client():
                if isinstance(error, StalledError) and error.writing is not None:
                    # Behind it is where the status goes. By now the call holds nothing but this.
                    await error.writing
                await context.abort(code, str(error))
        except grpc.aio.AbortError:
            # Of a request that is no message; answered and counted (network/decoding.py).
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
        check_count("keys", request.keys, MAX_KEYS)
        held: list[bool] = []
        for begin in range(0, len(request.keys), KEYS_A_TURN):
            keys = request.keys[begin : begin + KEYS_A_TURN]
            held += await self.store.exists(self._names(namespace, keys))
            await asyncio.sleep(0)
        run = held.index(False) if False in held else len(held)
        present = np.packbits(np.array(held, bool), bitorder="little").tobytes()
        self.metrics.looked_up(namespace, sum(held), len(held))
        return pb.ExistsResponse(leading_run=run, present=present)

    @rpc
    async def Delete(self, namespace: str, request: pb.DeleteRequest) -> pb.DeleteResponse:
        check_count("keys", request.keys)
        names, deleted = self._names(namespace, request.keys), 0
        for begin in range(0, len(names), DELETED_TOGETHER):
            some = names[begin : begin + DELETED_TOGETHER]
            # Together, because a disk can write many deletions at once.
            deleted += sum(await asyncio.gather(*(self.store.delete(name) for name in some)))
        return pb.DeleteResponse(deleted=deleted)

    @rpc
    async def Quarantine(
        self, namespace: str, request: pb.QuarantineRequest
    ) -> pb.QuarantineResponse:
        check_count("keys", request.keys)
        bad = []
        async with self.namespaces.transfer(namespace):
            for name in self._names(namespace, dict.fromkeys(request.keys)):
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

    @rpc
    async def Reserve(self, namespace: str, request: pb.ReserveRequest) -> pb.ReserveResponse:
        self._check_shared(request.shared_token)
        check_count("headers", request.headers)
        lease_s = lease_seconds(request.lease_ms)
        extents: list[pb.Extent] = []
        names = self._names(namespace, (header.key for header in request.headers))
        infos = [self._info(header) for header in request.headers]
        held = await self.store.exists(names)
        async with self._leasing(namespace) as leases:
            for name, info, known in zip(names, infos, held, strict=True):
                if known:
                    continue
                try:
                    draft = await self._reserve_shared(name, info)
                except TierError:
                    if not extents:
                        raise
                    break
                assert draft.offset is not None, "a shared store knows where its drafts are"
                leases.append(self.leases.grant(namespace, draft, lease_s))
                extents.append(pb.Extent(key=name.key, lease=leases[-1], offset=draft.offset))
                await _let_others_in(len(leases))
        return pb.ReserveResponse(extents=extents, expires_ms=round(lease_s * 1000))

    async def _reserve_shared(self, name: BlobName, info: BlobInfo) -> Draft:
        assert self.shared is not None, "_check_shared"
        self.leases.check_room(name.namespace, info.num_bytes, self.shared.size)
        return await self.store.reserve(name, info)

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
                await _let_others_in(len(drafts))
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
            for number, name in enumerate(self._names(namespace, dict.fromkeys(request.keys))):
                await _let_others_in(number)
                handle = await self.store.open(name)
                if handle is None:
                    self.metrics.missed(namespace)
                    continue
                extents[name.key] = extent = pb.Extent(
                    key=name.key, header=_header(name.key, handle.info)
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
            await _let_others_in(number)
            await self.leases.release(namespace, lease)
        return pb.ReleaseResponse()

    # -- streams --

    @rpc
    async def Put(self, namespace: str, requests: PutRequests) -> pb.PutResponse:
        async with self.namespaces.transfer(namespace):
            requests, progress = aiter(requests), Progress(self.stall_s)
            first = await progress.wait(anext(requests, None))
            if not isinstance(first, pb.PutRequest) or first.WhichOneof("part") != "header":
                raise UsageError("put", "a header first", "none")
            (name,) = self._names(namespace, [first.header.key])
            info = self._info(first.header)
            self.store.check(name, info)
            if not first.replace and (await self.store.exists([name]))[0]:
                return pb.PutResponse(stored=False)
            with Staged(self.budget, namespace, info.num_bytes) as staged:
                await self._receive(staged, namespace, requests, progress)
                await self._store(name, info, staged)
            self.metrics.moved("put", namespace, info.num_bytes, shared=False)
            return pb.PutResponse(stored=True)

    async def _receive(
        self, staged: Staged, namespace: str, requests: PutRequests, progress: Progress
    ) -> None:
        """Stage the chunks that follow. Raises TierIntegrityError unless they are the payload."""
        while (request := await progress.wait(anext(requests, None))) is not None:
            if not isinstance(request, memoryview):
                raise UsageError("put", "chunks after the header", "another header")
            staged.add(request)
            progress.moved(len(request))
            # Nothing more is read meanwhile, so the client waits, too.
            await self.namespaces.pace(namespace, len(request))
        staged.finish()

    async def _store(self, name: BlobName, info: BlobInfo, staged: Staged) -> None:
        draft = await self.store.reserve(name, info)
        try:
            await fill(draft, staged.pieces())
        except BaseException:
            await self.store.abort(draft)
            raise
        await self.store.commit(draft)

    # Writes instead of yielding: a generator that gRPC has left closes its handle some time later.
    async def Get(  # type: ignore[override]
        self, request: pb.GetRequest, context: Any
    ) -> None:
        async with (
            self.calling("Get", context) as namespace,
            self.namespaces.transfer(namespace),
        ):
            check_count("keys", request.keys)
            write = self._writer(context)
            for name in self._names(namespace, request.keys):
                await self._send(name, write)

    async def Refresh(  # type: ignore[override]
        self, requests: AsyncIterator[pb.RefreshRequest], context: Any
    ) -> None:
        async with self.calling("Refresh", context) as namespace:
            await self.refreshes.serve(namespace, requests, self._writer(context))

    def _writer(self, context: Any) -> Callable[[Any], Awaitable[None]]:
        """Writes to a client that may be slow, but not stand still."""
        progress = Progress(self.stall_s)

        async def write(message: Any) -> None:
            writing = asyncio.ensure_future(context.write(message))
            try:
                with _cancelled_with_its_client():
                    await progress.wait(asyncio.shield(writing))
            except StalledError as error:
                error.writing = writing
                raise
            except BaseException:
                writing.cancel()
                raise
            progress.moved(len(message) if isinstance(message, bytes) else message.ByteSize())

        return write

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


@contextmanager
def _cancelled_with_its_client() -> Iterator[None]:
    """gRPC cancels the call of a client that is gone, but a message on its way may fail before
    that; to the call this is the same, and no error of the service."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("its client is gone") from error


def check_count(field: str, values: Sized, most: int = MAX_HELD_KEYS) -> None:
    """Raises UsageError for a field of a request that has more values than a call may."""
    if len(values) > most:
        raise UsageError(field, f"at most {most}", len(values))


async def _let_others_in(number: int) -> None:
    """Called for every key: now and then the event loop turns."""
    if number % HELD_KEYS_A_TURN == 0:
        await asyncio.sleep(0)


def _header(key: bytes, info: BlobInfo) -> pb.BlobHeader:
    return pb.BlobHeader(
        key=key, num_bytes=info.num_bytes, layout=info.layout, checksum=info.checksum
    )


__all__ = ["Shared", "TierService"]
