"""The interface of a store: named, immutable blobs under a byte budget.

A blob comes and goes in two steps each, so that its bytes are moved once and by the side that can
(a gRPC stream, or a client that shares the memory):

    put    reserve(name, info) -> Draft    fill Draft.buffer    commit(draft) | abort(draft)
           a commit that fails or is cancelled has given the room back; there is no abort after it
    get    open(name) -> Handle            read Handle.pieces   handle.close()

Ownership: a Draft's buffer is the caller's until commit or abort, exactly one of which must be
called. A Handle's pieces stay valid until `close`; an open blob is pinned, that is, never evicted
or reused; deleting it hides it at once and frees its bytes when the last handle closes.

Concurrency: one event loop owns a store and calls it; a method that blocks (disk, network) moves
its work to threads of its own. Buffers may be filled and read from any thread.

Durability and failures: a committed blob may vanish at any time (it is a cache), but what `open`
returns is what was committed, or it does not verify against its checksum.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kvtier_tierd.limits import Budget
from kvtier_tierd.stores.options import StoreOptions

Buffer = memoryview
COPY_BYTES = 1 << 20


class BlobName(NamedTuple):
    """The name of a blob. The service refuses what cannot be one, and what cannot be a BlobInfo.

    namespace: whose it is, at most 200 bytes of UTF-8; namespaces never see each other's blobs.
    key:       32 bytes, unique in its namespace (kvtier.tier.blobs.keys).
    """

    namespace: str
    key: bytes


@dataclass(frozen=True)
class BlobInfo:
    """The description kept beside a payload; opaque to stores.

    num_bytes: of the payload, at least 1.
    layout:    what the bytes mean: a serialized kvtier.v1.Layout, at most 4096 bytes.
    checksum:  16 bytes, kvtier.tier.blobs.payload.checksum.
    """

    num_bytes: int
    layout: bytes
    checksum: bytes


@dataclass(eq=False)
class Draft:
    """A blob being written.

    buffer: `num_bytes` writable bytes, contents undefined at first.
    offset: where they are in the memory shared with clients, or None.
    """

    name: BlobName
    info: BlobInfo
    buffer: Buffer
    offset: int | None = None


@dataclass(eq=False)
class Handle:
    """A blob being read.

    pieces: its payload, in order, read-only.
    unpin:  what the store does when it is closed.
    offset: where it begins in the memory shared with clients, or None.
    """

    info: BlobInfo
    pieces: Sequence[Buffer]
    unpin: Callable[[], None] | None
    offset: int | None = None

    def close(self) -> None:
        """Unpin the blob. Calling it again does nothing."""
        unpin, self.unpin = self.unpin, None
        if unpin is not None:
            unpin()


class SharedFile(NamedTuple):
    """Memory of a store that clients on the same host may map. token: what it begins with, known to
    those alone who can read it."""

    path: str
    num_bytes: int
    token: bytes


@dataclass(frozen=True)
class StoreStats:
    """The state of a store. Bytes count payloads as the store's budget does.

    evictions, quarantined: since it was opened.
    shed:       blobs that were to be written to disk as well and never were, since it was opened.
    namespaces: bytes by namespace.
    """

    kind: str
    capacity_bytes: int
    used_bytes: int
    blobs: int
    evictions: int = 0
    quarantined: int = 0
    shed: int = 0
    namespaces: dict[str, int] = field(default_factory=dict)


class StoreResources(NamedTuple):
    """The resources that a service gives its store, whichever that is.

    quotas:           bytes by namespace.
    shared_directory: where memory that clients on the same host map is a file; None: nowhere.
    budget:           of what the store reads into memory that is not its own.
    """

    quotas: Mapping[str, int]
    shared_directory: Path | None
    budget: Budget


class BlobStore(ABC):
    """A place for blobs. options_type: what the store is told; it has the store's name.

    Errors are those of kvtier.errors:

    TierExhaustedError    the blob can not be made room for: larger than the store or than its
                          namespace's quota, everything else pinned, disk full
    TierUnavailableError  the medium fails: read-only or broken disk, network down
    """

    options_type: ClassVar[type[StoreOptions]]

    @classmethod
    @abstractmethod
    def make(cls, options: Any, resources: StoreResources) -> BlobStore:
        """A store for a service, not started. options: of `options_type`."""

    @property
    def kind(self) -> str:
        """The store's name in --store."""
        return self.options_type.kind

    @property
    def shared(self) -> SharedFile | None:
        """The memory that `Draft.offset` and `Handle.offset` are in; None where clients may map
        none."""
        return None

    @abstractmethod
    async def start(self) -> None:
        """Open the medium and recover what an earlier run left; called once, first.

        Raises TierUnavailableError, naming the medium, when it cannot be used at all.
        """

    @abstractmethod
    async def close(self) -> None:
        """Flush and release everything; called once, last."""

    @abstractmethod
    async def exists(self, names: Sequence[BlobName]) -> list[bool]:
        """Return for each blob whether `open` would probably find it now. This does not count as a
        use."""

    @abstractmethod
    def check(self, name: BlobName, info: BlobInfo) -> None:
        """Raise what `reserve` would for a blob that there could never be room for. Changes
        nothing, and promises nothing."""

    @abstractmethod
    async def reserve(self, name: BlobName, info: BlobInfo) -> Draft:
        """Room for a new blob, evicting least recently used ones if need be; see `Draft`."""

    @abstractmethod
    async def commit(self, draft: Draft) -> None:
        """Publish a filled draft under its name, replacing what was there."""

    @abstractmethod
    async def abort(self, draft: Draft) -> None:
        """Give a draft's room back."""

    @abstractmethod
    async def open(self, name: BlobName) -> Handle | None:
        """Pin a blob for reading and count it as used; None where there is none."""

    @abstractmethod
    def touch(self, names: Iterable[BlobName]) -> None:
        """Count a use of those that are there, as `open` does, without reading them: for blobs that
        are served from elsewhere. Cheap; neither waits nor fails."""

    @abstractmethod
    async def delete(self, name: BlobName) -> bool:
        """Forget a blob; returns whether there was one."""

    @abstractmethod
    async def quarantine(self, name: BlobName) -> None:
        """Take a blob that does not verify out of service; it is never served again."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the store's present state; cheap."""

    @abstractmethod
    def check_integrity(self) -> list[str]:
        """Violations of the store's invariants; empty when healthy. For tests; may be slow, and
        means nothing while a commit is under way."""


async def filled(
    store: BlobStore, name: BlobName, info: BlobInfo, pieces: Iterable[Buffer]
) -> Draft:
    """Return a draft of a payload, which is copied in steps: a large blob must not keep the event
    loop from the other calls. Raises TierError where there is no room for it."""
    draft = await store.reserve(name, info)
    try:
        position = 0
        for piece in pieces:
            for begin in range(0, len(piece), COPY_BYTES):
                block = piece[begin : begin + COPY_BYTES]
                draft.buffer[position : position + len(block)] = block
                position += len(block)
                await asyncio.sleep(0)
    except BaseException:
        await store.abort(draft)
        raise
    return draft
