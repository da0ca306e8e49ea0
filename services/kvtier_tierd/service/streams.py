"""Payloads in chunks: Put and Get.

Only a payload that is there as a whole takes room in a store, so a header alone evicts nothing, and
a put that never ends holds no more than what its client has sent. Chunks are kept as gRPC handed
them over; the one copy that a payload costs is the one into the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import closing

from kvtier.errors import TierIntegrityError, UsageError
from kvtier.tier.wire import frame_chunk
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits import Budget, Namespaces, Progress
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.service.calls import Write
from kvtier_tierd.service.requests import check_count, header_of, info_of, names_of
from kvtier_tierd.stores.base import BlobName, BlobStore, Buffer, filled

# A chunk is an object of some hundred bytes: shorter ones than this are joined.
JOINED_BYTES = 16 << 10

PutRequests = AsyncIterator[pb.PutRequest | memoryview]


class Staged:
    """A payload of `num_bytes`, counted in the budget until it is closed."""

    def __init__(self, budget: Budget, namespace: str, num_bytes: int) -> None:
        self._budget, self._namespace, self._num_bytes = budget, namespace, num_bytes
        self._arrived_bytes = 0
        self._pieces: deque[Buffer | bytearray] = deque()

    def close(self) -> None:
        self._pieces.clear()
        self._budget.give_back(self._namespace, self._arrived_bytes)

    def add(self, chunk: Buffer) -> None:
        """Raises TierIntegrityError for more than the payload, TierExhaustedError for more than
        the budget."""
        if self._arrived_bytes + len(chunk) > self._num_bytes:
            raise TierIntegrityError(
                f"more than the {self._num_bytes} bytes of the header were sent"
            )
        self._budget.take(self._namespace, len(chunk))
        self._arrived_bytes += len(chunk)
        last = self._pieces[-1] if self._pieces else None
        if len(chunk) >= JOINED_BYTES:
            self._pieces.append(chunk)
        elif isinstance(last, bytearray) and len(last) < JOINED_BYTES:
            last += chunk
        elif chunk:
            self._pieces.append(bytearray(chunk))

    def finish(self) -> None:
        """Raises TierIntegrityError where some of the payload is missing."""
        if self._arrived_bytes != self._num_bytes:
            raise TierIntegrityError(f"{self._arrived_bytes} of {self._num_bytes} bytes were sent")

    def pieces(self) -> Iterator[Buffer]:
        """The payload in order, once: each piece is let go of when the next one is asked for."""
        while self._pieces:
            yield memoryview(self._pieces.popleft())


class Streams:
    """The Puts and Gets of a service.

    chunk_bytes:    the longest chunk that is sent.
    max_blob_bytes: larger blobs are refused.
    budget:         counts what clients have sent and the store does not have yet.
    stall_s:        how long a stream may stand still.
    """

    def __init__(
        self,
        store: BlobStore,
        namespaces: Namespaces,
        metrics: TierMetrics,
        *,
        chunk_bytes: int,
        max_blob_bytes: int,
        budget: Budget,
        stall_s: float,
    ) -> None:
        self._store, self._namespaces, self._metrics = store, namespaces, metrics
        self._chunk_bytes = chunk_bytes
        self._max_blob_bytes, self._budget, self._stall_s = max_blob_bytes, budget, stall_s

    async def put(self, namespace: str, requests: PutRequests) -> pb.PutResponse:
        """One Put: a header, then chunks of payload. Raises KvtierError where it makes no sense,
        stalls or finds no room."""
        async with self._namespaces.transfer(namespace):
            requests, progress = aiter(requests), Progress(self._stall_s)
            first = await progress.wait(anext(requests, None))
            if not isinstance(first, pb.PutRequest) or first.WhichOneof("part") != "header":
                raise UsageError("put", "a header first", "none")
            (name,) = names_of(namespace, [first.header.key])
            info = info_of(first.header, self._max_blob_bytes)
            self._store.check(name, info)
            if not first.replace and (await self._store.exists([name]))[0]:
                return pb.PutResponse(stored=False)
            with closing(Staged(self._budget, namespace, info.num_bytes)) as staged:
                await self._receive(staged, namespace, requests, progress)
                draft = await filled(self._store, name, info, staged.pieces())
                await self._store.commit(draft)
            self._metrics.moved("put", namespace, info.num_bytes, shared=False)
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
            await self._namespaces.pace(namespace, len(request))
        staged.finish()

    async def get(self, namespace: str, request: pb.GetRequest, write: Write) -> None:
        """One Get: for each blob a header and its payload, or that it is missing. Raises
        KvtierError where it makes no sense or its client stalls."""
        async with self._namespaces.transfer(namespace):
            check_count("keys", request.keys)
            for name in names_of(namespace, request.keys):
                await self._send(name, write)

    async def _send(self, name: BlobName, write: Write) -> None:
        handle = await self._store.open(name)
        if handle is None:
            self._metrics.missed(name.namespace)
            await write(pb.GetResponse(missing=name.key))
            return
        try:
            await write(pb.GetResponse(header=header_of(name.key, handle.info)))
            size = self._namespaces.chunk_bytes(name.namespace, self._chunk_bytes)
            for piece in handle.pieces:
                for begin in range(0, len(piece), size):
                    chunk = frame_chunk(piece[begin : begin + size])
                    await self._namespaces.pace(name.namespace, len(chunk))
                    await write(chunk)
        finally:
            handle.close()
        self._metrics.moved("get", name.namespace, handle.info.num_bytes, shared=False)
