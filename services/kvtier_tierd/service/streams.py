"""Payloads in chunks: Put and Get.

Only a payload that is there as a whole takes room in a store, so a header alone evicts nothing, and
a put that never ends holds no more than what its client has sent. Chunks are kept as gRPC handed
them over; the one copy that a payload costs is the one into the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

from kvtier.errors import TierIntegrityError, UsageError
from kvtier.tier.wire import frame_chunk
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits import Budget, Progress
from kvtier_tierd.service.calls import Calls, Write, rpc
from kvtier_tierd.service.requests import check_count, header_of, info_of, names_of
from kvtier_tierd.stores.base import BlobName, Buffer, filled

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


class StreamCalls(Calls):
    """Put and Get."""

    @rpc
    async def Put(self, namespace: str, requests: PutRequests) -> pb.PutResponse:
        async with self.namespaces.transfer(namespace):
            requests, progress = aiter(requests), Progress(self.options.stall_s)
            first = await progress.wait(anext(requests, None))
            if not isinstance(first, pb.PutRequest) or first.WhichOneof("part") != "header":
                raise UsageError("put", "a header first", "none")
            (name,) = names_of(namespace, [first.header.key])
            info = info_of(first.header, self.options.max_blob_bytes)
            self.store.check(name, info)
            if not first.replace and (await self.store.exists([name]))[0]:
                return pb.PutResponse(stored=False)
            with closing(Staged(self.budget, namespace, info.num_bytes)) as staged:
                await self._receive(staged, namespace, requests, progress)
                draft = await filled(self.store, name, info, staged.pieces())
                await self.store.commit(draft)
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

    # Writes instead of yielding: a generator that gRPC has left closes its handle some time later.
    async def Get(self, request: pb.GetRequest, context: Any) -> None:
        async with self.calling("Get", context) as namespace, self.namespaces.transfer(namespace):
            check_count("keys", request.keys)
            write = self.writer(context)
            for name in names_of(namespace, request.keys):
                await self._send(name, write)

    async def _send(self, name: BlobName, write: Write) -> None:
        handle = await self.store.open(name)
        if handle is None:
            self.metrics.missed(name.namespace)
            await write(pb.GetResponse(missing=name.key))
            return
        try:
            await write(pb.GetResponse(header=header_of(name.key, handle.info)))
            size = self.namespaces.chunk_bytes(name.namespace, self.options.chunk_bytes)
            for piece in handle.pieces:
                for begin in range(0, len(piece), size):
                    chunk = frame_chunk(piece[begin : begin + size])
                    await self.namespaces.pace(name.namespace, len(chunk))
                    await write(chunk)
        finally:
            handle.close()
        self.metrics.moved("get", name.namespace, handle.info.num_bytes, shared=False)
