"""RPCs that move no payload: Exists, Delete, Quarantine and Stats."""

from __future__ import annotations

import asyncio

import numpy as np

from kvtier.v1 import tier_pb2 as pb
from kvtier_tierd.limits.namespaces import Namespaces
from kvtier_tierd.monitoring.metrics import TierMetrics
from kvtier_tierd.service.requests import MAX_KEYS, check_count, names_of
from kvtier_tierd.service.verifying import is_intact
from kvtier_tierd.stores.base import BlobStore

# Other calls have a turn after so many keys were looked up.
KEYS_A_TURN = 1 << 11
DELETED_TOGETHER = 1 << 8


class Lookups:
    """Each method answers one RPC, and raises KvtierError for what a request may not ask."""

    def __init__(self, store: BlobStore, namespaces: Namespaces, metrics: TierMetrics) -> None:
        self._store, self._namespaces, self._metrics = store, namespaces, metrics

    async def exists(self, namespace: str, request: pb.ExistsRequest) -> pb.ExistsResponse:
        check_count("keys", request.keys, MAX_KEYS)
        held: list[bool] = []
        for begin in range(0, len(request.keys), KEYS_A_TURN):
            keys = request.keys[begin : begin + KEYS_A_TURN]
            held += await self._store.exists(names_of(namespace, keys))
            await asyncio.sleep(0)
        run = held.index(False) if False in held else len(held)
        present = np.packbits(np.array(held, bool), bitorder="little").tobytes()
        self._metrics.looked_up(namespace, sum(held), len(held))
        return pb.ExistsResponse(leading_run=run, present=present)

    async def delete(self, namespace: str, request: pb.DeleteRequest) -> pb.DeleteResponse:
        check_count("keys", request.keys)
        names, deleted = names_of(namespace, request.keys), 0
        for begin in range(0, len(names), DELETED_TOGETHER):
            some = names[begin : begin + DELETED_TOGETHER]
            # Together, because a disk can write many deletions at once.
            deleted += sum(await asyncio.gather(*(self._store.delete(name) for name in some)))
        return pb.DeleteResponse(deleted=deleted)

    async def quarantine(
        self, namespace: str, request: pb.QuarantineRequest
    ) -> pb.QuarantineResponse:
        """A client says that these do not verify: those that do not verify here, either, are taken
        out of service."""
        check_count("keys", request.keys)
        bad = []
        async with self._namespaces.transfer(namespace):
            for name in names_of(namespace, dict.fromkeys(request.keys)):
                handle = await self._store.open(name)
                if handle is None:
                    continue
                try:
                    fine = await is_intact(name, handle)
                finally:
                    handle.close()
                if not fine:
                    await self._store.quarantine(name)
                    self._metrics.quarantined(namespace)
                    bad.append(name.key)
        return pb.QuarantineResponse(quarantined=bad)

    def stats(self, namespace: str) -> pb.StatsResponse:
        stats = self._store.stats()
        quota = self._namespaces.limits(namespace).quota_bytes
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


__all__ = ["Lookups"]
