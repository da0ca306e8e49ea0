"""Get: for each blob a header and its payload in chunks, or that it is missing."""

from __future__ import annotations

from kvtier.tier.wire.framing import frame_chunk
from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits.namespaces import Namespaces
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.service.calls import Write
from kvtier_tierd.service.requests import check_count, header_of, names_of
from kvtier_tierd.stores.base import BlobName, BlobStore


class GetStreams:
    """The Gets of a service. chunk_bytes: the longest chunk that is sent."""

    def __init__(
        self, store: BlobStore, namespaces: Namespaces, metrics: TierMetrics, chunk_bytes: int
    ) -> None:
        self._store, self._namespaces, self._metrics = store, namespaces, metrics
        self._chunk_bytes = chunk_bytes

    async def get(self, namespace: str, request: pb.GetRequest, write: Write) -> None:
        """One Get. Raises KvtierError where it makes no sense or its client stalls."""
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


__all__ = ["GetStreams"]
