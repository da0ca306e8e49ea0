"""The store `mooncake`: blobs in Mooncake Store, the memory of several tier services as one.

    tier service A ─┐  register, place, lease, evict   ┌─────────────────┐
    tier service B ─┼──────────────────────────────────┤ mooncake_master │
    tier service C ─┘                                  └─────────────────┘
          └── bytes, straight between the segments that the services contribute

Promised:

    sharing   What is committed on one service is found on all. What `open` returns is what was
              committed, or does not verify.
    a peer    A blob lives in one segment (or `replicas`), the writer's own where that has room.
    dies      When the process that has it dies it is a miss. A service finds out by a read of its
              own that fails; until then, or until the master drops the segment (its client_ttl,
              10 s), `exists` says otherwise. Other blobs are not concerned.
    time      A call ends within about `timeout_s`; a commit within TRIES times that, where it has
              to be placed anew. While the master is away, at once: reads miss, writes raise
              TierUnavailableError. It comes back by itself.

Not promised:

    room      Capacity and quotas bind what THIS service has put, least recently used first, as far
              as it knows; others count what they put in the same namespace. The master evicts
              besides, by leases, when segments are full, so stats are an upper bound until a
              lookup corrects them. `exists` gives a lease, which the master counts as a use.
    pins      A handle is a copy: it outlives eviction and delete, and keeps nothing in the store.
              Delete, replace and evict do not wait for leases: who reads that very blob from
              another service may get bytes that do not verify.
    races     Two services that put one name at a time both succeed, and the first one's bytes stay.
              If that one is killed meanwhile there are none, and commits of that name have no
              effect while the master waits for it (its put_start_discard_timeout_sec, 30 s).
    restarts  Nothing survives the master: a new one knows the services' segments, but no blobs.

Peers are trusted: a host that reaches the master or a segment's port reads and writes everything,
without TLS. What the C++ client is like is in link.py.

A blob is one object, so it is there whole or not at all; the parts that describe it follow the
payload, which so begins at a page of the staging memory:

    object  0           num_bytes
            [ payload ][ layout ][ checksum 16 | num_bytes 8 | layout's bytes 4 | magic 8 ]
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvtier.errors import TierExhaustedError, TierUnavailableError
from kvtier_tierd.stores.arena import Arena
from kvtier_tierd.stores.base import (
    BlobInfo,
    BlobName,
    BlobStore,
    Draft,
    Handle,
    StoreResources,
    StoreStats,
)
from kvtier_tierd.stores.lru import LruAccount
from kvtier_tierd.stores.mooncake.link import (
    GONE,
    NO_ROOM,
    NOT_FOUND,
    NOT_READY,
    TRANSFER_FAILED,
    Extent,
    MooncakeLink,
)
from kvtier_tierd.stores.mooncake.options import MooncakeOptions
from kvtier_tierd.stores.mooncake.segments import SilentSegments

FOOTER = struct.Struct("<16sQI8s")
MAGIC = b"kvtier/1"
TRIES = 4  # tries of a put that found no room or a dead segment; the master places each anew
RETRY_S = 0.05  # for the master to evict


def object_bytes(info: BlobInfo) -> int:
    """Return the bytes that a blob costs."""
    return info.num_bytes + len(info.layout) + FOOTER.size


def trailer(info: BlobInfo) -> bytes:
    """Return the bytes that follow the payload."""
    return info.layout + FOOTER.pack(info.checksum, info.num_bytes, len(info.layout), MAGIC)


def parse_trailer(content: memoryview) -> BlobInfo | None:
    """Return what the trailer of a whole object says; None where the object is none of ours."""
    if len(content) < FOOTER.size:
        return None
    checksum, num_bytes, layout_bytes, magic = FOOTER.unpack(content[-FOOTER.size :])
    if magic != MAGIC or num_bytes + layout_bytes + FOOTER.size != len(content) or not num_bytes:
        return None
    return BlobInfo(num_bytes, bytes(content[num_bytes : num_bytes + layout_bytes]), checksum)


class MooncakeDraft(Draft):
    def __init__(self, name: BlobName, info: BlobInfo, extent: Extent) -> None:
        super().__init__(name, info, extent.arena.view(extent.offset, info.num_bytes))
        self.extent = extent


class MooncakeStore(BlobStore):
    """Blobs in the memory of several services.

    quotas:    bytes by namespace, of what this service puts.
    link:      a started one of several stores in this process, which `close` leaves alone.
    """

    options_type = MooncakeOptions

    def __init__(
        self,
        options: MooncakeOptions,
        quotas: Mapping[str, int] | None = None,
        link: MooncakeLink | None = None,
    ) -> None:
        self.options = options
        self.account = LruAccount(options.put_bytes, quotas)
        self.quarantined = 0
        self._link = MooncakeLink(options) if link is None else link
        self._owns_link = link is None
        self._silent = SilentSegments(self._link)
        self._condemned: set[BlobName] = set()
        self.arena = Arena(options.buffer_bytes)
        self._base = int(np.frombuffer(self.arena.memory, np.uint8).ctypes.data)

    @classmethod
    def make(cls, options: MooncakeOptions, resources: StoreResources) -> MooncakeStore:
        return cls(options, resources.quotas)

    async def start(self) -> None:
        if self._owns_link:
            await self._link.start()
        code = await self._link.call("register_buffer", self._base, self.arena.size)
        if code != 0:
            raise TierUnavailableError(f"--mooncake-buffer {self.arena.size}: register: {code}")

    async def close(self) -> None:
        with contextlib.suppress(TierUnavailableError):
            await self._link.call("unregister_buffer", self._base)
        if self._owns_link:
            await self._link.close()
        if self._link.closed:
            self.arena.close()

    async def exists(self, names: Sequence[BlobName]) -> list[bool]:
        keys = [self._key(name) for name in names]
        try:
            codes = await self._link.call("batch_is_exist", keys)
            lost = await self._silent.lost(keys)
        except TierUnavailableError:
            return [False] * len(names)
        for name, code in zip(names, codes, strict=True):
            if code == 0:
                self._forget(name)
        return [
            code == 1 and key not in lost and name not in self._condemned
            for name, key, code in zip(names, keys, codes, strict=True)
        ]

    def check(self, name: BlobName, info: BlobInfo) -> None:
        self._link.check()
        self.account.check(name.namespace, object_bytes(info))

    async def reserve(self, name: BlobName, info: BlobInfo) -> Draft:
        self.check(name, info)
        size = object_bytes(info)
        victims = self.account.plan(name.namespace, size)
        draft = MooncakeDraft(name, info, Extent(self.arena, size))
        for victim in victims:
            self._forget(victim, evicted=True)
        self.account.reserve(name.namespace, size)
        try:
            # If the master is away now, it evicts them some day, or dies and forgets them.
            with contextlib.suppress(TierUnavailableError):
                if victims:
                    keys = [self._key(victim) for victim in victims]
                    await self._link.call("batch_remove", keys, True)
        except BaseException:
            await self.abort(draft)
            raise
        return draft

    async def commit(self, draft: Draft) -> None:
        """Commit a draft as the interface says. After a failure the blob may be there, or the one
        that was."""
        assert isinstance(draft, MooncakeDraft)
        name, size = draft.name, draft.extent.num_bytes
        try:
            end = draft.extent.offset + size
            begin = draft.extent.offset + draft.info.num_bytes
            self.arena.memory[begin:end] = trailer(draft.info)
            await self._put(self._key(name), draft.extent)
        finally:
            self.account.release(name.namespace, size)
            draft.extent.free()
        self._forget(name)
        self._condemned.discard(name)
        self.account.add(name, size)

    async def _put(self, key: str, extent: Extent) -> None:
        """Put, not upsert: that would cut off another service that is putting the same blob, and
        the master keeps such memory from all of them for ten minutes. The first put is kept."""
        if await self._link.call("is_exist", key) == 1:
            await self._link.call("remove", key, True)
        arguments = (key, self._base + extent.offset, extent.num_bytes, self._link.placement)
        code = NO_ROOM
        for number in range(TRIES):
            if number:
                await asyncio.sleep(RETRY_S)
            code = await self._link.call("put_from", *arguments, extent=extent)
            if code not in (NO_ROOM, TRANSFER_FAILED, NOT_FOUND):
                break
        if code == NO_ROOM:
            raise TierExhaustedError(f"mooncake has no room for {extent.num_bytes} bytes")
        if code != 0:
            raise TierUnavailableError(f"--mooncake-master {self.options.master}: put: {code}")

    async def abort(self, draft: Draft) -> None:
        assert isinstance(draft, MooncakeDraft)
        self.account.release(draft.name.namespace, draft.extent.num_bytes)
        draft.extent.free()

    async def open(self, name: BlobName) -> Handle | None:
        """Open a blob as the interface says; raises TierExhaustedError when no staging memory is
        left."""
        if name in self._condemned:
            return None
        key = self._key(name)
        try:
            size = await self._link.call("get_size", key)
            if size <= 0:
                self._missed(name, size)
                return None
            if await self._silent.lost([key]):
                return None
            extent = Extent(self.arena, size)
            try:
                address = self._base + extent.offset
                got = await self._link.call("get_into", key, address, size, extent=extent)
            except BaseException:
                extent.free()
                raise
        except TierUnavailableError:
            return None
        if got == TRANSFER_FAILED:
            extent.free()
            with contextlib.suppress(TierUnavailableError):
                await self._silent.note(key)
            return None
        info = parse_trailer(self.arena.view(extent.offset, size)) if got == size else None
        if info is None:
            extent.free()
            self._missed(name, got)
            return None
        self.touch([name])
        view = self.arena.view(extent.offset, info.num_bytes).toreadonly()
        return Handle(info, (view,), extent.free)

    def _missed(self, name: BlobName, code: int) -> None:
        """Forget a blob that the master has never heard of; where its segment is only unreachable,
        it may come back."""
        if code in (NOT_FOUND, GONE):
            self._forget(name)

    def touch(self, names: Iterable[BlobName]) -> None:
        """Note uses as the interface says, of what this service has put; the master is not told."""
        for name in names:
            if name in self.account.entries:
                self.account.touch(name)

    async def delete(self, name: BlobName) -> bool:
        code = await self._link.call("remove", self._key(name), True)
        if code not in (0, NOT_FOUND, GONE, NOT_READY):
            raise TierUnavailableError(f"--mooncake-master {self.options.master}: remove: {code}")
        self._forget(name)
        return bool(code == 0)

    async def quarantine(self, name: BlobName) -> None:
        """Quarantine a blob as the interface says. Where this raises, this service, but not the
        others, holds to it."""
        self._condemned.add(name)
        self.quarantined += await self.delete(name)
        self._condemned.discard(name)

    def stats(self) -> StoreStats:
        """The figures of what this service has put."""
        return self.account.stats(self.kind, self.quarantined)

    def check_integrity(self) -> list[str]:
        return self.account.check_integrity() + self.arena.check_integrity()

    def _forget(self, name: BlobName, *, evicted: bool = False) -> None:
        if name in self.account.entries:
            self.account.remove(name, evicted=evicted)

    def _key(self, name: BlobName) -> str:
        return f"{self.options.prefix}/{name.namespace}/{name.key.hex()}"
