"""The store `memory+disk`: memory in front, disk behind.

    put    into memory; written to disk behind the caller's back, through a bounded queue
    get    from memory; else from disk, and into memory where there is room
    use    of either is one of both: the disk does not evict what memory serves all the time

What waits for the disk when the process is killed is lost, as is what the queue had no room for:
then memory alone has it. While the disk fails, memory serves alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary

from kvtier.errors import TierError, TierExhaustedError
from kvtier_tierd.stores.base import (
    BlobInfo,
    BlobName,
    BlobStore,
    Draft,
    Handle,
    SharedFile,
    StoreResources,
    StoreStats,
    filled,
)
from kvtier_tierd.stores.disk.store import DiskOptions, DiskStore
from kvtier_tierd.stores.memory import MemoryOptions, MemoryStore

logger = logging.getLogger(__name__)

# Blobs that wait for the disk are pinned; were they most of the memory, no put would find room.
BEHIND_SHARE = 0.25


@dataclass(frozen=True)
class LayeredOptions(MemoryOptions, DiskOptions):
    """The options of both stores."""

    kind: ClassVar[str] = "memory+disk"


class LayeredStore(BlobStore):
    """Memory in front of a disk; owns both stores.

    shed:         blobs that never got to disk; failed: times that the disk did not do its part.
    behind_bytes: of the memory that blobs may take which wait for the disk.
    """

    options_type = LayeredOptions

    def __init__(self, memory: MemoryStore, disk: BlobStore) -> None:
        self.memory, self.disk = memory, disk
        self.shed = self.failed = self.quarantined = 0
        self.behind_bytes = int(BEHIND_SHARE * memory.account.capacity_bytes)
        self._waiting_bytes = 0
        self._queue: asyncio.Queue[tuple[BlobName, Handle]] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        # The locks of blobs that are being brought back from disk; a lock goes with the last who
        # holds it.
        self._returning: WeakValueDictionary[BlobName, asyncio.Lock] = WeakValueDictionary()

    @classmethod
    def make(cls, options: LayeredOptions, resources: StoreResources) -> LayeredStore:
        # Before the memory is taken, which is slow and has to be undone.
        disk = DiskStore.make(options, resources)
        return cls(MemoryStore.make(options, resources), disk)

    @property
    def shared(self) -> SharedFile | None:
        return self.memory.shared

    async def start(self) -> None:
        await self.memory.start()
        await self.disk.start()
        self._writer = asyncio.create_task(self._write_behind())

    async def close(self) -> None:
        """Everything that waits for the disk gets there first."""
        if self._writer is not None:
            await self.settle()
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writer
        await self.disk.close()
        await self.memory.close()

    async def settle(self) -> None:
        """Wait until nothing waits for the disk."""
        await self._queue.join()

    async def exists(self, names: Sequence[BlobName]) -> list[bool]:
        in_memory = await self.memory.exists(names)
        on_disk = await self.disk.exists(names)
        return [a or b for a, b in zip(in_memory, on_disk, strict=True)]

    def check(self, name: BlobName, info: BlobInfo) -> None:
        self.memory.check(name, info)

    async def reserve(self, name: BlobName, info: BlobInfo) -> Draft:
        return await self.memory.reserve(name, info)

    async def commit(self, draft: Draft) -> None:
        await self.memory.commit(draft)
        handle = await self.memory.open(draft.name)
        if handle is None:
            return
        if self._waiting_bytes + handle.info.num_bytes <= self.behind_bytes:
            self._waiting_bytes += handle.info.num_bytes
            self._queue.put_nowait((draft.name, handle))
            return
        handle.close()
        self.shed += 1
        await self._delete_older(draft.name)

    async def _write_behind(self) -> None:
        while True:
            name, handle = await self._queue.get()
            try:
                await self._write(name, handle)
            except TierError as error:
                self._lost("a blob stays in memory only", error)
                self.shed += 1
                await self._delete_older(name)
            except Exception:
                # A caller that waits for the queue must not wait forever because of a bug.
                logger.exception("writing to disk failed unexpectedly")
                self.shed += 1
                await self._delete_older(name)
            finally:
                handle.close()
                self._waiting_bytes -= handle.info.num_bytes
                self._queue.task_done()

    async def _write(self, name: BlobName, handle: Handle) -> None:
        """Write a blob to disk while it is the one that memory serves: pinned blobs are not
        evicted, so another one has replaced it, or it was deleted."""
        if not self.memory.serves(name, handle):
            return
        draft = await filled(self.disk, name, handle.info, handle.pieces)
        await self.disk.commit(draft)
        if not self.memory.serves(name, handle):
            await self.disk.delete(name)

    async def _delete_older(self, name: BlobName) -> None:
        """Delete what is on disk of a name of which only memory has the latest blob: it would come
        back once memory has let go. Raises nothing."""
        try:
            await self.disk.delete(name)
        except TierError as error:
            self._lost("a blob could not be deleted", error)
        except Exception:
            logger.exception("deleting on disk failed unexpectedly")

    def _lost(self, what: str, error: TierError) -> None:
        """Log the first failure of the disk only; a full disk fails for every blob."""
        if not self.failed:
            logger.warning("%s: %s; later failures are only counted", what, error)
        self.failed += 1

    async def abort(self, draft: Draft) -> None:
        await self.memory.abort(draft)

    async def open(self, name: BlobName) -> Handle | None:
        handle = await self.memory.open(name)
        if handle is not None:
            self.disk.touch([name])
            return handle
        lock = self._returning.setdefault(name, asyncio.Lock())
        # One at a time, so that many readers of a blob bring one copy of it back.
        async with lock:
            return await self.memory.open(name) or await self._open_on_disk(name)

    async def _open_on_disk(self, name: BlobName) -> Handle | None:
        try:
            handle = await self.disk.open(name)
        except TierExhaustedError:
            # The memory that reading takes is exhausted: the disk is well.
            raise
        except TierError as error:
            self._lost("a blob on disk could not be read", error)
            return None
        if handle is None:
            return None
        try:
            promoted = await self._promote(name, handle)
        except BaseException:
            handle.close()
            raise
        if promoted is None:
            return handle
        handle.close()
        return promoted

    async def _promote(self, name: BlobName, handle: Handle) -> Handle | None:
        """The blob in memory, where there is room for it."""
        try:
            draft = await filled(self.memory, name, handle.info, handle.pieces)
        except TierError:
            return None
        # While it was copied it may have been replaced, deleted, or promoted by another call.
        if (await self.memory.exists([name]))[0] or not (await self.disk.exists([name]))[0]:
            await self.memory.abort(draft)
        else:
            await self.memory.commit(draft)
        return await self.memory.open(name)

    def touch(self, names: Iterable[BlobName]) -> None:
        names = list(names)
        self.memory.touch(names)
        self.disk.touch(names)

    async def delete(self, name: BlobName) -> bool:
        in_memory = await self.memory.delete(name)
        on_disk = await self.disk.delete(name)
        return in_memory or on_disk

    async def quarantine(self, name: BlobName) -> None:
        self.quarantined += (await self.exists([name]))[0]
        await self.memory.quarantine(name)
        await self.disk.quarantine(name)

    def stats(self) -> StoreStats:
        """Evictions are those of both; what memory lets go of may still be on disk."""
        memory, disk = self.memory.stats(), self.disk.stats()
        namespaces = {
            name: max(memory.namespaces.get(name, 0), disk.namespaces.get(name, 0))
            for name in memory.namespaces | disk.namespaces
        }
        return StoreStats(
            kind=self.kind,
            capacity_bytes=disk.capacity_bytes,
            used_bytes=max(memory.used_bytes, disk.used_bytes),
            blobs=max(memory.blobs, disk.blobs),
            evictions=memory.evictions + disk.evictions,
            quarantined=self.quarantined,
            shed=self.shed,
            namespaces=namespaces,
        )

    def check_integrity(self) -> list[str]:
        return self.memory.check_integrity() + self.disk.check_integrity()
