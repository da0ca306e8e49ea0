"""The store `memory`: blobs in one arena, the least recently used one goes first.

A blob that is deleted, replaced or evicted while it is being read is hidden at once; its bytes
stay set aside until the last handle closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from kvtier.errors import TierExhaustedError
from kvtier_tierd.stores.arena import Arena, pages
from kvtier_tierd.stores.base import (
    BlobInfo,
    BlobName,
    BlobStore,
    Draft,
    Handle,
    SharedFile,
    StoreResources,
    StoreStats,
)
from kvtier_tierd.stores.lru import Entry, LruAccount
from kvtier_tierd.stores.options import SIZE, Flag, StoreOptions


@dataclass
class Blob:
    """A blob's place in the memory, and its entry, which counts its readers."""

    name: BlobName
    info: BlobInfo
    offset: int
    entry: Entry


@dataclass(frozen=True)
class MemoryOptions(StoreOptions):
    """memory_bytes: of the arena."""

    kind: ClassVar[str] = "memory"

    memory_bytes: Annotated[
        int,
        Flag("--memory", "of the memory store, taken at the start (%(default)s)", SIZE, least=1),
    ] = 4 << 30


class MemoryStore(BlobStore):
    """Blobs in one arena.

    capacity_bytes: of the arena. Every blob costs whole pages of 4096 bytes.
    quotas:         bytes by namespace.
    directory:      for the file that clients on the same host map; None: no shared memory.
    """

    options_type = MemoryOptions
    # Once more than the second share of the capacity is used, least recently used blobs go until it
    # is the first share, so that writers find room in one piece.
    watermarks = (0.90, 0.95)

    def __init__(
        self,
        capacity_bytes: int,
        quotas: Mapping[str, int] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.arena = Arena(capacity_bytes, directory)
        self.account = LruAccount(self.arena.capacity_bytes, quotas)
        self.quarantined = 0
        self._blobs: dict[BlobName, Blob] = {}
        self._at: dict[int, BlobName] = {}

    @classmethod
    def make(cls, options: MemoryOptions, resources: StoreResources) -> MemoryStore:
        return cls(options.memory_bytes, resources.quotas, resources.shared_directory)

    @property
    def shared(self) -> SharedFile | None:
        return self.arena.shared

    async def start(self) -> None:
        """Do nothing: no blob outlives a memory store, so there is nothing to recover."""

    async def close(self) -> None:
        self.arena.close()

    async def exists(self, names: Sequence[BlobName]) -> list[bool]:
        return [name in self._blobs for name in names]

    def check(self, name: BlobName, info: BlobInfo) -> None:
        self.account.check(name.namespace, pages(info.num_bytes))

    async def reserve(self, name: BlobName, info: BlobInfo) -> Draft:
        size = pages(info.num_bytes)
        for victim in self.account.plan(name.namespace, size):
            self._forget(victim, evicted=True)
        offset = self.arena.allocate(size)
        if offset is None:
            self._join_room(name.namespace, size)
            offset = self.arena.allocate(size)
            assert offset is not None, "room was made in one piece"
        self.account.reserve(name.namespace, size)
        return Draft(name, info, self.arena.view(offset, info.num_bytes), offset)

    def _join_room(self, namespace: str, size: int) -> None:
        """Enough bytes are free, but not in one piece: also evict who is between them.

        Beginning with the least recently used one; its neighbours may be more recent, but evicting
        in order until there happens to be a piece could empty the store.
        """
        for name in self.account.entries:
            around = self.arena.stretch(self._blobs[name].offset, size, self._is_movable)
            if around is not None:
                for offset in around:
                    self._forget(self._at[offset], evicted=True)
                return
        raise TierExhaustedError(
            f"no {size} bytes in one piece for namespace {namespace!r}: everything that is "
            "left is being read or written"
        )

    def _is_movable(self, offset: int) -> bool:
        name = self._at.get(offset)
        return name is not None and not self._blobs[name].entry.pins

    async def commit(self, draft: Draft) -> None:
        assert draft.offset is not None
        name, size = draft.name, pages(draft.info.num_bytes)
        if name in self._blobs:
            self._forget(name)
        self.account.release(name.namespace, size)
        entry = self.account.add(name, size)
        self._blobs[name] = Blob(name, draft.info, draft.offset, entry)
        self._at[draft.offset] = name
        self._respect_watermarks()

    def _respect_watermarks(self) -> None:
        low, high = self.watermarks
        if self.account.used_bytes <= high * self.account.capacity_bytes:
            return
        for name, entry in list(self.account.entries.items())[:-1]:
            if self.account.used_bytes <= low * self.account.capacity_bytes:
                return
            if not entry.pins:
                self._forget(name, evicted=True)

    async def abort(self, draft: Draft) -> None:
        assert draft.offset is not None
        self.account.release(draft.name.namespace, pages(draft.info.num_bytes))
        self.arena.free(draft.offset)

    async def open(self, name: BlobName) -> Handle | None:
        blob = self._blobs.get(name)
        if blob is None:
            return None
        blob.entry.pins += 1
        self.account.touch(name)
        view = self.arena.view(blob.offset, blob.info.num_bytes).toreadonly()
        return Handle(blob.info, (view,), lambda: self._unpin(blob), blob.offset)

    def serves(self, name: BlobName, handle: Handle) -> bool:
        """Return whether an open handle's blob is the one that `open` would find now."""
        blob = self._blobs.get(name)
        # No other blob is where a pinned one lies.
        return blob is not None and blob.offset == handle.offset

    def touch(self, names: Iterable[BlobName]) -> None:
        for name in names:
            if name in self._blobs:
                self.account.touch(name)

    def _unpin(self, blob: Blob) -> None:
        """A handle of `blob` closed."""
        blob.entry.pins -= 1
        if not blob.entry.pins and self._blobs.get(blob.name) is not blob:
            self.account.release(blob.name.namespace, blob.entry.num_bytes)
            self.arena.free(blob.offset)

    async def delete(self, name: BlobName) -> bool:
        if name not in self._blobs:
            return False
        self._forget(name)
        return True

    async def quarantine(self, name: BlobName) -> None:
        self.quarantined += await self.delete(name)

    def _forget(self, name: BlobName, *, evicted: bool = False) -> None:
        blob = self._blobs.pop(name)
        del self._at[blob.offset]
        self.account.remove(name, evicted=evicted)
        if blob.entry.pins:
            self.account.reserve(name.namespace, blob.entry.num_bytes)
        else:
            self.arena.free(blob.offset)

    def stats(self) -> StoreStats:
        return self.account.stats(self.kind, self.quarantined)

    def check_integrity(self) -> list[str]:
        problems = self.account.check_integrity() + self.arena.check_integrity()
        if {name: blob.entry for name, blob in self._blobs.items()} != self.account.entries:
            problems.append("blobs and their account differ")
        if self._at != {blob.offset: name for name, blob in self._blobs.items()}:
            problems.append("blobs are not where they should be")
        return problems
