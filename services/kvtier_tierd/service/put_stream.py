"""Put: a header, then chunks of payload, staged until all of it has arrived."""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvtier.errors import UsageError
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits.budget import Budget
from kvtier_tierd.limits.namespaces import Namespaces
from kvtier_tierd.limits.progress import Progress
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.service.requests import info_of, names_of
from kvtier_tierd.service.staging import Staged
from kvtier_tierd.stores.base import BlobInfo, BlobName, BlobStore, fill

PutRequests = AsyncIterator[pb.PutRequest | memoryview]


class PutStreams:
    """The Puts of a service.

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
        max_blob_bytes: int,
        budget: Budget,
        stall_s: float,
    ) -> None:
        self._store, self._namespaces, self._metrics = store, namespaces, metrics
        self._max_blob_bytes, self._budget, self._stall_s = max_blob_bytes, budget, stall_s

    async def put(self, namespace: str, requests: PutRequests) -> pb.PutResponse:
        """One Put. Raises KvtierError where it makes no sense, stalls or finds no room."""
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
            with Staged(self._budget, namespace, info.num_bytes) as staged:
                await self._receive(staged, namespace, requests, progress)
                await self._keep(name, info, staged)
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

    async def _keep(self, name: BlobName, info: BlobInfo, staged: Staged) -> None:
        draft = await self._store.reserve(name, info)
        try:
            await fill(draft, staged.pieces())
        except BaseException:
            await self._store.abort(draft)
            raise
        await self._store.commit(draft)


__all__ = ["PutRequests", "PutStreams"]
